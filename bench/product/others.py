"""Lossless files of weights beside tools that take a file, and OpenZL for each tensor: sizes and CPU seconds.

    python -m bench.product.others [--model FILE] [--rounds N]

The weights of `bench.product.lossless`, fp32 and as bf16. ckptz and lmzip write and read files in a folder in
memory, one thread each; OpenZL has no files, so its blobs stay in memory. All run in turn, and speeds are raw
MB for each CPU second, which other programs on the machine change less than the clock. ptwm 1.1.0 needs
Python 3.12, and is not among them.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file as save_plain

from bench.core.measure import Row, cpu_seconds, machine, parser_of, save_rows
from bench.core.peers import Peers
from bench.core.report import finish
from bench.core.sources import Tensors, as_bf16, concatenated, model_path, n_bytes, read_tensors
from ckptz.torch import load_file, save_file

KINDS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
TITLES: Final = {"openzl": "OpenZL 0.3.0, one blob", "openzl each": "OpenZL 0.3.0, each tensor"}
Measured = tuple[float, float, int]  # CPU seconds to compress and to decompress, and bytes


def as_torch(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same tensors for torch."""

    def of(patterns: np.ndarray, shape: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(patterns.view(f"i{patterns.itemsize}").copy()).view(dtype).reshape(shape)

    return {name: of(tensor.flat, tensor.shape) for name, tensor in tensors.items()}


def once(kind: str, tensors: Tensors, folder: Path, peers: Peers) -> Mapping[str, Measured]:
    """Measure every tool once."""
    given, plain, path = as_torch(tensors, KINDS[kind]), folder / f"{kind}.safetensors", folder / "own.ckptz"
    save_plain(given, plain)
    measured: dict[str, Measured] = {}
    for effort in ("fast", "default"):
        _, save = cpu_seconds(lambda effort=effort: save_file(given, path, effort=effort, jobs=1))
        loaded, load = cpu_seconds(lambda: load_file(path, jobs=1))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in given.items())
        measured[f"ckptz, {effort}"] = save, load, path.stat().st_size
    ends = np.cumsum([len(tensor.flat) for tensor in tensors.values()]).tolist()
    dtype = str(KINDS[kind]).removeprefix("torch.")
    for tool, options in (("openzl", {}), ("openzl each", {"ends": ends})):
        seconds, size = peers.compress(tool, kind, dtype=dtype, **options)
        measured[TITLES[tool]] = seconds, peers.decompress(tool, kind), size
    measured["lmzip 1.3.0"] = peers.lmzip(plain)
    return measured


def rows_of(kind: str, raw: int, rounds: Sequence[Mapping[str, Measured]]) -> list[Row]:
    """One row for each tool, by the best of all rounds."""
    rows = []
    for tool in rounds[0]:
        best = [min(one[tool][way] for one in rounds) for way in (0, 1)]
        own = [
            statistics.median(one[tool][way] / one["ckptz, default"][way] for one in rounds) for way in (0, 1)
        ]
        rows.append(
            {
                "weights": kind,
                "tool": tool,
                "of raw": f"{rounds[0][tool][2] / raw:.4f}",
                "compress MB a CPU s": f"{raw / best[0] / 1e6:.0f}",
                "decompress MB a CPU s": f"{raw / best[1] / 1e6:.0f}",
                "compress, times the CPU of ckptz": f"{own[0]:.2f}",
                "decompress, times the CPU of ckptz": f"{own[1]:.2f}",
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="safetensors file with fp32 weights")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fp32 = read_tensors(options.model or model_path(), "F32")
    rows: list[Row] = []
    with Peers() as peers, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for kind, tensors in (("fp32", fp32), ("bf16", as_bf16(fp32))):
            peers.load(kind, concatenated(tensors))
            once(kind, tensors, Path(folder), peers)  # compiles, and warms up
            rounds = [once(kind, tensors, Path(folder), peers) for _ in range(options.rounds)]
            rows += rows_of(kind, n_bytes(tensors), rounds)
        facts = machine(**peers.versions())
    save_rows("others", rows)
    finish("others", facts, rows)


if __name__ == "__main__":
    main()
