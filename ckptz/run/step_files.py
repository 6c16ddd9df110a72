"""Files of a Checkpointer: names, recorded facts, listings, and the rule that chooses a base."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, SupportsIndex

from ckptz.errors import ConfigError
from ckptz.format.byte_source import ByteSource
from ckptz.format.index import BaseRef
from ckptz.format.reader import Container
from ckptz.format.sources import tensor_bytes
from ckptz.format.suffixes import SUFFIX, TEMPORARY_SUFFIX
from ckptz.store.resolve import open_file

FileKind = Literal["weights", "state"]
FILE_KINDS: Final[tuple[FileKind, ...]] = ("weights", "state")
OWNER: Final = "step-"  # begins the names of temporary files
ABANDONED_SECONDS: Final = 3600.0  # after which nobody writes to an unfinished file any more
METRIC_KEY: Final = "metric"  # in the metadata of weights: the number that `save(metric=...)` was given
POSITION_KEY: Final = "since_anchor"  # in the metadata of weights and state: position in the chain
WEIGHTS_KEY: Final = "weights"  # in the metadata of state: content id of the weights of its step
STATE_KEY: Final = "state"  # in the metadata of weights: name of the file with their optimizer state
VERSIONS_KEY: Final = "versions"  # in the metadata of weights: JSON of versions of modules, by name
FROZEN_KEY: Final = "frozen"  # in the metadata of weights: content id of frozen weights, left out
NAMES_KEY: Final = "names"  # in the metadata of weights without the prefix "model.": "own"
# Metadata that a Checkpointer uses itself; pages and tables leave them out.
INTERNAL_KEYS: Final = (POSITION_KEY, WEIGHTS_KEY, STATE_KEY, FROZEN_KEY, NAMES_KEY)
INDEX_FILE: Final = "ckptz-index.json"  # written last into the folder of a step of several ranks
COMPLETE: Final = "ckptz-complete.json"  # written last into the folder of a step, if nothing else is
TRAINER_STATE: Final = "trainer_state.json"  # which the Trainer writes last
# The file that a writer writes last into the folder of a step; without it the folder is incomplete.
LAST_FILES: Final = (INDEX_FILE, TRAINER_STATE, COMPLETE)
EXACT_OF_KEY: Final = "exact_of"  # in the metadata of residuals: content id of the lossy file
MODEL_PREFIX: Final = "model."  # of weight names in files of a Checkpointer
MAX_STEP: Final = (1 << 63) - 1
ENDLESS: Final = 1 << 30  # number of saves for a file that is never deleted
EARLIER_RESIDUAL: Final = ".exact"  # end of the stem of earlier residual files; later ones add a digest
RESIDUAL_MARK: Final = f"{EARLIER_RESIDUAL}-"  # today, before 16 hexadecimal digits of a digest
RESIDUAL_PATTERN: Final = rf"{re.escape(RESIDUAL_MARK)}[0-9a-f]{{16}}"  # matches this end of a stem
_NAME: Final = re.compile(
    rf"step-(\d{{8,}})(\.state)?({RESIDUAL_PATTERN}|{re.escape(EARLIER_RESIDUAL)})?\.ckptz"
)
_RESIDUAL: Final = re.compile(rf"(?P<stem>.*){RESIDUAL_PATTERN}", re.DOTALL)
_HIDDEN: Final = ".hidden"
ALL_EXACT: Final = (
    "all kept steps are exact, so lossy files with their residual files take more disk than lossless ones: "
    "keep more steps, or exact=0"
)


def checked_step(step: SupportsIndex) -> int:
    """Convert a step of any integer type to int.

    Raises:
        ConfigError: it is not an integer from 0 to below 2^63.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(f"a step is a whole number from 0 to below 2^63, got {step!r:.80}")
    return int(number)  # of a bool, too


def lossy_stem(stem: str) -> str:
    """Return the stem of the lossy file that a residual belongs to; any other stem is returned as it is."""
    residual = _RESIDUAL.fullmatch(stem)
    return stem if residual is None else residual["stem"]


def is_residual_name(name: str) -> bool:
    """Return whether a file name ends as those of residual files do, with 16 hexadecimal digits."""
    stem = name.removesuffix(SUFFIX)
    return stem != name and lossy_stem(stem) != stem


def is_written(path: Path) -> bool:
    """Return whether a file of `LAST_FILES` is complete: the Trainer's appears before it is."""
    try:
        json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Kept:
    """Retention of the files of one kind, as far as it is known in advance."""

    last: int | None = None  # number of newest files that are kept; None for all
    every: tuple[int, ...] = ()  # steps that are multiples of one of these are kept for ever
    best: int = 0  # number of other files that are kept, which ones is unknown

    def stays(self, steps: Sequence[int]) -> list[int]:
        """Return for each existing step, ascending, the number of future saves until its file is deleted."""
        if self.last is None:
            return [ENDLESS] * len(steps)
        ages = range(len(steps), 0, -1)
        # A kept step that is neither among the last nor a multiple is one of the best.
        beyond = ENDLESS if self.best else 0
        return [
            ENDLESS if self._is_multiple(step) else beyond if age > self.last else self.last - age
            for step, age in zip(steps, ages, strict=True)
        ]

    def stays_of(self, steps: Sequence[int], n_saves: int, full_every: int) -> list[int]:
        """Return for each of the next `n_saves` saves, from 0, the number of the save that deletes its file.

        The interval between steps is taken to stay the same. The best steps are taken to be those that need
        most disk: far from one another, each the last before a full file.
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
        """Return whether all kept files also stay exact; `exact` is their number, None for all."""
        if self.every or self.best:
            return False
        return exact is None or (self.last is not None and self.last <= exact)

    def _is_multiple(self, step: int) -> bool:
        return any(step % n == 0 for n in self.every)


@dataclass(frozen=True, slots=True)
class ChainRule:
    """A rule that chooses the base of the next file by its position, counted from a full file at position 0.

    In a plain chain, the base of each file is the file before it. In a *forked* chain, the base of position p
    is p with its lowest bit cleared: 4 for 5 and 6, the full file for 4 and 8. A chain then has at most
    log2(full_every) deltas, which bounds the decoding for the next delta; the base is 2 positions away on
    average. The base is always the file before or in its chain, so no prune has deleted it.
    """

    full_every: int  # the file after position full_every - 1 is a full file
    is_forked: bool  # see above
    is_flat: bool = False  # the base of each delta is the full file
    # how long files are kept; if known, the base is chosen for the least disk, see chain.py
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
    """The name of a file in the folder of a Checkpointer: weights or state of a step, or their residual."""

    step: int  # the step
    kind: FileKind  # what it holds
    tail: str = ""  # of a residual: the end of its name, ".exact-" and a digest of its lossy file

    @property
    def name(self) -> str:
        """Its name in the folder."""
        return f"step-{self.step:08d}{'.state' * (self.kind == 'state')}{self.tail}.ckptz"

    @property
    def is_residual(self) -> bool:
        """True if it is a residual, which holds the values of the lossy file without loss."""
        return bool(self.tail)

    @property
    def lossy(self) -> StepFile:
        """The file itself, or of a residual the lossy file that it belongs to."""
        return StepFile(self.step, self.kind)

    @property
    def marker(self) -> str:
        """Name of its marker, an empty file that hides it from users."""
        return f".{self.name}{_HIDDEN}"

    @classmethod
    def parse(cls, name: str) -> StepFile | None:
        """Parse a file name; None for a file that is not one of a step."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        file = cls(int(match[1]), "state" if match[2] else "weights", match[3] or "")
        return file if file.name == name else None


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts that the index of a file records: its step, its base and its size."""

    content_id: str  # identity of its values
    base: BaseRef | None  # reference to its base, None for a full file
    step: int | None  # the recorded step
    metadata: Mapping[str, str]  # has the keys above
    depth: int  # chain length: deltas between the file and its full file
    tensor_bytes: int  # decoded size of its tensors

    @classmethod
    def of(cls, file: Container) -> FileFacts:
        """Return the facts of an open file."""
        index = file.index
        metadata, n_bytes = index.metadata or {}, tensor_bytes(file.tensors)
        return cls(index.content_id, index.base, index.step, metadata, index.depth, n_bytes)

    @classmethod
    def read(cls, source: ByteSource) -> FileFacts | None:
        """Read the facts of a file and close it; None for a plain safetensors file.

        Raises:
            FormatError: the file is damaged.
            OSError: the file cannot be read.
        """
        with contextlib.closing(open_file(source)) as file:
            return cls.of(file) if isinstance(file, Container) else None

    @property
    def position(self) -> int:
        """Number of files written since its full file; 0 for a full file."""
        text = self.metadata.get(POSITION_KEY, "")
        is_whole = text.isdecimal() and len(text) < 10
        return 0 if self.base is None else int(text) if is_whole else self.depth

    @property
    def metric(self) -> float | None:
        """The number that `save(metric=...)` was given for the step, or None."""
        try:
            return float(self.metadata[METRIC_KEY])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True)
class Listing:
    """The files of a folder at one moment."""

    sizes: dict[StepFile, int]  # size in bytes of each file, hidden files included
    hidden: frozenset[StepFile]  # files that are kept only as bases
    # names of files that a killed writer left: unfinished files, and residuals and markers without their file
    leftovers: tuple[str, ...]

    @classmethod
    def of(cls, names: dict[str, int]) -> Listing:
        """Parse the names and sizes of the files in a folder."""
        sizes = {file: size for name, size in names.items() if (file := StepFile.parse(name))}
        markers = [name for name in names if name.startswith(".") and name.endswith(_HIDDEN)]
        marked = {file for name in markers if (file := StepFile.parse(name[1 : -len(_HIDDEN)]))}
        unfinished = [n for n in names if n.startswith(f".{OWNER}") and n.endswith(TEMPORARY_SUFFIX)]
        orphaned = [file.marker for file in sorted(marked - set(sizes))]
        alone = sorted(file for file in sizes if file.lossy not in sizes)
        orphaned += [file.name for file in alone]
        return cls(sizes, frozenset(marked & set(sizes)), tuple(unfinished + orphaned)).without({*alone})

    @cached_property
    def weights_steps(self) -> tuple[int, ...]:
        """Steps with weights, ascending."""
        return tuple(sorted(file.step for file in self._seen("weights")))

    @cached_property
    def full_steps(self) -> tuple[int, ...]:
        """Steps that training can resume from, ascending."""
        states = {file.step for file in self._seen("state")}
        return tuple(step for step in self.weights_steps if step in states)

    def _seen(self, kind: FileKind) -> set[StepFile]:
        return {f for f in self.sizes if f.kind == kind and not f.is_residual and f not in self.hidden}

    def residual_or_file(self, file: StepFile) -> StepFile:
        """Return the residual of a lossy file, or the file itself if it has none."""
        return max((one for one in self.sizes if one.lossy == file), default=file)

    def without(self, files: set[StepFile]) -> Listing:
        """Return the listing without some files."""
        sizes = {file: size for file, size in self.sizes.items() if file not in files}
        return Listing(sizes, self.hidden & set(sizes), self.leftovers)

    def steps_of(self, kind: FileKind) -> tuple[int, ...]:
        """List the steps that have a file of this kind for users, ascending."""
        return self.weights_steps if kind == "weights" else self.full_steps


def model_prefix(file: str, metadata: Mapping[str, str] | None, names: Iterable[str]) -> str:
    """Return the prefix of the model's tensor names in a file of weights: "model." or "".

    Args:
        file: path of the file, which identifies residual files.
        metadata: metadata of the file.
        names: names of all its tensors.
    """
    texts = metadata or {}
    is_residual = EXACT_OF_KEY in texts and StepFile.parse(os.path.basename(file)) is not None
    if NAMES_KEY in texts or not (is_residual or POSITION_KEY in texts):
        return ""
    return MODEL_PREFIX if all(name.startswith(MODEL_PREFIX) for name in names) else ""
