"""Speed of the grid method on training states: one thread, compared with memcpy, user and system CPU time.

    python -m bench.product.whole_state [--weights MILLIONS] [--rounds N] [--folder DIR]

The state is a synthetic fp32 state of a transformer under AdamW: weights have a scale for each row, second
moments are products of rows and columns with noise, and first moments are proportional to the root of the
second. The delta is of a later state, in which weights have moved by half a grid step, second moments by a
third of an octave, and first moments are drawn anew. Files are in a folder in memory. Times are those of
complete calls of `save_state` and `load_state`, including planning, checksums and index. Faults are pages of
4 KiB that the kernel had to clear.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.core.measure import Row, Timing, interleave, machine, parser_of, save_rows, timed, verdict
from bench.core.report import finish
from ckptz import Grid
from ckptz.torch import load_state, save_state

WIDTH, INNER, VOCABULARY = 1024, 4096, 8192
SPREAD: Final = 0.02
MOVEMENT: Final = 0.2  # of the spread: half a grid step
TARGETS: Final = {"delta, encode": 80, "delta, restore": 25}  # times as slow as memcpy
SYSTEM_TARGET: Final = 0.05  # of the CPU seconds of the delta's encoding

State = dict[str, Any]


# --- the state ----------------------------------------------------------------------------------


def shapes(n_weights: int) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes, by name, of a transformer with about `n_weights` weights."""
    parameters: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCABULARY, WIDTH)}
    n_left, layer = n_weights - VOCABULARY * WIDTH, 0
    while n_left > 0:
        block = {"attn.qkv.weight": (3 * WIDTH, WIDTH), "attn.out.weight": (WIDTH, WIDTH)}
        block |= {"up.weight": (INNER, WIDTH), "down.weight": (WIDTH, INNER), "norm.weight": (WIDTH,)}
        parameters |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
        n_left -= sum(int(np.prod(shape)) for shape in block.values())
        layer += 1
    return parameters


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw standard normal numbers, float32."""
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def states(parameters: Mapping[str, tuple[int, ...]]) -> tuple[State, State]:
    """Return two states of parameters of these shapes: one, and a later one of the same run."""
    rng = np.random.default_rng(0)
    before, after = ({"model": {}, "optimizer": {"state": {}}} for _ in range(2))
    for i, (name, shape) in enumerate(parameters.items()):
        scale = SPREAD * torch.exp2(0.5 * normal(rng, (shape[0], *(1 for _ in shape[1:]))))
        weight = scale * normal(rng, shape)
        level = -24 + 2 * normal(rng, scale.shape[:1] + (1,) * (len(shape) - 1))
        if len(shape) > 1:
            level = level + normal(rng, (1, *shape[1:]))
        level = level + 1.2 * normal(rng, shape)
        for state, moved, drift in ((before, 0.0, 0.0), (after, MOVEMENT * SPREAD, 0.33)):
            state["model"][name] = weight + moved * normal(rng, shape)
            second = torch.exp2(level + drift * normal(rng, shape))
            first = 0.25 * second.sqrt() * normal(rng, shape)
            state["optimizer"]["state"][i] = {
                "step": torch.tensor(1e3),
                "exp_avg": first,
                "exp_avg_sq": second,
            }
    for state in (before, after):
        group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
        state["optimizer"]["param_groups"] = [{**group, "params": list(range(len(state["model"])))}]
    return before, after


def tensors_of(state: State) -> list[torch.Tensor]:
    """Return all weights and moments of a state."""
    slots = state["optimizer"]["state"].values()
    moments = [slot[key] for slot in slots for key in ("exp_avg", "exp_avg_sq")]
    return [*state["model"].values(), *moments]


# --- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time and page faults of one call."""

    user: float  # CPU seconds
    system: float  # CPU seconds
    faults: int  # pages


class Meter:
    """A timed case that records the resource usage of each call."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self.calls = work, list[Usage]()

    def __call__(self) -> float:
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = timed(self._work)
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults = after.ru_minflt - before.ru_minflt
        self.calls.append(Usage(after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, faults))
        return seconds

    def usual(self, field: str) -> float:
        """Return the median of a field of `Usage` over all calls but the first, which warms up."""
        return statistics.median(getattr(call, field) for call in self.calls[1:])


def cases(folder: Path, before: State, after: State) -> dict[str, Meter]:
    """Write the base and return the timed cases by name."""
    full, delta, other = folder / "full.ckptz", folder / "delta.ckptz", folder / "other.ckptz"
    sources, copies = tensors_of(after), [torch.zeros_like(tensor) for tensor in tensors_of(after)]

    def memcpy() -> None:
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source)

    save_state(before, full, config=Grid(), jobs=1)
    save_state(after, delta, config=Grid(), base=full, jobs=1)
    return {
        "memcpy": Meter(memcpy),
        "full file, encode": Meter(lambda: save_state(before, other, config=Grid(), jobs=1)),
        "delta, encode": Meter(lambda: save_state(after, other, config=Grid(), base=full, jobs=1)),
        "full file, restore": Meter(lambda: load_state(full, jobs=1)),
        "delta, restore": Meter(lambda: load_state(delta, jobs=1)),
    }


def row(case: str, meters: Mapping[str, Meter], timings: Mapping[str, Timing], raw: int) -> Row:
    """Build the row of a case: its seconds, and their ratio to a copy of the state in memory."""
    meter, timing, memcpy = meters[case], timings[case], meters["memcpy"]
    target = TARGETS.get(case)
    user, system = meter.usual("user"), meter.usual("system")
    slower = timing.median / timings["memcpy"].median
    slower_cpu = (user + system) / (memcpy.usual("user") + memcpy.usual("system"))
    is_met = target is None or slower <= target
    if case == "delta, encode":
        is_met &= system <= SYSTEM_TARGET * (user + system)
    return {
        "case": case,
        "best s": f"{timing.best:.3f}",
        "median s": f"{timing.median:.3f}",
        "median MB/s": f"{raw / timing.median / 1e6:.0f}",
        "memcpy is faster": f"{slower:.1f}x",
        "target": target and f"<= {target}x",
        "in CPU s": f"{slower_cpu:.1f}x",
        "user s": f"{user:.2f}",
        "system s": f"{system:.2f}",
        "system share": f"{system / (user + system):.3f}",
        "faults": f"{meter.usual('faults'):.0f}",
        "verdict": target and verdict(is_met),
    }


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--weights", type=float, default=33.0, help="millions of weights (default 33: 400 MB)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where files are written")
    options = parser.parse_args()
    torch.set_num_threads(1)  # memcpy on one thread
    before, after = states(shapes(int(options.weights * 1e6)))
    raw = sum(tensor.nbytes for tensor in tensors_of(after))
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        meters = cases(Path(temporary), before, after)
        timings = interleave(meters, options.rounds)
        sizes = {
            "full file, encode": (Path(temporary) / "full.ckptz").stat().st_size,
            "delta, encode": (Path(temporary) / "delta.ckptz").stat().st_size,
        }
    rows = []
    for case in meters:
        stored = sizes.get(case)
        ratio = {"ratio": None if stored is None else f"{raw / stored:.1f}"}
        rows.append({**row(case, meters, timings, raw), **ratio})
    save_rows("whole_state", rows)
    finish("whole_state", machine(), rows, state_bytes=raw)


if __name__ == "__main__":
    main()
