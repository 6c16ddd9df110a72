"""Followers killed at random: the tensors are one published step, or every check refuses them."""

import mmap
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from ckptz.api import apply
from ckptz.errors import MissingBaseError
from ckptz.run.versions import versions_in
from ckptz.sync import Follower, Publisher
from ckptz.torch import apply_
from tests.support.sync_support import State, cloned, moved, same

N_TENSORS, N_ELEMENTS, N_STEPS = 24, 500, 5
PAUSE = 0.0005  # seconds between the tensors of one update, so that many kills hit an update

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share memory")


def shared_state() -> State:
    """Return tensors in shared memory, which outlives a process that writes to them."""
    size = 2 * N_ELEMENTS
    memory = mmap.mmap(-1, N_TENSORS * size)
    buffer = torch.frombuffer(memory, dtype=torch.bfloat16)
    parts = buffer.split(N_ELEMENTS)
    return {f"layer {i}": part for i, part in enumerate(parts)}


def published(folder: Path) -> list[State]:
    publisher, states = Publisher(folder, full_every=3, jobs=1), []
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(N_ELEMENTS, generator=generator).bfloat16() for name in shared_state()}
    for step in range(N_STEPS):
        publisher.publish(state, step)
        states.append(state)
        state = moved(state, step, 0.1)
    return states


def follow_and_be_killed(folder: Path, live: State, after: float, n_begun: int) -> None:
    """Update `live` in another process, slowly, and kill that process.

    Args:
        folder: of the run to follow.
        live: tensors in shared memory.
        after: seconds from the first `n_begun` writes to the kill.
        n_begun: number of tensors whose write must have begun; with 0, the kill may come before or after
            the update. Otherwise the process pauses two tensors later, as a busy machine may kill it late.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        real, left = apply._Edit.apply, n_begun + 1

        def slowly(self: apply._Edit) -> None:
            nonlocal left
            os.write(write_end, b".")
            time.sleep(600 if n_begun and not left else PAUSE)
            left -= 1
            real(self)

        apply._Edit.apply = slowly
        try:
            Follower(folder, jobs=1).apply_to(live)
        finally:
            os._exit(0)
    os.close(write_end)
    for _ in range(n_begun):
        os.read(read_end, 1)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)


@pytest.mark.parametrize("n_kills", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_a_torn_state_passes_no_check_and_is_repaired(tmp_path: Path, n_kills: int) -> None:
    states, live, rng = published(tmp_path), shared_state(), random.Random(0)
    deltas = [v for v in versions_in(dict.fromkeys(os.listdir(tmp_path), 0)) if v.base is not None]
    assert len(deltas) == N_STEPS - 1
    n_torn = 0
    for i in range(n_kills):
        begin = rng.randrange(N_STEPS - 1)
        for name, tensor in live.items():
            tensor.copy_(states[begin][name])
        n_begun = rng.randrange(1, N_TENSORS - 1) if i % 4 else 0
        follow_and_be_killed(tmp_path, live, rng.uniform(0, (2 if n_begun else N_TENSORS) * PAUSE), n_begun)
        left = cloned(live)
        n_torn += not any(same(left, state) for state in states)
        for delta in deltas:
            if same(left, states[delta.base]):
                continue
            with pytest.raises(MissingBaseError):
                apply_(live, tmp_path / delta.name, jobs=1)
            assert same(live, left)
        Follower(tmp_path, jobs=1).apply_to(live)
        assert same(live, states[-1])
    assert n_torn > n_kills // 2, "too few were killed while they wrote"
