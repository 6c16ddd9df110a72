"""`ckptz diff`: compare two checkpoints, tensor by tensor and plain value by plain value."""

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

from ckptz.errors import ConfigError, check_int
from ckptz.foreign.inputs import MODEL, Input, open_input, other_files_of_step
from ckptz.format.bits import xxh64
from ckptz.format.byte_source import is_folder, naming_urls, path_of
from ckptz.format.reader import FrameSource, check_empty, has_own_frame
from ckptz.format.sources import CHUNK_VALUES, TensorSource, chunk_bounds
from ckptz.format.suffixes import PLAIN_SUFFIX, SUFFIX
from ckptz.kernels.blas import product
from ckptz.kernels.clock import working_seconds
from ckptz.kernels.floats import Patterns
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.run.names import newest_checkpoint, resolve
from ckptz.run.residuals import residual_or_file
from ckptz.run.step_files import lossy_stem
from ckptz.state.skeleton import TensorRef, View, label, parse_tree
from ckptz.verbs.paths import PathLike, to_paths
from ckptz.words import Report, finite_or_none

Difference = Literal["equal", "changed", "retyped", "reshaped", "only in A", "only in B"]
Tensors = Mapping[str, TensorSource]
MAX_SHOWN: Final = 80  # characters shown of a plain value
MARGIN: Final = 20  # characters shown before the first difference
# The state of a random number generator, as a Checkpointer and the Trainer's adapter name it.
_RANDOM: Final = re.compile(r"((?:rng-\d+\.)?rng\.[^.]+).*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """The difference of one tensor from A to B; None where a number does not apply."""

    name: str
    kind: Difference  # "retyped" has another dtype and the same shape
    dtype_a: str | None = None  # dtype in A, as safetensors names it; None if A lacks the tensor
    dtype_b: str | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    changed_share: float | None = None  # share of the elements that differ: as bits, or as values if retyped
    max_change: float | None = None  # largest absolute difference
    rms_change: float | None = None  # root mean square of the differences
    relative_change: float | None = None  # rms_change divided by the root mean square of A
    n_not_finite: int = 0  # elements that are infinite or NaN in A or B, excluded from the changes


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """A plain value of a nested state, such as a learning rate, whose value or type changed."""

    name: str  # path in the state, joined with dots
    value_a: str | None  # repr in A, shortened around the first difference; None if A lacks the value
    value_b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """All differences between two checkpoints.

    Plain values are compared if both checkpoints have any. Random number generators whose states differ are
    listed in `random_states`, without their tensors and values.
    """

    first: str  # A
    second: str  # B
    is_equal: bool  # True if tensors (names, dtypes, shapes, bits) and plain values are equal
    has_same_metadata: bool  # True if the user's metadata are equal
    n_tensors: int  # tensors in A or B
    n_equal: int  # tensors that are bit for bit equal
    n_changed: int  # tensors with other values, dtypes or shapes
    n_only_a: int  # tensors only in A
    n_only_b: int  # tensors only in B
    changed_share: float | None  # share of the compared elements that differ
    max_change: float | None  # largest absolute difference
    relative_change: float | None  # rms change divided by rms of A, over the changed tensors with numbers
    tensors: tuple[TensorDiff, ...]  # tensors in A or B, the most changed first
    n_values: int  # plain values in A or B
    n_values_changed: int  # plain values that differ
    values: tuple[ValueDiff, ...]  # the plain values that differ
    random_states: tuple[str, ...]  # generators whose states differ, such as "rng.torch"
    not_compared: tuple[str, ...]  # files in the same folders that ckptz does not read
    seconds: float  # time taken, without compiling kernels


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
    """Compare two checkpoints with only a few chunks of each in memory.

    Tensors that cannot be compared come first, then the others by relative rms change, largest first.

    Args:
        first: checkpoint A: any input of `compress`, "DIR@STEP" for a step of a run, or a folder of `.ckptz`
            files for its newest step. All files of a step are compared, with their residual files if any.
        second: checkpoint B.
        top: number of tensors, and of values, to report; by default all.
        jobs: number of threads, by default one for each core.
        search_path: more folders to search for bases, after the folder of each file.
        progress: receives the number of bytes of A compared.

    Returns:
        The differences, from A to B.

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
    with contextlib.ExitStack() as stack:
        a, b = (_side(path_of(path), to_paths(search_path), stack) for path in (first, second))
        workers = stack.enter_context(Workers(jobs))
        common = [name for name in a.tensors if name in b.tensors]
        pairs = [_Pair(name, a.tensors[name], b.tensors[name]) for name in common]
        progress.start(f"{a.name} and {b.name}", sum(pair.a.n_bytes for pair in pairs if pair.is_read))
        sums = _sums_of(pairs, workers, progress)
        return _report(a, b, sums, top, start)


# --- the two checkpoints ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """A or B: tensors by name, and plain values by path (None if its format has no plain values)."""

    name: str
    metadata: dict[str, str]
    tensors: Tensors
    values: Mapping[str, str] | None
    not_read: frozenset[str]


def _side(path: Path, search_path: Sequence[Path], stack: contextlib.ExitStack) -> _Side:
    """Open all files of a checkpoint; names that several files use are prefixed with the file's name."""
    inputs = _opened(path, search_path, stack)
    tensors: dict[str, TensorSource] = {}
    values: dict[str, str] = {}
    for opened in inputs:
        plain_values = {} if opened.tree is None else dict(_values(parse_tree(opened.tree).root))
        is_used = not (tensors.keys().isdisjoint(opened.tensors) and values.keys().isdisjoint(plain_values))
        # Each rank has a generator state of the same name.
        prefix = f"{lossy_stem(opened.stem)}." if is_used else ""
        tensors |= {f"{prefix}{name}": source for name, source in opened.tensors.items()}
        values |= {f"{prefix}{name}": value for name, value in plain_values.items()}
    return _Side(
        name=inputs[0].name,
        metadata=dict(inputs[0].metadata or {}),
        tensors=tensors,
        values=values if any(opened.tree is not None for opened in inputs) else None,
        not_read=frozenset(_not_read(path, inputs)),
    )


def _opened(path: Path, search_path: Sequence[Path], stack: contextlib.ExitStack) -> list[Input]:
    """Open an input; in a run folder, the files of the newest step or of DIR@STEP, exact, weights first."""

    def opened(file: Path) -> Input:
        return stack.enter_context(contextlib.closing(open_input(file, search_path)))

    weights = resolve(path).weights
    if weights is None:
        try:
            return [opened(path)]
        except ConfigError:
            weights = newest_checkpoint(path) if is_folder(path) else None
            if weights is None:
                raise
    return [opened(residual_or_file(file)) for file in (weights, *other_files_of_step(weights))]


def _not_read(path: Path, inputs: Sequence[Input]) -> Iterator[str]:
    """Yield the names of files in the folder of a checkpoint that are not compared."""
    for opened in inputs:
        yield from (*dict(opened.carried), *opened.left_out)
    if inputs[0].name != str(path) and lossy_stem(inputs[0].stem) == MODEL:  # the folder of one step
        names = (file.name for file in path_of(inputs[0].name).parent.iterdir() if file.is_file())
        yield from (
            name for name in names if not name.startswith(".") and not name.endswith((SUFFIX, PLAIN_SUFFIX))
        )


def _values(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the path and the repr of each plain value, without tensors."""
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
    def has_numbers(self) -> bool:
        """True if the patterns of A and B are numbers of known dtypes."""
        return self.a.dtype.name in NUMBERS and self.b.dtype.name in NUMBERS

    @property
    def is_read(self) -> bool:
        """True if the values of A and B must be read to compare them."""
        a, b = self.a, self.b
        if self.is_same_type:  # with equal stored checksums, the values are equal
            if not (isinstance(a, FrameSource) and isinstance(b, FrameSource)):
                return True
            return a.entry.checksum != b.entry.checksum
        is_same_shape = tuple(a.shape) == tuple(b.shape)
        return self.has_numbers and is_same_shape and a.n_patterns == b.n_patterns


@dataclass(slots=True)
class _Totals:
    """Statistics of the difference of two tensors, summed over chunks."""

    n_patterns: int = 0
    n_changed: int = 0
    n_not_finite: int = 0
    n_numbers: int = 0  # elements that are finite in A and B
    largest: float = 0.0  # largest absolute difference
    error: float = 0.0  # sum of squared differences
    power: float = 0.0  # sum of squares of A

    def add(self, other: _Totals) -> None:
        """Add the statistics of other chunks."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name == "largest" else mine + theirs)


def _sums_of(pairs: Sequence[_Pair], workers: Workers, progress: Progress) -> dict[str, _Totals]:
    """Compare pairs of tensors chunk by chunk; return the statistics by name of the tensor."""
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
    """Compare elements begin..end of a pair."""
    pair, begin, end = chunk
    sums, (a, b) = _Totals(n_patterns=end - begin), _both_patterns(*chunk)
    if pair.is_same_type and a is not b:
        sums.n_changed = int(np.count_nonzero(a != b))
    if pair.has_numbers:
        _add_numbers(sums, pair, NUMBERS[pair.a.dtype.name](a), NUMBERS[pair.b.dtype.name](b))
    return pair, sums


def _both_patterns(pair: _Pair, begin: int, end: int) -> tuple[Patterns, Patterns]:
    """Read the patterns of A and B; if checksums show that they are equal, return one array twice."""
    in_a, in_b = _recorded_checksum(pair.a, begin), _recorded_checksum(pair.b, begin)
    if in_a is not None and in_b is None:  # hash the plain side first: decoding the other may be avoidable
        return _both_patterns(_Pair(pair.name, pair.b, pair.a), begin, end)[::-1]
    patterns = pair.a.patterns(begin, end)
    if pair.is_same_type and in_b is not None and in_b == (xxh64(patterns) if in_a is None else in_a):
        return patterns, patterns
    return patterns, pair.b.patterns(begin, end)


def _recorded_checksum(source: TensorSource, begin: int) -> int | None:
    """Return the recorded checksum of the chunk at `begin`; None if the tensor has no frame of its own."""
    return source.header.chunks[begin // CHUNK_VALUES].decoded if has_own_frame(source) else None


def _add_numbers(sums: _Totals, pair: _Pair, a: NDArray[Any], b: NDArray[Any]) -> None:
    with np.errstate(all="ignore"):  # no warnings: infinities and NaN are counted
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
    """Return the values of all 256 F8_E4M3 bytes as float32 [256]; there are no infinities, only NaN."""
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
    "C64": _as("<f4"),  # a pattern is the real or the imaginary part
    "BF16": lambda patterns: (patterns.astype("<u4") << 16).view("<f4"),
    "F8_E5M2": lambda patterns: (patterns.astype("<u2") << 8).view("<f2"),
    "F8_E4M3": lambda patterns: _E4M3[patterns],
}


# --- the report ---------------------------------------------------------------------------------


def _tensor_diff(name: str, a: TensorSource | None, b: TensorSource | None, sums: _Totals) -> TensorDiff:
    """Describe the difference of a tensor, which A or B may lack."""
    dtype_a, shape_a = (None, None) if a is None else (a.dtype.name, tuple(a.shape))
    dtype_b, shape_b = (None, None) if b is None else (b.dtype.name, tuple(b.shape))
    kind: Difference = "changed" if sums.n_changed else "equal"
    if a is None or b is None:
        kind = "only in B" if a is None else "only in A"
    elif (dtype_a, shape_a) != (dtype_b, shape_b):
        kind = "reshaped" if shape_a != shape_b else "retyped"
    has_numbers = bool(sums.n_numbers) and kind != "equal"
    return TensorDiff(
        name=name,
        kind=kind,
        dtype_a=dtype_a,
        dtype_b=dtype_b,
        shape_a=shape_a,
        shape_b=shape_b,
        changed_share=sums.n_changed / sums.n_patterns if sums.n_patterns else None,
        max_change=finite_or_none(sums.largest) if has_numbers else None,
        rms_change=finite_or_none(math.sqrt(sums.error / sums.n_numbers)) if has_numbers else None,
        relative_change=_relative(sums) if has_numbers else None,
        n_not_finite=0 if kind == "equal" else sums.n_not_finite,
    )


def _relative(sums: _Totals) -> float | None:
    return finite_or_none(math.sqrt(sums.error / sums.power)) if sums.power else None


def _value_diffs(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[ValueDiff]:
    for name in {**a, **b}:
        in_a, in_b = a.get(name), b.get(name)
        if in_a != in_b:
            both = enumerate(zip(in_a or "", in_b or "", strict=False))
            at = next((i for i, (x, y) in both if x != y), 0)
            yield ValueDiff(name=name, value_a=_shown(in_a, at), value_b=_shown(in_b, at))


def _shown(value: str | None, at: int) -> str | None:
    """Shorten a long text to the part around character `at`."""
    if value is None or len(value) <= MAX_SHOWN:
        return value
    begin = max(0, min(at - MARGIN, len(value) - MAX_SHOWN))
    end = begin + MAX_SHOWN
    return f"{'...' * (begin > 0)}{value[begin:end]}{'...' * (end < len(value))}"


def _report(a: _Side, b: _Side, sums: Mapping[str, _Totals], top: int | None, start: float) -> DiffReport:
    diffs_in_order = sorted(
        (
            _tensor_diff(name, a.tensors.get(name), b.tensors.get(name), sums.get(name, _Totals()))
            for name in {**a.tensors, **b.tensors}
        ),
        key=_order,
    )
    values_a, values_b = ({}, {}) if a.values is None or b.values is None else (a.values, b.values)
    differing = list(_value_diffs(values_a, values_b))
    values = [value for value in differing if _RANDOM.fullmatch(value.name) is None]
    n_values = sum(_RANDOM.fullmatch(name) is None for name in {**values_a, **values_b})
    names = [value.name for value in differing] + [
        diff.name for diff in diffs_in_order if diff.kind != "equal"
    ]
    random = {match[1] for name in names if (match := _RANDOM.fullmatch(name))}
    # Random states that differ are listed in random_states; equal ones are counted as tensors.
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
    """Return a sort key: tensors that cannot be compared, then by change, then equal tensors."""
    rank = {"equal": 2, "changed": 1}.get(diff.kind, 0)
    return rank, -(diff.relative_change or 0), -(diff.changed_share or 0), diff.name
