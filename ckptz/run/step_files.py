"""The files of a store by name: what they are, what they say of themselves, what is stored against what."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, SupportsIndex

from ckptz.errors import ConfigError
from ckptz.format.byte_source import ByteSource
from ckptz.format.dtypes import dtype_of
from ckptz.format.index import BaseRef
from ckptz.format.publish import TEMPORARY_SUFFIX
from ckptz.format.reader import Container
from ckptz.store.resolve import open_file

FileKind = Literal["weights", "state"]
KINDS: Final[tuple[FileKind, ...]] = ("weights", "state")
OWNER: Final = "step-"  # begins the names of temporary files
ABANDONED_SECONDS: Final = 3600.0  # after which nobody writes to an unfinished file any more
METRIC_KEY: Final = "metric"  # in the metadata of weights: the metric that `save` was given
POSITION_KEY: Final = "since_anchor"  # in the metadata of both
WEIGHTS_KEY: Final = "weights"  # in the metadata of state: content id of the weights that it goes with
STATE_KEY: Final = "state"  # in the metadata of weights: name of the file with their optimizer state
FROZEN_KEY: Final = "frozen"  # in the metadata of weights: content id of those that were left out
NAMES_KEY: Final = "names"  # in the metadata of weights that have the model's own names: "own"
INDEX_FILE: Final = "ckptz-index.json"  # written last into the folder of a step of several ranks
COMPLETE: Final = "ckptz-complete.json"  # written last into the folder of a step, if nothing else is
EXACT_OF_KEY: Final = "exact_of"  # in the metadata of residuals: content id of the lossy file
MODEL_PREFIX: Final = "model."  # of the names of weights that do not have the model's own
MAX_STEP: Final = (1 << 63) - 1
ENDLESS: Final = 1 << 30  # saves: for ever
_NAME: Final = re.compile(r"step-(\d{8,})(\.state)?(\.exact)?\.ckptz")
_HIDDEN: Final = ".hidden"
ALL_EXACT: Final = (
    "all steps that stay are kept exact, so files that may lose something take more room than without loss: "
    "keep more steps, or exact=0"
)


def checked_step(step: SupportsIndex) -> int:
    """Return a step as a built-in int, whichever library it comes from.

    Raises:
        ConfigError: it is none that a file can record.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(f"a step is a whole number from 0 to below 2^63, got {step!r:.80}")
    return int(number)  # of a bool, too


@dataclass(frozen=True, slots=True)
class Kept:
    """The time that files of a kind stay, as far as it is known before."""

    last: int | None = None  # so many newest; None for all
    every: tuple[int, ...] = ()  # steps that are multiples of one of these stay for ever
    best: int = 0  # so many others stay, whichever

    def stays(self, steps: Sequence[int]) -> list[int]:
        """Count for each of the steps that stay, ascending, the coming saves that leave it."""
        if self.last is None:
            return [ENDLESS] * len(steps)
        ages = range(len(steps), 0, -1)
        # What is neither among the last nor a multiple is one of the best.
        beyond = ENDLESS if self.best else 0
        return [
            ENDLESS if self._is_multiple(step) else beyond if age > self.last else self.last - age
            for step, age in zip(steps, ages, strict=True)
        ]

    def stays_of(self, steps: Sequence[int], n_saves: int, full_every: int) -> list[int]:
        """Return for each coming save, counted from 0, the later save that deletes its file.

        Steps go on as they came last. The best are taken to be those that cost most: far from one another,
        each the last before a full file.
        """
        if self.last is None:
            return [ENDLESS] * n_saves
        newest, before = (0, 0, *steps)[-1:-3:-1]
        stays = [i + self.last for i in range(n_saves)]
        for i in range(n_saves):
            if self._is_multiple(newest + (i + 1) * max(1, newest - before)):
                stays[i] = ENDLESS
        interval = full_every * -(-self.last // full_every)
        for i in range(interval - 1, n_saves if self.best else 0, interval):
            stays[i] = max(stays[i], i + self.last + self.best * interval)
        return stays

    def is_within(self, exact: int | None) -> bool:
        """Return whether no more files are kept than stay exact; None means all."""
        if self.every or self.best:
            return False
        return exact is None or (self.last is not None and self.last <= exact)

    def _is_multiple(self, step: int) -> bool:
        return any(step % n == 0 for n in self.every)


@dataclass(frozen=True, slots=True)
class ChainRule:
    """The rule that chooses the file a new one is stored against.

    Files are counted from their full file, which has position 0. In a plain chain each is stored against the
    one before. In a *forked* one, position p is stored against p with its lowest bit cleared: 5 and 6
    against 4, 4 and 8 against the full file. Chains are then at most log2(full_every) deltas deep, and so
    is what must be decoded for the next delta; the base is 2 positions away on average. It is always one
    that the file before was stored against, or that file itself, so no prune has deleted it.
    """

    full_every: int  # the file after position full_every - 1 is a full file
    is_forked: bool  # see above
    is_flat: bool = False  # each is stored against the full file
    # how long files stay; with it, the base is chosen by what takes least disk, see chain.py
    kept: Mapping[FileKind, Kept] | None = field(default=None, hash=False)

    def base_of(self, position: int) -> int | None:
        """Return the position of the base; None for a full file."""
        if not 0 < position < self.full_every:
            return None
        if self.is_flat:
            return 0
        return position & (position - 1) if self.is_forked else position - 1


@dataclass(frozen=True, slots=True, order=True)
class StepFile:
    """One file of a step."""

    step: int  # the step
    kind: FileKind  # what it holds
    is_exact: bool = False  # whether it is a residual: what the lossy file of that kind holds, without loss

    @property
    def name(self) -> str:
        """Its name in the folder."""
        state, exact = ".state" * (self.kind == "state"), ".exact" * self.is_exact
        return f"step-{self.step:08d}{state}{exact}.ckptz"

    @property
    def exact(self) -> StepFile:
        """The residual of this file."""
        return StepFile(self.step, self.kind, is_exact=True)

    @property
    def marker(self) -> str:
        """Name of the empty file that hides it."""
        return f".{self.name}{_HIDDEN}"

    @classmethod
    def parse(cls, name: str) -> StepFile | None:
        """Parse what `name` gives; None for any other file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        file = cls(int(match[1]), "state" if match[2] else "weights", is_exact=match[3] is not None)
        return file if file.name == name else None


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts of a run's file that its index records: which step it is of, and what it needs."""

    content_id: str  # identity of its values
    base: BaseRef | None  # what it is stored against, or None
    step: int | None  # as it is recorded
    metadata: Mapping[str, str]  # under the keys above
    depth: int  # deltas between its full file and it
    tensor_bytes: int  # of its tensors, uncompressed

    @classmethod
    def of(cls, file: Container) -> FileFacts:
        """Take the facts from an open file."""
        index = file.index
        n_bytes = sum(dtype_of(one.dtype).n_bytes(one.shape) for one in index.tensors)
        return cls(index.content_id, index.base, index.step, index.metadata or {}, index.depth, n_bytes)

    @classmethod
    def read(cls, source: ByteSource) -> FileFacts | None:
        """Read the facts of a file and close it; None of a plain file, which says nothing of a run.

        Raises:
            FormatError: it is damaged.
            OSError: it cannot be read.
        """
        with contextlib.closing(open_file(source)) as file:
            return cls.of(file) if isinstance(file, Container) else None

    @property
    def position(self) -> int:
        """Files that were written between its full file and it; 0 for a full file."""
        text = self.metadata.get(POSITION_KEY, "")
        is_whole = text.isdecimal() and len(text) < 10
        return 0 if self.base is None else int(text) if is_whole else self.depth

    @property
    def metric(self) -> float | None:
        """The metric of the step, of weights that were saved with one."""
        try:
            return float(self.metadata[METRIC_KEY])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True)
class Listing:
    """The files of a folder at one moment."""

    sizes: dict[StepFile, int]  # bytes of each file of a step, hidden ones included
    hidden: frozenset[StepFile]  # those that are there only as bases
    # names of files that a killed writer left: unfinished ones, and residuals and markers of nothing
    leftovers: tuple[str, ...]

    @classmethod
    def of(cls, names: dict[str, int]) -> Listing:
        """Sort the names of a folder."""
        sizes = {file: size for name, size in names.items() if (file := StepFile.parse(name))}
        marked = {file for name in names if (file := _marked_by(name))}
        unfinished = [n for n in names if n.startswith(f".{OWNER}") and n.endswith(TEMPORARY_SUFFIX)]
        orphaned = [file.marker for file in sorted(marked - set(sizes))]
        alone = sorted(
            file for file in sizes if file.is_exact and StepFile(file.step, file.kind) not in sizes
        )
        orphaned += [file.name for file in alone]
        return cls(sizes, frozenset(marked & set(sizes)), tuple(unfinished + orphaned)).without({*alone})

    @cached_property
    def weights_steps(self) -> tuple[int, ...]:
        """Steps whose weights can be read, ascending."""
        return tuple(sorted(file.step for file in self._seen("weights")))

    @cached_property
    def full_steps(self) -> tuple[int, ...]:
        """Steps that training can resume from, ascending."""
        states = {file.step for file in self._seen("state")}
        return tuple(step for step in self.weights_steps if step in states)

    def _seen(self, kind: FileKind) -> set[StepFile]:
        return {f for f in self.sizes if f.kind == kind and not f.is_exact and f not in self.hidden}

    def without(self, files: set[StepFile]) -> Listing:
        """Return the listing without some files."""
        sizes = {file: size for file, size in self.sizes.items() if file not in files}
        return Listing(sizes, self.hidden & set(sizes), self.leftovers)

    def steps_of(self, kind: FileKind) -> tuple[int, ...]:
        """List the steps of which users may ask for this file."""
        return self.weights_steps if kind == "weights" else self.full_steps


def _marked_by(name: str) -> StepFile | None:
    is_marker = name.startswith(".") and name.endswith(_HIDDEN)
    return StepFile.parse(name[1 : -len(_HIDDEN)]) if is_marker else None


def model_prefix(file: str, metadata: Mapping[str, str] | None, names: Iterable[str]) -> str:
    """Return what a run's file of weights puts before the model's names: "model.", or nothing.

    Args:
        file: path of the file, which identifies residual files.
        metadata: of the file.
        names: of all its tensors.
    """
    texts = metadata or {}
    is_residual = EXACT_OF_KEY in texts and StepFile.parse(os.path.basename(file)) is not None
    if NAMES_KEY in texts or not (is_residual or POSITION_KEY in texts):
        return ""
    return MODEL_PREFIX if all(name.startswith(MODEL_PREFIX) for name in names) else ""
