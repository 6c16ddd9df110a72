"""Opens and reads the files of a step for a restore.

What a residual makes exact comes back so. A step is exact as a whole or not at all: what training goes on
from is one of the two that were measured, never a mixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ckptz.errors import ConfigError, CorruptionError, MissingBaseError
from ckptz.run.folder import StepStore
from ckptz.run.residuals import with_fallback
from ckptz.run.step_files import WEIGHTS_KEY, FileKind, StepFile
from ckptz.training.files import StepReader
from ckptz.training.snapshot import MODEL

_REST: Final = ("optimizer", "classes", "groups", "extra", "rng")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of a restore.

    Attributes:
        step: the step.
        is_exact: True if every value equals the saved one bit for bit, and no name is missing or unexpected.
        notes: warnings for the user.
        missing: names of the model that the step lacks; `strict=False` leaves them unchanged.
        unexpected: names of the step that the model lacks; `strict=False` ignores them.
    """

    step: int
    is_exact: bool
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def check_there(store: StepStore, step: int, weights_only: bool) -> None:
    """Check that a folder has a step.

    Raises:
        ConfigError: the step does not exist, or it has no state and `weights_only` is False.
    """
    listing = store.listing()
    steps = listing.weights_steps if weights_only else listing.full_steps
    if step in steps:
        return
    if step in listing.weights_steps:
        raise ConfigError(
            f"{store.name}: step {step} has only its weights left; restore them with weights_only=True"
        )
    newest = f"the newest is {steps[-1]}" if steps else "there is none"
    raise ConfigError(f"{store.name}: step {step} is not there; {newest}, steps() lists all")


def read_step(
    store: StepStore, step: int, weights_only: bool, read: Callable[[StepReader, StepReader | None], T]
) -> tuple[T, bool, tuple[str, ...]]:
    """Read a step from its residual files if they exist and are intact, else from its lossy files.

    Args:
        store: the folder.
        step: the step.
        weights_only: do not read the state file.
        read: called with the readers of weights and of state or None; called again with the lossy files if a
            residual file is damaged.

    Returns:
        The result of `read`, whether no file is lossy, and notes for the user.

    Raises:
        CorruptionError: the files do not belong together.
    """
    kinds: tuple[FileKind, ...] = ("weights",) if weights_only else ("weights", "state")
    lossy = [StepFile(step, kind) for kind in kinds]
    exact = [*map(store.listing().residual_or_file, lossy)]

    def read_all(files: Sequence[StepFile]) -> tuple[T, bool]:
        with _opened(store, files) as readers:
            inexact = [reader for reader in readers if reader.lossy]
            if inexact and files is exact:
                raise MissingBaseError(f"{inexact[0].name}: the file that makes it exact is not here")
            return read(readers[0], readers[1] if readers[1:] else None), not inexact

    if exact == lossy:
        parts, is_exact = read_all(lossy)
        note = None if is_exact else f"step {step} is lossy: it has no residual files"
    else:
        (parts, is_exact), note = with_fallback(exact, lossy, read_all, f"{store.name}: step {step} is")
    return parts, is_exact, () if note is None else (note,)


@contextlib.contextmanager
def _opened(store: StepStore, files: Sequence[StepFile]) -> Iterator[list[StepReader]]:
    """Open the weights file and, if requested, the state file; check that they belong together."""
    with contextlib.ExitStack() as stack:
        readers = [StepReader(stack.enter_context(store.opened(file))) for file in files]
        for file, reader in zip(files, readers, strict=True):
            if reader.step != file.step:
                raise CorruptionError(f"{reader.name}: holds step {reader.step}; it was renamed")
        weights, *states = readers
        for state in states:
            if state.metadata.get(WEIGHTS_KEY) != weights.lossy_id:
                raise CorruptionError(f"{state.name}: belongs to other weights than {weights.name} holds")
        yield readers


def model_of(state: Mapping[str, Any], reader: StepReader) -> dict[str, Any]:
    """Return the model's part of a weights file.

    Raises:
        CorruptionError: it has none.
    """
    model = state.get(MODEL)
    if not isinstance(model, dict):
        raise CorruptionError(f"{reader.name}: holds no weights that a Checkpointer saved")
    return model


def rest_of(state: Mapping[str, Any], reader: StepReader) -> Mapping[str, Any]:
    """Return the parts of a state file; all must be present.

    Raises:
        CorruptionError: a part is missing.
    """
    if missing := [name for name in _REST if name not in state]:
        raise CorruptionError(f"{reader.name}: has no {missing[0]!r}, so it is not the state file of a step")
    return state
