"""An interrupt at any point of a message: the retry gives what an undisturbed link gives, or is refused."""

import contextlib
from typing import Any

import numpy as np
import pytest

from ckptz.errors import WireError
from ckptz.format.dtypes import dtype_of
from ckptz.wire import LinkPolicy, TopK, Uniform
from ckptz.wire.endpoint import Link
from ckptz.wire.header import Direction
from ckptz.wire.state import Place
from tests.sync.test_sync_interrupted import interrupted_at

F32 = dtype_of("F32")
FILES = ("ckptz/wire/endpoint.py", "ckptz/wire/state.py")


def retried(run: Any, position: int, n: list[int]) -> Any:
    """Run with an interrupt at a position, and again after it; outcomes inside of `run` are its last."""
    out: list[Any] = []
    if interrupted_at(position, lambda: out.append(run()), FILES):
        n[0] += 1
        if not out:
            out.append(run())
    return out[0]


@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("feedback", [None, "ef", "ef21", "aqsgd"])
@pytest.mark.parametrize("end", ["tx", "rx"])
def test_a_retry_gives_the_undisturbed_values_or_is_refused(end: str, feedback: Any, stride: int) -> None:
    codec = Uniform(4) if feedback == "aqsgd" else TopK(0.25)
    policy = LinkPolicy(forward=codec, backward=codec, feedback=feedback)
    data = [np.random.default_rng(i).normal(size=4096).astype(np.float32).view(np.uint32) for i in range(4)]
    ids = np.arange(4) if feedback == "aqsgd" else None

    def exchange(position: int, n: list[int]) -> list[Any]:
        tx, rx, out = Link(0, 1, policy), Link(0, 1, policy), []
        for step, values in enumerate(data):
            place = Place(step, sample_ids=ids)
            at = position if step == 2 else 0

            def send(values: Any = values, place: Place = place) -> Any:
                return tx.send(Direction.FORWARD, values, F32, (4, 1024), place)

            sent = retried(send, at if end == "tx" else 0, n)

            def receive(sent: Any = sent, place: Place = place) -> Any:
                return rx.receive(Direction.FORWARD, sent.message, F32, (4, 1024), place)

            received = retried(receive, at if end == "rx" else 0, n)
            out += [received.tolist(), sent.decode().tolist()]
        return out

    expected, position, total, n_wrong = exchange(0, [0]), 1, 0, 0
    while True:
        n = [0]
        with contextlib.suppress(WireError):
            n_wrong += exchange(position, n) != expected
        if not n[0]:
            break
        total, position = total + 1, position + stride
    assert total > 5
    assert n_wrong == 0
