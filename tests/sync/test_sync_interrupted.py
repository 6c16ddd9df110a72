"""An interrupt at any line of a follower: the next call brings the tensors to the published values."""

import itertools
import random
import sys
from collections.abc import Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from ckptz.api import apply
from ckptz.sync import Follower, Publisher
from tests.support.sync_support import State, a_state, cloned, published, same

MODULES = ("ckptz/sync/follower.py", "ckptz/api/apply.py")
# The code from the first write of a delta to the update of `step`.
COMMITTING = (Follower.apply_to, Follower._apply, Follower.reset, apply.patch)
COMMITTING += (apply._commit, apply._Edit.apply)


def interrupted_at(
    position: int, run: Any, modules: tuple[str, ...] = MODULES, codes: Collection[CodeType] = ()
) -> bool:
    """Call `run` with a KeyboardInterrupt at the bytecode of this number; return False if there were fewer.

    Only bytecodes of `codes` count, or all of `modules` if there are no codes.
    """
    n = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n
        if not frame.f_code.co_filename.endswith(modules) or (codes and frame.f_code not in codes):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            n += 1
            if n == position:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def sweep(
    folder: Path, states: list[State], first: int, stride: int, codes: Collection[CodeType] = ()
) -> tuple[int, int]:
    """Interrupt updates at one position after another; return numbers of interrupts and wrong results."""
    n_interrupted = n_wrong = 0
    while True:
        live, follower = cloned(states[1]), Follower(folder, check="stored", jobs=1)
        follower.apply_to(live, step=1)
        position = first + n_interrupted * stride
        if not interrupted_at(position, lambda f=follower, to=live: f.apply_to(to), codes=codes):
            return n_interrupted, n_wrong
        n_interrupted += 1
        follower.apply_to(live)
        n_wrong += not same(live, states[2])


@pytest.mark.parametrize("stride", [997, pytest.param(3, marks=pytest.mark.slow)])
def test_no_interrupt_makes_a_trusting_follower_apply_a_delta_twice(tmp_path: Path, stride: int) -> None:
    states = published(tmp_path, 3, full_every=5)
    n_interrupted, n_wrong = sweep(tmp_path, states, random.Random(0).randint(1, stride), stride)
    assert n_interrupted > 5
    assert n_wrong == 0


@pytest.mark.parametrize("kinds", [("float32",), pytest.param((), marks=pytest.mark.slow)])
def test_no_interrupt_between_a_write_and_its_step_makes_a_follower_apply_a_delta_twice(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    state = {name: tensor for name, tensor in a_state().items() if not kinds or name in kinds}
    codes = {function.__code__ for function in COMMITTING}  # type: ignore[attr-defined]
    n_interrupted, n_wrong = sweep(tmp_path, published(tmp_path, 3, state=state, full_every=5), 1, 1, codes)
    assert n_interrupted > 200
    assert n_wrong == 0


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_no_interrupt_ends_a_publisher(tmp_path: Path, stride: int) -> None:
    """Includes interrupts after a file is published and before the publisher has counted the step."""
    trained = {"weight": torch.zeros(64)}
    publisher, live = Publisher(tmp_path, full_every=3, jobs=1), {"weight": torch.ones(64)}
    for position in itertools.count(1, stride):
        trained["weight"][0] += 1
        before = publisher.step
        came = interrupted_at(position, lambda: publisher.publish(trained), ("ckptz/sync/publisher.py",))
        if before == publisher.step:  # nothing was published
            publisher.publish(trained)
        Follower(tmp_path, jobs=1).apply_to(live)
        assert same(live, trained)
        if not came:
            break
    assert position > 2 * stride
