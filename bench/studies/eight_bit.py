"""Bits of the codes of 8-bit optimizers, as ckptz stores them and by every context that a decoder could have.

    python -m bench.studies.eight_bit

A small GPT is trained with Adam8bit of bitsandbytes on the CPU. Its moments are uint8 codes of a dynamic map,
with a scale for each block of 256. `bits` are those of an ideal coder with up to 64 tables, which count, or
those of the file where it says *stored*. The state of step 350 is coded alone and against that of step 280.
Of sums of outer products, which a decoder needs beside the codes, each element counts with 16 bits in the
ideal rows; files store levels of at most 8 bits. Speeds are megabytes of codes and scales in a second of
processor time, the best of five turns of all efforts; `fast` has no contexts by products.
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
LEAST_ROOT: Final = 1e-12  # of second moments, so that they have logarithms
SYMBOL_BITS, TABLE_BITS = 6, 64  # of a table: for each symbol, and for itself
EFFORTS: Final[tuple[EffortName, ...]] = ("fast", "default", "small")
N_TURNS: Final = 5
State = Mapping[str, NDArray[Any]]
WRAPPER: Final = "__bnb_optimizer_quant_state__"


def states() -> list[Path]:
    """Train once; a torch file for each step."""
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
    """Read the moments of large parameters, by number."""
    import torch

    state = torch.load(path)["optimizer"]["state"]
    arrays = {key: {k: v.numpy() for k, v in own[WRAPPER].items()} for key, own in state.items()}
    return {key: own for key, own in arrays.items() if "qmap1" in own}


def ideal_bits(codes: NDArray[np.uint8], contexts: NDArray[Any] | None = None) -> float:
    """Bits of codes with a table for each of up to 64 groups of neighbouring contexts, or with one."""
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
    """Return the nearest sum of `rank` outer products, and the bits of its vectors."""
    left, sizes, right = np.linalg.svd(values, full_matrices=False)
    return (left[:, :rank] * sizes[:rank]) @ right[:rank], FACTOR_BITS * rank * sum(values.shape)


def low_rank_bits(now: State) -> dict[tuple[str, str], float]:
    """Bits of the codes of one parameter, with sums of outer products as contexts."""
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
        what = f"sum of outer products, rank {rank}, by the scale of the block"
        bits["first", what] = min(ideal_bits(first, _quantiles(by_scale, N_TABLES)) + cost, ideal_bits(first))
        of_second, cost = _low_rank(roots, rank)
        by_scale = 2 * of_second.reshape(-1) - _log(scales[2][: second.size])
        bits["second", f"{what}, of logarithms"] = min(
            ideal_bits(second, _quantiles(by_scale, N_TABLES)) + cost, ideal_bits(second)
        )
    return bits


def bits_by_context(now: State, before: State) -> Counter[tuple[str, str]]:
    """Bits of the codes of one parameter, by codes and context."""

    def scale(state: State, which: int) -> NDArray[Any]:
        return np.repeat(state[f"absmax{which}"], BLOCK)[: first.size].reshape(first.shape)

    first, second, earlier = now["state1"], now["state2"], before["state2"]
    v, old_v = (one["qmap2"][one["state2"]] * scale(one, 2) for one in (now, before))
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
    """Bits of the codes in the files that ckptz writes."""
    bits = dict[tuple[str, str], float]()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        files = [Path(name) / f"{path.stem}.ckptz" for path in paths]
        compress(paths[1], files[1], jobs=1, effort=effort)
        alone = inspect(files[1])
        compress(paths[0], files[0], jobs=1, effort=effort)
        compress(paths[1], files[1], base=files[0], jobs=1, force=True, effort=effort)
        for what, report in (("stored alone", alone), ("stored as a delta", inspect(files[1]))):
            for codes, word in (("first", ".state1"), ("second", ".state2")):
                own = [one for one in report.tensors if one.name.endswith(word) and one.dtype == "U8"]
                n_bits = 8.0 * sum(one.stored_bytes for one in own)
                bits[codes, f"{what}, effort {effort}"] = n_bits
    return bits


def speeds(state: Mapping[int, State]) -> list[Row]:
    """Megabytes of codes and scales that one processor writes and reads in a second, by effort."""
    tensors = {
        f"{key}.{name}": array
        for key, own in state.items()
        for name, array in own.items()
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
                for what, call in calls:
                    begin = time.process_time()
                    call()
                    taken = time.process_time() - begin
                    seconds[effort, what] = min(taken, seconds.get((effort, what), taken))
                sizes[effort] = path.stat().st_size
    return [
        {
            "effort": effort,
            "bytes": sizes[effort],
            "share of fast": f"{sizes[effort] / sizes['fast']:.3f}",
            **{f"{what} MB/s": f"{n_bytes / 1e6 / seconds[effort, what]:.1f}" for what in ("write", "read")},
        }
        for effort in EFFORTS
    ]


def main() -> int:
    """Command line."""
    parser_of(__doc__).parse_args()
    paths = states()
    before, now = map(read, paths)
    n = sum(own["state1"].size for own in now.values())
    bits: Counter[tuple[str, str]] = Counter()
    for key, own in now.items():
        bits.update(bits_by_context(own, before[key]))
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
