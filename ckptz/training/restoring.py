"""The two files of a step, opened to be restored, and the parts of the run that they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ckptz.errors import ConfigError, CorruptionError
from ckptz.store.step_files import StepFile
from ckptz.store.steps import StepStore
from ckptz.training.files import MODEL, StepReader

_REST: Final = ("optimizer", "classes", "groups", "extra", "rng")


def check_there(store: StepStore, step: int, weights_only: bool) -> None:
    """Require a step.

    Raises:
        ConfigError: it is not there, or only its weights are and the rest is wanted too.
    """
    listing = store.listing()
    there = listing.weights_steps if weights_only else listing.full_steps
    if step in there:
        return
    if step in listing.weights_steps:
        raise ConfigError(
            f"{store.name}: step {step} has only its weights left; restore them with weights_only=True"
        )
    newest = f"the newest is {there[-1]}" if there else "there is none"
    raise ConfigError(f"{store.name}: step {step} is not there; {newest}, steps() lists all")


@contextlib.contextmanager
def opened_step(
    store: StepStore, step: int, weights_only: bool
) -> Iterator[tuple[StepReader, StepReader | None]]:
    """Open the file of weights, and that of everything else unless only weights are wanted.

    Raises:
        CorruptionError: they do not belong together.
    """
    with contextlib.ExitStack() as held:
        weights = StepReader(held.enter_context(store.opened(StepFile(step, "weights"))))
        if weights_only:
            yield weights, None
            return
        state = StepReader(held.enter_context(store.opened(StepFile(step, "state"))))
        if state.metadata.get("weights") != weights.content_id:
            raise CorruptionError(f"{state.name}: belongs to other weights than {weights.name} holds")
        yield weights, state


def model_of(state: Mapping[str, Any], reader: StepReader) -> dict[str, Any]:
    """Give the model's part of what the file of weights holds.

    Raises:
        CorruptionError: it holds something else.
    """
    found = state.get(MODEL)
    if not isinstance(found, dict):
        raise CorruptionError(f"{reader.name}: holds no weights that a Checkpointer saved")
    return found


def rest_of(state: Mapping[str, Any], reader: StepReader) -> Mapping[str, Any]:
    """Give what the other file holds, complete.

    Raises:
        CorruptionError: a part is missing.
    """
    if missing := [name for name in _REST if name not in state]:
        raise CorruptionError(f"{reader.name}: has no {missing[0]!r}, so it is not the state file of a step")
    return state
