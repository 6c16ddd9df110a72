"""`ckptz resume-check`: the first thing in which two saved states, or the losses of two runs, differ."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ckptz.codec.units import TensorSource, Units, chunk_bounds
from ckptz.commands.diff import NUMBERS, Compared, Difference, Pair, difference_of, sums_of
from ckptz.container.byte_source import FileBytes, path_of
from ckptz.errors import ConfigError, CorruptionError, real
from ckptz.formats.inputs import Input, open_input
from ckptz.formats.targets import PathLike, paths
from ckptz.pages.shown import Shown
from ckptz.parallel import Workers
from ckptz.progress import SILENT, Progress
from ckptz.roles import STATE_ROLES, role_of
from ckptz.store.links import residual_of
from ckptz.store.resolve import PLAIN_SUFFIX, SUFFIX
from ckptz.store.runs import newest_checkpoint
from ckptz.store.step_files import StepFile
from ckptz.tree.leaves import TensorRef, View
from ckptz.tree.skeleton import label, parse_tree

Part = Literal["weights", "optimizer", "rest", "losses"]
PARTS: Final[tuple[Part, ...]] = ("weights", "optimizer", "rest")
MAX_LOSS_BYTES: Final = 256 << 20
_STEP_OF_FOLDER: Final = re.compile(r"(.+)@(\d{1,19})", re.DOTALL)
_MODEL: Final = f"model{SUFFIX}"
_BESIDE: Final = re.compile(r"(state|rng-\d+|model_\d+)\.ckptz")  # of a model, as integrations name them
_OURS: Final = (SUFFIX, PLAIN_SUFFIX)
_REST: Final = ("rng", "extra", "groups", "classes")  # what a Checkpointer saves beside model and optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference(Compared):
    """The first difference that was found; fields that do not apply are None.

    Attributes:
        part: where it is.
        name: of a tensor or of a plain value, with dots; of losses the step.
        position: index of the first element that differs.
        value_a: that element, or the plain value or loss, as text, and in bits where the text is the same;
            `value_b` in B.
        n_differing: units that differ, most of them elements, as in `diff`; `n_units` of how many.
        max_change: largest absolute difference of finite numbers.
    """

    part: Part
    position: tuple[int, ...] | None = None
    value_a: str | None = None
    value_b: str | None = None
    n_differing: int | None = None
    n_units: int | None = None
    max_change: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport(Shown):
    """The comparison of two states, or of two records of losses.

    Attributes:
        first: A.
        second: B.
        is_equal: whether nothing differs.
        n_equal: tensors and plain values, or steps, that were found equal before anything differed.
        difference: the first one, in the order weights, optimizer, rest, each as A stores it; or None.
        seconds: time taken.
        not_compared: files of the two folders that were not read, such as those that frameworks write.
    """

    first: str
    second: str
    is_equal: bool
    n_equal: int
    difference: FirstDifference | None
    seconds: float
    not_compared: tuple[str, ...] = ()


def resume_check(
    first: PathLike,
    second: PathLike,
    *,
    losses: bool = False,
    tolerance: float = 0.0,
    jobs: int | None = None,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
) -> ResumeReport:
    """Find the first thing in which two saved states, or two records of losses, differ.

    Args:
        first: A, whatever `diff` takes, or "DIR@STEP" for all of a step that a Checkpointer wrote. A
            folder of `.ckptz` files stands for all of its newest checkpoint. Both are as exact as may be.
        second: B.
        losses: the files are records of losses: a number a line, or JSON objects with "loss" and maybe
            "step". Steps that only one of them has are left out.
        tolerance: how far two losses may be from each other.
        jobs: threads, all cores by default.
        search_path: folders to look for bases in, after each file's own.
        progress: is told of the bytes of A that are done.

    Raises:
        FileNotFoundError: no such file or step.
        ConfigError: a tolerance without losses, or records without a step in common.
        FormatError: a file is damaged, or a line is no loss.
    """
    start = time.perf_counter()
    tolerance = real("tolerance", tolerance)
    if not tolerance >= 0 or (tolerance and not losses):
        raise ConfigError(
            f"tolerance {tolerance}: is for losses, and at least 0; tensors are compared by bits"
        )
    left: frozenset[str] = frozenset()
    if losses:
        n_equal, found = _compare_losses(path_of(first), path_of(second), tolerance)
    else:
        with contextlib.ExitStack() as held:
            a, b = (_open(path_of(path), paths(search_path), held) for path in (first, second))
            n_equal, found = _compare_states(a, b, held.enter_context(Workers(jobs)), progress)
            left = a.left | b.left
    return ResumeReport(
        first=str(first),
        second=str(second),
        is_equal=found is None,
        n_equal=n_equal,
        difference=found,
        seconds=time.perf_counter() - start,
        not_compared=tuple(sorted(left)),
    )


# --- states -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OpenState:
    """Tensors by name, the plain values between them by path, and files of its folder that are not read."""

    tensors: Mapping[str, TensorSource]
    values: Mapping[str, str]
    left: frozenset[str]


def _open(path: Path, search_path: Sequence[Path], held: contextlib.ExitStack) -> _OpenState:
    def opened(file: Path) -> Input:
        return held.enter_context(contextlib.closing(open_input(file, search_path)))

    try:
        inputs = [opened(file) for file in _files(path)]
    except ConfigError:
        files = _newest(path) if path.is_dir() else []
        if not files:
            raise
        inputs = [opened(file) for file in files]
    tensors: dict[str, TensorSource] = {}
    values: dict[str, str] = {}
    for one in inputs:
        found = {} if one.tree is None else dict(_values(parse_tree(one.tree).root))
        # Each rank has its random numbers, and each model its weights, under the same names.
        is_taken = not (tensors.keys().isdisjoint(one.tensors) and values.keys().isdisjoint(found))
        prefix = f"{one.stem}." if is_taken else ""
        tensors |= {f"{prefix}{name}": source for name, source in one.tensors.items()}
        values |= {f"{prefix}{name}": value for name, value in found.items()}
    return _OpenState(tensors, values, frozenset(_left(inputs[0]) if path.is_dir() else ()))


def _left(opened: Input) -> Iterator[str]:
    """Name the files beside those of an opened folder that hold something else, or code."""
    if opened.kind == "folder":
        yield from (*dict(opened.carried), *opened.left_out)
    elif opened.kind != "dcp":
        names = (file.name for file in path_of(opened.name).parent.iterdir() if file.is_file())
        yield from (name for name in names if not name.startswith(".") and not name.endswith(_OURS))


def _files(path: Path) -> list[Path]:
    """Give the path itself, or for DIR@STEP the files of the step."""
    match = _STEP_OF_FOLDER.fullmatch(str(path))
    if match is None or path.exists() or not Path(match[1]).is_dir():
        return [path]
    return _of_step(Path(match[1]), int(match[2]))


def _of_step(folder: Path, step: int) -> list[Path]:
    """List the one or two files of a Checkpointer's step, residuals in place of lossy ones."""
    lossy = [StepFile(step, "weights"), StepFile(step, "state")]
    if not (folder / lossy[1].name).exists():  # a keep rule may have taken the state
        lossy = lossy[:1]
    return [folder / (file.exact if (folder / file.exact.name).exists() else file).name for file in lossy]


def _newest(folder: Path) -> list[Path]:
    """List the files of a folder's newest checkpoint, if it has one, residuals in place of lossy ones.

    The Trainer and accelerate have what belongs to it beside `model.ckptz`.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return []
    if (file := StepFile.parse(newest.name)) is not None:
        return _of_step(newest.parent, file.step)
    beside = sorted(path for path in newest.parent.iterdir() if _BESIDE.fullmatch(path.name))
    files = [newest, *(beside if newest.name == _MODEL else [])]
    return [exact if (exact := residual_of(file)).exists() else file for file in files]


def _values(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Paths of plain values, and what they are; tensors are left out."""
    if isinstance(node, dict | list | tuple) and node:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _values(value, (*path, label(key)))
    elif not isinstance(node, TensorRef | View):
        yield ".".join(path), label(node) if type(node) is int else repr(node)


def _part_of(name: str, is_weight: bool) -> Part:
    words = name.split(".")
    if words[0] == "model":
        return "weights"
    if words[0] == "optimizer" or words[0] in STATE_ROLES or words[-1] in STATE_ROLES:
        return "optimizer"
    return "weights" if is_weight and words[0] not in _REST else "rest"


def _compare_states(
    a: _OpenState, b: _OpenState, workers: Workers, progress: Progress
) -> tuple[int, FirstDifference | None]:
    """(things that are equal before the first that is not, that one)."""
    progress.start("A and B", sum(source.n_bytes for source in a.tensors.values()))
    tensors = {**a.tensors, **{name: source for name, source in b.tensors.items() if name not in a.tensors}}
    roles = {name: role_of(name, source.shape, source.dtype.is_float) for name, source in tensors.items()}
    parts = {name: _part_of(name, role.role == "weight") for name, role in roles.items()}
    of_values = {name: _part_of(name, False) for name in [*a.values, *b.values]}
    n_equal = 0
    for part in PARTS:
        tensor_checks = (_tensor(part, n, a, b, workers, progress) for n in tensors if parts[n] == part)
        value_checks = (_value(part, name, a, b) for name in of_values if of_values[name] == part)
        for found in chain(tensor_checks, value_checks):
            if found is not None:
                return n_equal, found
            n_equal += 1
    return n_equal, None


def _value(part: Part, name: str, a: _OpenState, b: _OpenState) -> FirstDifference | None:
    in_a, in_b = a.values.get(name), b.values.get(name)
    if in_a == in_b:
        return None
    kind: Difference = "only in B" if in_a is None else "only in A" if in_b is None else "changed"
    return FirstDifference(part=part, name=name, kind=kind, value_a=in_a, value_b=in_b)


def _tensor(
    part: Part, name: str, a: _OpenState, b: _OpenState, workers: Workers, progress: Progress
) -> FirstDifference | None:
    in_a, in_b = a.tensors.get(name), b.tensors.get(name)
    (dtype_a, shape_a), (dtype_b, shape_b) = map(_type_of, (in_a, in_b))
    types: dict[str, Any] = {"dtype_a": dtype_a, "dtype_b": dtype_b, "shape_a": shape_a, "shape_b": shape_b}
    make: Callable[..., FirstDifference] = partial(FirstDifference, part=part, name=name, **types)
    if in_a is None or in_b is None:
        return make(kind="only in B" if in_a is None else "only in A")
    pair = Pair(name, in_a, in_b)
    sums = sums_of([pair], workers, progress)[name]
    kind = difference_of(pair, sums)
    if kind != "changed":
        return None if kind == "equal" else make(kind=kind)
    position, value_a, value_b = _first_element(pair)
    return make(
        kind=kind,
        position=position,
        value_a=value_a,
        value_b=value_b,
        n_differing=sums.n_changed,
        n_units=sums.n_units,
        max_change=sums.largest if sums.n_numbers and math.isfinite(sums.largest) else None,
    )


def _type_of(source: TensorSource | None) -> tuple[str | None, tuple[int, ...] | None]:
    return (None, None) if source is None else (source.dtype.name, tuple(source.shape))


def _first_element(pair: Pair) -> tuple[tuple[int, ...], str, str]:
    """Index of the first element that differs, and its two values as text."""
    dtype = pair.a.dtype
    for begin, end in chunk_bounds(pair.a.n_units):
        a, b = pair.a.units(begin, end), pair.b.units(begin, end)
        places = np.flatnonzero(a != b)
        if len(places):
            at = int(places[0])
            break
    a, b = a[at : at + 1], b[at : at + 1]
    change = int(a[0]) ^ int(b[0])
    first_bit = (change & -change).bit_length() - 1  # elements of less than a byte share a unit
    element = ((begin + at) * 8 * dtype.unit_bytes + first_bit) // dtype.bits
    index = np.unravel_index(element, tuple(pair.a.shape))
    return tuple(map(int, index)), *_as_text(dtype.name, a, b)


def _as_text(dtype: str, a: Units, b: Units) -> tuple[str, str]:
    if dtype in NUMBERS:
        in_a, in_b = (str(NUMBERS[dtype](units)[0]) for units in (a, b))
        if in_a != in_b:
            return in_a, in_b
    in_a, in_b = (f"0x{int(units[0]):0{2 * units.itemsize}x}" for units in (a, b))
    return in_a, in_b


# --- losses -------------------------------------------------------------------------------------


def _compare_losses(first: Path, second: Path, tolerance: float) -> tuple[int, FirstDifference | None]:
    a, b = _losses(first), _losses(second)
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise ConfigError(f"{first} and {second}: no step is in both; losses without steps count from 1")
    for n_equal, step in enumerate(steps):
        if not _are_close(a[step], b[step], tolerance):
            change = abs(a[step] - b[step])
            return n_equal, FirstDifference(
                part="losses",
                name=str(step),
                kind="changed",
                value_a=repr(a[step]),
                value_b=repr(b[step]),
                max_change=change if math.isfinite(change) else None,
            )
    return len(steps), None


def _are_close(a: float, b: float, tolerance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance


def _losses(path: Path) -> dict[int, float]:
    """Losses by step."""
    with contextlib.closing(FileBytes(path)) as source:
        if source.size > MAX_LOSS_BYTES:
            raise CorruptionError(
                f"{path}: larger than {MAX_LOSS_BYTES} bytes; cut it down to the first losses"
            )
        lines = source.read(0, source.size).tobytes().splitlines()
    found: dict[int, float] = {}
    for number, line in enumerate(lines, 1):
        try:
            loss, step = _loss_of(line.strip())
        except (ValueError, TypeError, RecursionError, OverflowError):
            raise CorruptionError(
                f"{path}: line {number} is no loss; give a number or a JSON object a line"
            ) from None
        if loss is None:
            continue
        step = len(found) + 1 if step is None else step
        if step in found:
            raise CorruptionError(
                f"{path}: line {number}: step {step} occurs twice; give each run its own file"
            )
        found[step] = loss
    return found


def _loss_of(line: bytes) -> tuple[float | None, int | None]:
    """Loss and step of a line, as far as it has them."""
    if not line:
        return None, None
    if not line.startswith(b"{"):
        return float(line), None
    raw = json.loads(line)
    loss, step = raw.get("loss"), raw.get("step")
    if type(loss) not in (float, int, type(None)) or type(step) not in (int, type(None)):
        raise TypeError
    return None if loss is None else float(loss), step
