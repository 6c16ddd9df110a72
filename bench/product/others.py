"""Lossless sizes and CPU seconds of ckptz and of other tools, on files and on training states.

    python -m bench.product.others [--model FILE] [--rounds N] [--ptwm PYTHON]

Inputs are the weights of `bench.product.lossless` in fp32 and bf16, and the training state of the demo's
shapes from `bench.product.tensor_sizes`, as a full file and as a later delta. ckptz, lmzip and moonclip write
and read files in a folder in memory, on one thread; ZipNN, OpenZL and ptwm compress in memory. All run in
turn. Speeds are raw MB per CPU second, which other programs on the machine affect less than wall time.

ptwm 1.1.0 needs Python 3.12 and torch: it is measured with the Python of an environment that has both.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file as save_plain

from bench.core.measure import BENCH, Row, cpu_seconds, machine, parser_of, save_rows
from bench.core.peers import Peers
from bench.core.report import finish
from bench.core.sources import Tensors, as_bf16, concatenated, model_path, n_bytes, read_tensors
from bench.core.tiny_gpt import TinyGPT
from bench.product.whole_state import states
from ckptz.torch import load_file, save_file

KINDS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
TITLES: Final = {
    "zipnn": "ZipNN 0.5.4, one blob",
    "openzl": "OpenZL 0.3.0, one blob",
    "openzl each": "OpenZL 0.3.0, each tensor",
}
Cost = tuple[float, float, int]  # CPU seconds to compress and to decompress, and bytes


def as_torch(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Copy tensors of bit patterns into torch tensors of a dtype."""

    def converted(patterns: np.ndarray, shape: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(patterns.view(f"i{patterns.itemsize}").copy()).view(dtype).reshape(shape)

    return {name: converted(tensor.flat, tensor.shape) for name, tensor in tensors.items()}


def ckptz_costs(tensors: Mapping[str, torch.Tensor], path: Path, base: Path | None = None) -> dict[str, Cost]:
    """Measure a ckptz file once with each of the efforts "fast" and "default", and compare its tensors."""
    measured: dict[str, Cost] = {}
    for effort in ("fast", "default"):
        _, save = cpu_seconds(
            lambda effort=effort: save_file(tensors, path, base=base, effort=effort, jobs=1)
        )
        loaded, load = cpu_seconds(lambda: load_file(path, jobs=1))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        measured[f"ckptz, {effort}"] = save, load, path.stat().st_size
    return measured


def once(kind: str, tensors: Tensors, folder: Path, peers: Peers, ptwm: Path | None) -> Mapping[str, Cost]:
    """Measure every tool for weights once."""
    torch_tensors, plain = as_torch(tensors, KINDS[kind]), folder / f"{kind}.safetensors"
    save_plain(torch_tensors, plain)
    measured = ckptz_costs(torch_tensors, folder / "own.ckptz")
    ends = np.cumsum([len(tensor.flat) for tensor in tensors.values()]).tolist()
    dtype = str(KINDS[kind]).removeprefix("torch.")
    for tool, options in (("zipnn", {"threads": 1}), ("openzl", {}), ("openzl each", {"ends": ends})):
        seconds, size = peers.compress(tool, kind, dtype=dtype, **options)
        measured[TITLES[tool]] = seconds, peers.decompress(tool, kind), size
    measured["lmzip 1.3.0"] = peers.lmzip(plain)
    if ptwm is not None:
        command = [ptwm, BENCH / "core" / "ptwm_worker.py", plain]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        measured["ptwm 1.1.0, each tensor"] = tuple(json.loads(answer))
    return measured


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state by name, for tools without nested states."""
    moments = state["optimizer"]["state"].items()
    return state["model"] | {f"{i}.{key}": value for i, slots in moments for key, value in slots.items()}


def of_states(
    pair: Sequence[Mapping[str, torch.Tensor]], folder: Path, peers: Peers
) -> list[Mapping[str, Cost]]:
    """Measure ckptz and moonclip once, with a full file of the first state and a delta of the second."""
    plain, base = [folder / "before.safetensors", folder / "after.safetensors"], folder / "before.ckptz"
    for tensors, path in zip(pair, plain, strict=True):
        save_plain(dict(tensors), path)
    full = ckptz_costs(pair[0], base)
    delta = ckptz_costs(pair[1], folder / "after.ckptz", base)
    moonclip = peers.moonclip(*plain)
    return [
        costs | {"moonclip 0.3.1": moonclip_cost}
        for costs, moonclip_cost in zip((full, delta), moonclip, strict=True)
    ]


def rows_of(kind: str, raw: int, rounds: Sequence[Mapping[str, Cost]]) -> list[Row]:
    """Build a row for each tool: speeds in the best round, and CPU seconds relative to ckptz (median)."""
    rows = []
    for tool in rounds[0]:
        best = [min(costs[tool][i] for costs in rounds) for i in (0, 1)]
        relative = [
            statistics.median(costs[tool][i] / costs["ckptz, default"][i] for costs in rounds) for i in (0, 1)
        ]
        rows.append(
            {
                "tensors": kind,
                "tool": tool,
                "of raw": f"{rounds[0][tool][2] / raw:.4f}",
                "compress MB a CPU s": f"{raw / best[0] / 1e6:.0f}",
                "decompress MB a CPU s": f"{raw / best[1] / 1e6:.0f}",
                "compress, times the CPU of ckptz": f"{relative[0]:.2f}",
                "decompress, times the CPU of ckptz": f"{relative[1]:.2f}",
            }
        )
    return rows


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="safetensors file with fp32 weights")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--ptwm", type=Path, help="Python 3.12 of an environment that has ptwm 1.1.0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fp32 = read_tensors(options.model or model_path(), "F32")
    pair = [flat(state) for state in states({n: tuple(p.shape) for n, p in TinyGPT().named_parameters()})]
    rows: list[Row] = []
    with Peers() as peers, tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        for kind, tensors in (("fp32", fp32), ("bf16", as_bf16(fp32))):
            peers.load(kind, concatenated(tensors))
            once(kind, tensors, folder, peers, None)  # compiles, and warms up
            rounds = [once(kind, tensors, folder, peers, options.ptwm) for _ in range(options.rounds)]
            rows += rows_of(kind, n_bytes(tensors), rounds)
        of_states(pair, folder, peers)
        raw = sum(tensor.nbytes for tensor in pair[1].values())
        by_file = zip(*[of_states(pair, folder, peers) for _ in range(options.rounds)], strict=True)
        for kind, rounds in zip(("state, full", "state, delta"), by_file, strict=True):
            rows += rows_of(kind, raw, rounds)
        facts = machine(**peers.versions())
    save_rows("others", rows)
    finish("others", facts, rows)


if __name__ == "__main__":
    main()
