"""`ckptz diff`: what changed from one checkpoint to another, tensor by tensor, and value by value."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import check_int
from ckptz.foreign.inputs import MODEL, Input, PathLike, open_all, to_paths
from ckptz.format.bits import xxh64
from ckptz.format.byte_source import naming_urls, path_of
from ckptz.format.reader import FrameSource, check_empty, has_own_frame
from ckptz.format.sources import CHUNK_VALUES, TensorSource, chunk_bounds
from ckptz.kernels.blas import product
from ckptz.kernels.clock import working_seconds
from ckptz.kernels.floats import Patterns
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.run.names import EXACT
from ckptz.state.skeleton import TensorRef, View, label, parse_tree
from ckptz.store.resolve import PLAIN_SUFFIX, SUFFIX
from ckptz.words import Report

Difference = Literal["equal", "changed", "retyped", "reshaped", "only in A", "only in B"]
Tensors = Mapping[str, TensorSource]
MAX_SHOWN: Final = 80  # characters of a value
_OURS: Final = (SUFFIX, PLAIN_SUFFIX)
MARGIN: Final = 20  # of these, before the first that differs
# The state of one generator of random numbers, as a Checkpointer and the Trainer's adapter name it.
_RANDOM: Final = re.compile(r"((?:rng-\d+\.)?rng\.[^.]+).*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """One tensor of A and B. Changes are from A to B; those that are not known or do not apply are None."""

    name: str
    kind: Difference  # "retyped" has another dtype and the same shape
    dtype_a: str | None = None  # safetensors' code in A; None where A has no such tensor
    dtype_b: str | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    # share of the bit patterns that differ, one an element for most dtypes; of a retyped tensor the values
    changed_share: float | None = None
    max_change: float | None = None  # largest absolute difference
    rms_change: float | None = None  # root of the mean square of the differences
    relative_change: float | None = None  # the same by the root mean square of A
    # infinities and NaN on either side, which changes leave out; not counted in equal tensors
    n_not_finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """One plain value of a nested state, such as a learning rate, that has another value or type."""

    name: str  # its path, with dots
    value_a: str | None  # as Python writes it, or the part that differs first; None where it is not there
    value_b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """All differences between two checkpoints.

    Plain values are compared where both have some. Of a random number generator only the name is told, not
    the tensors and values of its state.
    """

    first: str  # A
    second: str  # B
    is_equal: bool  # whether tensors (names, dtypes, shapes, bits) and plain values are the same
    has_same_metadata: bool  # whether the user's own metadata are
    n_tensors: int  # tensors of both together
    n_equal: int  # those that are bit for bit the same
    n_changed: int  # those with other values, dtypes or shapes
    n_only_a: int
    n_only_b: int
    changed_share: float | None  # share of bit patterns that differ, of all that could be compared
    max_change: float | None  # largest absolute difference
    relative_change: float | None  # rms change by rms, over the tensors that changed and have numbers
    tensors: tuple[TensorDiff, ...]  # of both; those that changed most come first
    n_values: int  # plain values of both together
    n_values_changed: int  # those that differ
    values: tuple[ValueDiff, ...]  # one for each of these
    random_states: tuple[str, ...]  # generators whose states differ, such as "rng.torch"
    not_compared: tuple[str, ...]  # files of other kinds beside those that were read, as frameworks write
    seconds: float  # time taken


@naming_urls
def diff(
    first: PathLike,
    second: PathLike,
    *,
    top: int | None = None,
    jobs: int | None = None,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> DiffReport:
    """Compare two checkpoints; a few chunks of each are in memory at a time.

    Tensors are in order of their rms change relative to their rms, the largest first, behind what cannot be
    compared.

    Args:
        first: A, whatever can be compressed, "DIR@STEP" for a step of a run, or a folder of `.ckptz` files
            for its newest step. Of a step all files are compared, as exact as they are there.
        second: B.
        top: report this many tensors, and as many values; by default all.
        jobs: threads, all cores by default.
        search_path: folders to look for bases in, after each file's own.
        progress: is told of the bytes of A that are done.

    Raises:
        FileNotFoundError: no such file or step.
        ConfigError: `top` is negative.
        FormatError: a file is damaged.
        MissingBaseError: a chain is incomplete.

    Example:
        >>> import ckptz, torch
        >>> from ckptz.torch import save_state
        >>> for step, lr in ((1, 0.1), (2, 0.05)):
        ...     save_state({"weight": torch.ones(2), "lr": lr}, f"step-{step}.ckptz")
        >>> ckptz.diff("step-1.ckptz", "step-2.ckptz").values
        (ValueDiff(name='lr', value_a='0.1', value_b='0.05'),)
    """
    start = working_seconds()
    top = None if top is None else check_int("top (or None for all)", top, 0)
    with contextlib.ExitStack() as held:
        a, b = (_side(path_of(one), to_paths(search_path), held) for one in (first, second))
        workers = held.enter_context(Workers(jobs))
        pairs = [_Pair(name, one, b.tensors[name]) for name, one in a.tensors.items() if name in b.tensors]
        progress.start(f"{a.name} and {b.name}", sum(pair.a.n_bytes for pair in pairs if pair.is_read))
        sums = _sums_of(pairs, workers, progress)
        diffs = [_tensor_diff(pair, sums[pair.name]) for pair in pairs]
        diffs += [_only(name, "only in A", a.tensors[name]) for name in a.tensors if name not in b.tensors]
        diffs += [_only(name, "only in B", b.tensors[name]) for name in b.tensors if name not in a.tensors]
        return _report(a, b, sorted(diffs, key=_order), sums, top, start)


# --- what is compared ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """A or B: its tensors by name, and its plain values by path, None if it has no place for any."""

    name: str
    metadata: dict[str, str]
    tensors: Tensors
    values: Mapping[str, str] | None
    not_read: frozenset[str]


def _side(path: Path, search_path: Sequence[Path], held: contextlib.ExitStack) -> _Side:
    """Open all files of a checkpoint; names that an earlier one has, too, get the file's name before them."""
    inputs = open_all(path, search_path, held)
    tensors: dict[str, TensorSource] = {}
    values: dict[str, str] = {}
    for one in inputs:
        plain_values = {} if one.tree is None else dict(_values(parse_tree(one.tree).root))
        is_taken = not (tensors.keys().isdisjoint(one.tensors) and values.keys().isdisjoint(plain_values))
        prefix = f"{one.stem.partition(EXACT)[0]}." if is_taken else ""  # each rank has its random numbers
        tensors |= {f"{prefix}{name}": source for name, source in one.tensors.items()}
        values |= {f"{prefix}{name}": value for name, value in plain_values.items()}
    return _Side(
        name=inputs[0].name,
        metadata=dict(inputs[0].metadata or {}),
        tensors=tensors,
        values=values if any(one.tree is not None for one in inputs) else None,
        not_read=frozenset(_not_read(path, inputs)),
    )


def _not_read(path: Path, inputs: Sequence[Input]) -> Iterator[str]:
    """Name the files that belong to a folder and were not read."""
    for one in inputs:
        yield from (*dict(one.carried), *one.left_out)
    if inputs[0].name != str(path) and inputs[0].stem.partition(EXACT)[0] == MODEL:  # in a folder of its own
        names = (file.name for file in path_of(inputs[0].name).parent.iterdir() if file.is_file())
        yield from (name for name in names if not name.startswith(".") and not name.endswith(_OURS))


def _values(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each plain value; tensors are left out."""
    if isinstance(node, dict | list | tuple) and node:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _values(value, (*path, label(key)))
    elif not isinstance(node, TensorRef | View):
        yield ".".join(path), label(node) if type(node) is int else repr(node)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor that both sides have."""

    name: str
    a: TensorSource
    b: TensorSource

    @property
    def is_same_type(self) -> bool:
        """True if A and B have the same dtype and shape."""
        return self.a.dtype == self.b.dtype and tuple(self.a.shape) == tuple(self.b.shape)

    @property
    def is_known_equal(self) -> bool:
        """True if the checksums of A and B show that all patterns are equal."""
        a, b = self.a, self.b
        if not self.is_same_type or not isinstance(a, FrameSource) or not isinstance(b, FrameSource):
            return False
        return a.entry.checksum == b.entry.checksum

    @property
    def is_read(self) -> bool:
        """True if the patterns of A and B have to be compared."""
        if self.is_same_type:
            return not self.is_known_equal
        has_numbers = self.a.dtype.name in NUMBERS and self.b.dtype.name in NUMBERS
        is_same_shape = tuple(self.a.shape) == tuple(self.b.shape)
        return has_numbers and is_same_shape and self.a.n_patterns == self.b.n_patterns


@dataclass(slots=True)
class _Totals:
    """Sums over the chunks of two tensors: counts of bit patterns, and squares of finite numbers."""

    n_patterns: int = 0
    n_changed: int = 0
    n_not_finite: int = 0
    n_numbers: int = 0
    largest: float = 0.0
    error: float = 0.0
    power: float = 0.0

    def add(self, other: _Totals) -> None:
        """Add the sums of other chunks."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            setattr(self, one.name, max(mine, theirs) if one.name == "largest" else mine + theirs)


def _sums_of(pairs: Sequence[_Pair], workers: Workers, progress: Progress) -> dict[str, _Totals]:
    """Compare pairs of tensors, chunk by chunk; what is found by name."""
    sums = {}
    for pair in pairs:
        check_empty(pair.a)
        check_empty(pair.b)
        n_known = pair.a.n_patterns if pair.is_same_type and not pair.is_read else 0
        sums[pair.name] = _Totals(n_patterns=n_known)
    chunks = (
        (pair, begin, end) for pair in pairs if pair.is_read for begin, end in chunk_bounds(pair.a.n_patterns)
    )
    for pair, totals in workers.map(_compare, chunks):
        sums[pair.name].add(totals)
        progress.advance(totals.n_patterns * pair.a.dtype.pattern_bytes)
    return sums


# --- one chunk ----------------------------------------------------------------------------------


def _compare(chunk: tuple[_Pair, int, int]) -> tuple[_Pair, _Totals]:
    """Compare patterns begin..end of a pair."""
    pair, begin, end = chunk
    sums, (a, b) = _Totals(n_patterns=end - begin), _both_patterns(*chunk)
    has_numbers = pair.a.dtype.name in NUMBERS and pair.b.dtype.name in NUMBERS
    if pair.is_same_type and a is not b:
        sums.n_changed = int(np.count_nonzero(a != b))
    if has_numbers:
        _add_numbers(sums, pair, NUMBERS[pair.a.dtype.name](a), NUMBERS[pair.b.dtype.name](b))
    return pair, sums


def _both_patterns(pair: _Pair, begin: int, end: int) -> tuple[Patterns, Patterns]:
    """Read the patterns of both sides; the same array twice if the checksums say that they are equal."""
    in_a, in_b = _recorded(pair.a, begin), _recorded(pair.b, begin)
    if in_a is not None and in_b is None:  # what is not encoded is read first, and may spare the other
        return _both_patterns(_Pair(pair.name, pair.b, pair.a), begin, end)[::-1]
    patterns = pair.a.patterns(begin, end)
    if pair.is_same_type and in_b is not None and in_b == (xxh64(patterns) if in_a is None else in_a):
        return patterns, patterns
    return patterns, pair.b.patterns(begin, end)


def _recorded(source: TensorSource, begin: int) -> int | None:
    """Return the recorded checksum of the chunk that starts at `begin`; None without a frame of its own."""
    return source.header.chunks[begin // CHUNK_VALUES].decoded if has_own_frame(source) else None


def _add_numbers(sums: _Totals, pair: _Pair, a: NDArray[Any], b: NDArray[Any]) -> None:
    with np.errstate(all="ignore"):  # infinities and NaN are counted, not complained of
        finite = np.isfinite(a) & np.isfinite(b)
        sums.n_numbers = int(np.count_nonzero(finite))
        sums.n_not_finite = len(finite) - sums.n_numbers
        if not pair.is_same_type:
            sums.n_changed = int(np.count_nonzero(a != b))
        if sums.n_not_finite:
            a, b = a[finite], b[finite]
        change = _difference(a, b)
        reference = a.astype(np.float64, copy=False)
        sums.largest = float(change.max(initial=0.0))
        sums.error, sums.power = float(product(change, change)), float(product(reference, reference))


def _difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return absolute differences; integer differences are computed exactly."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        unsigned = np.dtype(f"<u{a.itemsize}")
        return (np.maximum(a, b) - np.minimum(a, b)).view(unsigned).astype(np.float64)
    return np.abs(b.astype(np.float64) - a.astype(np.float64))


def _e4m3() -> NDArray[np.float32]:
    """Return the value of each F8_E4M3 byte: no infinities, NaN if all bits but the sign are set."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size = np.where(code & 127 == 127, np.nan, size)
    return np.where(code >> 7, -size, size).astype(np.float32)


def _as(dtype: str) -> Callable[[Patterns], NDArray[Any]]:
    return lambda patterns: patterns.view(dtype)


_E4M3: Final = _e4m3()
NUMBERS: Final[Mapping[str, Callable[[Patterns], NDArray[Any]]]] = {
    **{name: _as(f"<i{size}") for name, size in (("I8", 1), ("I16", 2), ("I32", 4), ("I64", 8))},
    **{name: _as(f"<u{size}") for name, size in (("U8", 1), ("U16", 2), ("U32", 4), ("U64", 8))},
    **{name: _as(f"<f{size}") for name, size in (("F16", 2), ("F32", 4), ("F64", 8))},
    "BOOL": _as("<u1"),
    "C64": _as("<f4"),  # a pattern is a part of an element
    "BF16": lambda patterns: (patterns.astype("<u4") << 16).view("<f4"),
    "F8_E5M2": lambda patterns: (patterns.astype("<u2") << 8).view("<f2"),
    "F8_E4M3": lambda patterns: _E4M3[patterns],
}


# --- the report ---------------------------------------------------------------------------------


def _only(name: str, kind: Difference, source: TensorSource) -> TensorDiff:
    dtype, shape = source.dtype.name, tuple(source.shape)
    if kind == "only in A":
        return TensorDiff(name=name, kind=kind, dtype_a=dtype, shape_a=shape)
    return TensorDiff(name=name, kind=kind, dtype_b=dtype, shape_b=shape)


def _tensor_diff(pair: _Pair, sums: _Totals) -> TensorDiff:
    kind: Difference = "changed" if sums.n_changed else "equal"
    if not pair.is_same_type:
        kind = "reshaped" if tuple(pair.a.shape) != tuple(pair.b.shape) else "retyped"
    has_numbers = bool(sums.n_numbers) and kind != "equal"
    return TensorDiff(
        name=pair.name,
        kind=kind,
        dtype_a=pair.a.dtype.name,
        dtype_b=pair.b.dtype.name,
        shape_a=tuple(pair.a.shape),
        shape_b=tuple(pair.b.shape),
        changed_share=sums.n_changed / sums.n_patterns if sums.n_patterns else None,
        max_change=_finite(sums.largest) if has_numbers else None,
        rms_change=_finite(math.sqrt(sums.error / sums.n_numbers)) if has_numbers else None,
        relative_change=_relative(sums) if has_numbers else None,
        n_not_finite=0 if kind == "equal" else sums.n_not_finite,
    )


def _finite(value: float) -> float | None:
    """Return the value, or None if it is not finite."""
    return value if math.isfinite(value) else None


def _relative(sums: _Totals) -> float | None:
    return _finite(math.sqrt(sums.error / sums.power)) if sums.power else None


def _value_diffs(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[ValueDiff]:
    for name in {**a, **b}:
        in_a, in_b = a.get(name), b.get(name)
        if in_a != in_b:
            both = enumerate(zip(in_a or "", in_b or "", strict=False))
            at = next((i for i, (one, other) in both if one != other), 0)
            yield ValueDiff(name=name, value_a=_shown(in_a, at), value_b=_shown(in_b, at))


def _shown(value: str | None, at: int) -> str | None:
    """Cut what is long down to a part around character `at`."""
    if value is None or len(value) <= MAX_SHOWN:
        return value
    begin = max(0, min(at - MARGIN, len(value) - MAX_SHOWN))
    end = begin + MAX_SHOWN
    return f"{'...' * (begin > 0)}{value[begin:end]}{'...' * (end < len(value))}"


def _report(
    a: _Side,
    b: _Side,
    diffs_in_order: Sequence[TensorDiff],
    sums: Mapping[str, _Totals],
    top: int | None,
    start: float,
) -> DiffReport:
    values_a, values_b = ({}, {}) if a.values is None or b.values is None else (a.values, b.values)
    differing = list(_value_diffs(values_a, values_b))
    values = [value for value in differing if _RANDOM.fullmatch(value.name) is None]
    n_values = sum(_RANDOM.fullmatch(name) is None for name in {**values_a, **values_b})
    names = [value.name for value in differing] + [
        diff.name for diff in diffs_in_order if diff.kind != "equal"
    ]
    random = {match[1] for name in names if (match := _RANDOM.fullmatch(name))}
    # Random states that differ are named apart; equal ones are tensors like all others.
    diffs = [diff for diff in diffs_in_order if diff.kind == "equal" or _RANDOM.fullmatch(diff.name) is None]
    counts = {kind: sum(diff.kind == kind for diff in diffs) for kind in ("equal", "only in A", "only in B")}
    total, changed = _Totals(), _Totals()
    for diff in diffs:
        total.add(sums.get(diff.name, _Totals()))
        changed.add(sums[diff.name] if diff.relative_change is not None else _Totals())
    return DiffReport(
        first=a.name,
        second=b.name,
        is_equal=counts["equal"] == len(diffs) and not values and not random,
        has_same_metadata=a.metadata == b.metadata,
        n_tensors=len(diffs),
        n_equal=counts["equal"],
        n_changed=len(diffs) - sum(counts.values()),
        n_only_a=counts["only in A"],
        n_only_b=counts["only in B"],
        changed_share=total.n_changed / total.n_patterns if total.n_patterns else None,
        max_change=max((d.max_change for d in diffs if d.max_change is not None), default=None),
        relative_change=_relative(changed),
        tensors=tuple(diffs[:top]),
        n_values=n_values,
        n_values_changed=len(values),
        values=tuple(values[:top]),
        random_states=tuple(sorted(random)),
        not_compared=tuple(sorted(a.not_read | b.not_read)),
        seconds=working_seconds() - start,
    )


def _order(diff: TensorDiff) -> tuple[Any, ...]:
    """Sort what cannot be compared first, then what changed most, then what is equal."""
    rank = {"equal": 2, "changed": 1}.get(diff.kind, 0)
    return rank, -(diff.relative_change or 0), -(diff.changed_share or 0), diff.name
