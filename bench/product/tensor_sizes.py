"""Speed by tensor size: few large tensors, the tensors of a small GPT, and 100,000 tiny tensors.

    python -m bench.product.tensor_sizes [--rounds N] [--folder DIR]

The states have fp32 weights and both moments of Adam, synthetic as in `bench.product.whole_state`: one has a
transformer's matrices of millions of elements, one the shapes of the demo's GPT. The tiny tensors have 16
values each. Files are in a folder in memory; one thread writes and reads them. Speeds are raw MB per CPU
second of the process, which other programs on the machine affect less. Each is compared with torch.save and
torch.load of the same state, or with safetensors for the tiny tensors, in turn in the same process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.numpy
import torch

from bench.core.measure import Row, Timing, cpu_seconds, interleave, machine, parser_of, save_rows
from bench.core.report import finish
from bench.core.tiny_gpt import TinyGPT
from bench.product.whole_state import shapes, states, tensors_of
from ckptz import LOSSLESS, Grid
from ckptz import numpy as ckptz_numpy
from ckptz.torch import load_state, save_state

LARGE: Final = 20_000_000  # weights
N_TINY, TINY_VALUES = 100_000, 16

Cases = dict[str, Callable[[], object]]


def cpu_timings(cases: Cases, rounds: int) -> dict[str, Timing]:
    """Measure the CPU seconds of all cases in turn."""

    def timed(case: Callable[[], object]) -> Callable[[], float]:
        return lambda: cpu_seconds(case)[1]

    return interleave({name: timed(case) for name, case in cases.items()}, rounds)


def rows_of(
    tensors: str, raw: int, sizes: Mapping[str, int], timings: Mapping[str, Timing], peers: tuple[str, str]
) -> list[Row]:
    """Build a row for each file, with its CPU seconds relative to `peers`: a writer and a reader."""
    rows = []
    for file, size in sizes.items():
        save, load = timings[f"{file}, save"], timings[f"{file}, load"]
        rows.append(
            {
                "tensors": tensors,
                "file": file,
                "ratio": f"{raw / size:.2f}",
                "save MB a CPU s": f"{raw / save.best / 1e6:.0f}",
                "load MB a CPU s": f"{raw / load.best / 1e6:.0f}",
                "peer": " and ".join(peers),
                "save, times its CPU": f"{save.best / timings[peers[0]].best:.2f}",
                "load, times its CPU": f"{load.best / timings[peers[1]].best:.2f}",
            }
        )
    return rows


def of_states(name: str, parameters: Mapping[str, tuple[int, ...]], rounds: int, folder: Path) -> list[Row]:
    """Measure full files and deltas of a state, lossless and with the grid method."""
    before, after = states(parameters)
    raw, plain = sum(tensor.nbytes for tensor in tensors_of(after)), folder / "state.pt"
    torch.save(after, plain)
    cases: Cases = {
        "torch.save": lambda: torch.save(after, folder / "other.pt"),
        "torch.load": lambda: torch.load(plain),
    }
    sizes: dict[str, int] = {}
    for method, config in (("lossless", LOSSLESS), ("grid", Grid())):
        base, full, delta = (folder / f"{method}-{kind}.ckptz" for kind in ("base", "full", "delta"))
        save_state(before, base, config=config, jobs=1)
        for kind, path, options in (("full file", full, {}), ("delta", delta, {"base": base})):

            def save(path: Path = path, options: Any = options, config: Any = config) -> None:
                save_state(after, path, config=config, jobs=1, **options)

            save()
            sizes[f"{method}, {kind}"] = path.stat().st_size
            cases[f"{method}, {kind}, save"] = save
            cases[f"{method}, {kind}, load"] = lambda path=path: load_state(path, jobs=1)
    label = f"{name}: {len(tensors_of(after))} of {raw / 1e6:.0f} MB in all"
    return rows_of(label, raw, sizes, cpu_timings(cases, rounds), ("torch.save", "torch.load"))


def of_tiny(rounds: int, folder: Path) -> list[Row]:
    """Measure a lossless full file and a safetensors file of tiny tensors."""
    values = np.random.default_rng(0).standard_normal((N_TINY, TINY_VALUES), np.float32)
    tensors = {f"layers.{i}.scale": scale for i, scale in enumerate(values)}
    compressed, plain = folder / "tiny.ckptz", folder / "tiny.safetensors"
    cases: Cases = {
        "lossless, full file, save": lambda: ckptz_numpy.save_file(tensors, compressed, jobs=1),
        "lossless, full file, load": lambda: ckptz_numpy.load_file(compressed, jobs=1),
        "safetensors' save": lambda: safetensors.numpy.save_file(tensors, plain),
        "load": lambda: safetensors.numpy.load_file(plain),
    }
    timings = cpu_timings(cases, rounds)
    label = (
        f"tiny: {N_TINY:,} of {values.nbytes / 1e6:.1f} MB in all, {plain.stat().st_size / 1e6:.1f} MB plain"
    )
    sizes = {"lossless, full file": compressed.stat().st_size}
    return rows_of(label, values.nbytes, sizes, timings, ("safetensors' save", "load"))


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where files are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gpt = {name: tuple(parameter.shape) for name, parameter in TinyGPT().named_parameters()}
    rows: list[Row] = []
    for name, parameters in (("large", shapes(LARGE)), ("the demo's", gpt)):
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            rows += of_states(name, parameters, options.rounds, Path(temporary))
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        rows += of_tiny(options.rounds, Path(temporary))
    save_rows("tensor_sizes", rows)
    finish("tensor_sizes", machine(), rows)


if __name__ == "__main__":
    main()
