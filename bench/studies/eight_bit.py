"""Bits per code of 8-bit optimizer states: in ckptz files, and for ideal coders with many contexts.

    python -m bench.studies.eight_bit

A small GPT is trained on the CPU with Adam8bit of bitsandbytes, whose moments are uint8 codes of a dynamic
map with a scale for each block of 256. Rows that start with *stored* have the bits in a file. All other rows
have the bits of an ideal coder with up to 64 tables, including the tables. The state of step 350 is coded
alone and as a delta to step 280. A decoder needs the vectors of the sums of outer products: they count with
16 bits per element in the ideal rows, and files store them in at most 8 bits. Speeds are megabytes of codes
and scales per CPU second, the best of five turns of all efforts; `fast` has no contexts of outer products.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.core.measure import CACHE, Row, machine, parser_of, save_rows
from bench.core.report import finish
from ckptz import compress, inspect
from ckptz.codec.effort import EffortName
from ckptz.format.frequency import row_entropy_bits
from ckptz.numpy import load_file, save_file

STEPS: Final = (280, 350)
BLOCK: Final = 256
N_TABLES: Final = 64
RANKS: Final = (1, 4, 8, 16)
FACTOR_BITS: Final = 16
LEAST_ROOT: Final = 1e-12  # lower limit of the roots of second moments, for finite logarithms
SYMBOL_BITS, TABLE_BITS = 6, 64  # cost of a table: bits for each symbol, and constant bits
EFFORTS: Final[tuple[EffortName, ...]] = ("fast", "default", "small")
N_TURNS: Final = 5
State = Mapping[str, NDArray[Any]]
WRAPPER: Final = "__bnb_optimizer_quant_state__"


def states() -> list[Path]:
    """Train the model if its states are not cached, and return a torch file for each of STEPS."""
    import torch

    from bench.core.tiny_gpt import TinyGPT, batches, loss_of, read_corpus

    paths = [CACHE / "eight-bit" / f"bnb-{step}.pt" for step in STEPS]
    if all(path.exists() for path in paths):
        return paths
    try:
        from bitsandbytes.optim import Adam8bit
    except ImportError:
        raise SystemExit("bitsandbytes is not installed: pip install bitsandbytes") from None
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train, _ = read_corpus()
    model = TinyGPT()
    optimizer, source = Adam8bit(model.parameters(), lr=1e-3), batches(train, batch=8, context=128, seed=1)
    for step in range(1, STEPS[-1] + 1):
        loss = loss_of(model, next(source))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in STEPS:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, paths[STEPS.index(step)])
    return paths


def read(path: Path) -> dict[int, State]:
    """Read the 8-bit moments of an optimizer state, by the number of the parameter."""
    import torch

    state = torch.load(path)["optimizer"]["state"]
    arrays = {i: {k: v.numpy() for k, v in slots[WRAPPER].items()} for i, slots in state.items()}
    return {i: slots for i, slots in arrays.items() if "qmap1" in slots}  # small parameters have fp32 moments


def ideal_bits(codes: NDArray[np.uint8], contexts: NDArray[Any] | None = None) -> float:
    """Return the bits of codes with one table, or with up to 64 tables for groups of contexts if fewer."""
    flat = codes.reshape(-1).astype(np.int64)
    labels = np.zeros_like(flat) if contexts is None else contexts.reshape(-1).astype(np.int64)
    counts = np.bincount(labels * 256 + flat, minlength=256 * (int(labels.max()) + 1)).reshape(-1, 256)
    ends = np.cumsum(counts.sum(axis=1))
    group = np.minimum((ends - 1).clip(0) * N_TABLES // ends[-1], N_TABLES - 1)
    tables = np.zeros((N_TABLES, 256), np.int64)
    np.add.at(tables, group, counts)
    return min(_bits(tables[tables.any(axis=1)]), _bits(counts.sum(axis=0, keepdims=True)))


def _bits(tables: NDArray[np.int64]) -> float:
    return (
        float(row_entropy_bits(tables).sum())
        + SYMBOL_BITS * np.count_nonzero(tables)
        + TABLE_BITS * len(tables)
    )


def _quantiles(values: NDArray[Any], n: int = 32) -> NDArray[Any]:
    return np.searchsorted(np.quantile(values, np.arange(1, n) / n), values)


def _log(values: NDArray[Any]) -> NDArray[Any]:
    return np.log2(np.maximum(values, 1e-30))


def _low_rank(values: NDArray[Any], rank: int) -> tuple[NDArray[Any], int]:
    """Return the best approximation by a sum of `rank` outer products, and the bits of its vectors."""
    left, sizes, right = np.linalg.svd(values, full_matrices=False)
    return (left[:, :rank] * sizes[:rank]) @ right[:rank], FACTOR_BITS * rank * sum(values.shape)


def low_rank_bits(now: State) -> dict[tuple[str, str], float]:
    """Return the bits of the codes of one parameter, with sums of outer products as contexts."""
    scales = {which: np.repeat(now[f"absmax{which}"], BLOCK) for which in (1, 2)}
    first, second = now["state1"], now["state2"]
    m, v = (
        now[f"qmap{which}"][codes] * scales[which][: codes.size].reshape(codes.shape)
        for which, codes in ((1, first), (2, second))
    )
    roots = np.log2(np.maximum(np.sqrt(v), LEAST_ROOT))
    bits = dict[tuple[str, str], float]()
    for rank in RANKS:
        of_first, cost = _low_rank(m, rank)
        by_scale = of_first.reshape(-1) / np.maximum(scales[1][: first.size], 1e-30)
        context = f"sum of outer products, rank {rank}, by the scale of the block"
        bits["first", context] = min(
            ideal_bits(first, _quantiles(by_scale, N_TABLES)) + cost, ideal_bits(first)
        )
        of_second, cost = _low_rank(roots, rank)
        by_scale = 2 * of_second.reshape(-1) - _log(scales[2][: second.size])
        bits["second", f"{context}, of logarithms"] = min(
            ideal_bits(second, _quantiles(by_scale, N_TABLES)) + cost, ideal_bits(second)
        )
    return bits


def bits_by_context(now: State, before: State) -> Counter[tuple[str, str]]:
    """Return the bits of the codes of one parameter, by (moment, context)."""

    def scale(state: State, which: int) -> NDArray[Any]:
        return np.repeat(state[f"absmax{which}"], BLOCK)[: first.size].reshape(first.shape)

    first, second, earlier = now["state1"], now["state2"], before["state2"]
    v, old_v = (state["qmap2"][state["state2"]] * scale(state, 2) for state in (now, before))
    root = _quantiles(_log(np.sqrt(v)) - _log(scale(now, 1)))
    old_root = _quantiles(_log(np.sqrt(old_v)) - _log(scale(now, 1)))
    rank_1 = v.mean(axis=1, keepdims=True) * v.mean(axis=0, keepdims=True) / max(v.mean(), 1e-30)
    blocks = _quantiles(_log(scale(now, 2)) - 2 * _log(scale(now, 1)), 16)
    difference = second - earlier
    bits = {
        ("first", "none"): ideal_bits(first),
        ("first", "root of the second moment, by the scale of the block"): ideal_bits(first, root),
        ("first", "that of the step before"): ideal_bits(first, old_root),
        ("first", "code of the second moment"): ideal_bits(first, second),
        ("first", "scales of the block"): ideal_bits(first, blocks),
        ("first", "codes of the step before"): ideal_bits(first, before["state1"]),
        ("second", "none"): ideal_bits(second),
        ("second", "product of row and column means, by the scale of the block"): ideal_bits(
            second, _quantiles(_log(rank_1) - _log(scale(now, 2)))
        ),
        ("second", "code of the step before"): ideal_bits(second, earlier),
        ("second", "difference to the step before"): ideal_bits(difference),
        ("second", "difference to the step before, by its code"): ideal_bits(difference, earlier),
    }
    return Counter(bits | low_rank_bits(now))  # type: ignore[arg-type]


def stored_bits(paths: list[Path], effort: EffortName) -> dict[tuple[str, str], float]:
    """Return the bits of the codes in ckptz files of one effort, by (moment, kind of file)."""
    bits = dict[tuple[str, str], float]()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        files = [Path(name) / f"{path.stem}.ckptz" for path in paths]
        compress(paths[1], files[1], jobs=1, effort=effort)
        alone = inspect(files[1])
        compress(paths[0], files[0], jobs=1, effort=effort)
        compress(paths[1], files[1], base=files[0], jobs=1, force=True, effort=effort)
        for kind, report in (("stored alone", alone), ("stored as a delta", inspect(files[1]))):
            for codes, suffix in (("first", ".state1"), ("second", ".state2")):
                tensors = [t for t in report.tensors if t.name.endswith(suffix) and t.dtype == "U8"]
                bits[codes, f"{kind}, effort {effort}"] = 8.0 * sum(t.stored_bytes for t in tensors)
    return bits


def speeds(state: Mapping[int, State]) -> list[Row]:
    """Measure the MB of codes and scales written and read per CPU second, and build a row for each effort."""
    tensors = {
        f"{i}.{name}": array
        for i, slots in state.items()
        for name, array in slots.items()
        if name.startswith(("state", "absmax"))
    }
    n_bytes = sum(array.nbytes for array in tensors.values())
    seconds: dict[tuple[EffortName, str], float] = {}
    sizes = dict[EffortName, int]()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        for _ in range(N_TURNS):
            for effort in EFFORTS:
                path = Path(name) / f"{effort}.ckptz"
                calls: tuple[tuple[str, Callable[[], object]], ...] = (
                    ("write", partial(save_file, tensors, path, effort=effort, jobs=1)),
                    ("read", partial(load_file, path)),
                )
                for way, call in calls:
                    begin = time.process_time()
                    call()
                    spent = time.process_time() - begin
                    seconds[effort, way] = min(spent, seconds.get((effort, way), spent))
                sizes[effort] = path.stat().st_size
    return [
        {
            "effort": effort,
            "bytes": sizes[effort],
            "share of fast": f"{sizes[effort] / sizes['fast']:.3f}",
            **{f"{way} MB/s": f"{n_bytes / 1e6 / seconds[effort, way]:.1f}" for way in ("write", "read")},
        }
        for effort in EFFORTS
    ]


def main() -> int:
    """Run the command line."""
    parser_of(__doc__).parse_args()
    paths = states()
    before, now = map(read, paths)
    n = sum(slots["state1"].size for slots in now.values())
    bits: Counter[tuple[str, str]] = Counter()
    for i, slots in now.items():
        bits.update(bits_by_context(slots, before[i]))
    stored = dict[tuple[str, str], float]()
    for effort in EFFORTS:
        stored |= stored_bits(paths, effort)
    rows: list[Row] = [
        {"codes": codes, "context": context, "bits": f"{total / n:.3f}"}
        for (codes, context), total in sorted({**bits, **stored}.items(), key=lambda item: item[0][0])
    ]
    save_rows("eight_bit", rows)
    save_rows("eight_bit_speed", speeds(now))
    finish("eight_bit", machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
