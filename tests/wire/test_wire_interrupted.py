"""An interrupt at any point of a message: a retry gives the results of an undisturbed link, or is refused."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ckptz.errors import WireError
from ckptz.format.dtypes import dtype_of
from ckptz.wire import LinkPolicy, TensorLink, TopK, Uniform, simulate
from ckptz.wire.endpoint import Link
from ckptz.wire.header import Direction
from ckptz.wire.state import MessageKey
from tests.sync.test_sync_interrupted import interrupted_at

F32 = dtype_of("F32")
FILES = ("ckptz/wire/endpoint.py", "ckptz/wire/state.py")
LAYERS = (*FILES, "ckptz/wire/link.py")


FORWARD, BACKWARD = Direction
SHAPE = (4, 1024)
DATA = [np.random.default_rng(i).normal(size=4096).astype(np.float32).view(np.uint32) for i in range(3)]
TOP, REUSE = TopK(0.25), LinkPolicy(forward=TopK(0.25), backward=TopK(0.25), reuse=True)
POLICIES = {
    "none": LinkPolicy(forward=TOP, backward=TOP),
    "ef": LinkPolicy(forward=TOP, backward=TOP, feedback="ef"),
    "ef21": LinkPolicy(forward=TOP, backward=TOP, feedback="ef21"),
    "aqsgd": LinkPolicy(forward=Uniform(4), backward=Uniform(4), feedback="aqsgd"),
    "reuse": REUSE,
    "reuse and ef21": replace(REUSE, feedback=("ef21", None)),
}
INTERRUPTED = 1  # the interrupted step: feedback has state after step 0


class Exchange:
    """Two ends, or one that simulates both, of which one call is interrupted and retried."""

    def __init__(self, policy: LinkPolicy, call: str, direction: Direction, position: int) -> None:
        self._ends = Link(0, 1, policy), Link(0, 1, policy)
        self._call, self._direction, self._position = call, direction, position
        self._ids = np.arange(4) if policy.feedback_of(FORWARD) == "aqsgd" else None
        self.is_interrupted = False

    def run(self) -> list[Any]:
        """Return all received bytes, and the final state and byte counters of both ends."""
        out: list[Any] = []
        for step, values in enumerate(DATA):
            key = MessageKey(step, sample_ids=self._ids)
            for direction, data in ((FORWARD, values), (BACKWARD, values[::-1].copy())):
                out.append(self._across(direction, data, key).tobytes())
        for end in self._ends:
            out += [{name: array.tobytes() for name, array in end.state_dict().items()}]
            out += [end.sent_bytes, end.raw_bytes]
        return out

    def _across(self, direction: Direction, data: Any, key: MessageKey) -> Any:
        src, dst = self._ends if direction is FORWARD else self._ends[::-1]
        arguments = direction, data, F32, SHAPE, key
        if self._call == "simulate":
            return self._retried("simulate", direction, key, lambda: self._ends[0].simulate(*arguments))
        sent = self._retried("send", direction, key, lambda: src.send(*arguments))
        arguments = direction, sent.message, F32, SHAPE, key
        received = self._retried("receive", direction, key, lambda: dst.receive(*arguments))
        assert np.array_equal(received, sent.decode())
        return received

    def _retried(self, call: str, direction: Direction, key: MessageKey, run: Any) -> Any:
        if (call, direction, key.step) != (self._call, self._direction, INTERRUPTED):
            return run()
        out: list[Any] = []
        self.is_interrupted = interrupted_at(self._position, lambda: out.append(run()), FILES)
        return out[0] if out else run()


@pytest.mark.parametrize("stride", [173, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("call", ["send", "receive", "simulate"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_retry_gives_the_results_of_an_undisturbed_link_or_is_refused(
    policy: str, call: str, direction: Direction, stride: int
) -> None:
    expected = Exchange(POLICIES[policy], call, direction, 0).run()
    n_interrupted = n_wrong = 0
    while True:
        exchange = Exchange(POLICIES[policy], call, direction, stride // 2 + 1 + n_interrupted * stride)
        with contextlib.suppress(WireError):
            n_wrong += exchange.run() != expected
        if not exchange.is_interrupted:
            break
        n_interrupted += 1
    assert n_interrupted > 2
    assert n_wrong == 0


@pytest.mark.parametrize("stride", [173, pytest.param(7, marks=pytest.mark.slow)])
def test_a_retry_of_a_layer_reuses_the_key_of_the_interrupted_call(stride: int) -> None:
    policy = LinkPolicy(forward=TOP, backward=TOP, feedback="ef21", rounding="stochastic")
    data = [torch.from_numpy(one.view(np.float32)).reshape(SHAPE) for one in DATA]

    def run(position: int) -> tuple[list[Any], bool, bool]:
        link, out = simulate(policy), list[Any]()
        link(data[0])
        is_interrupted = interrupted_at(position, lambda: out.append(link(data[1])), LAYERS)
        is_counted = link.state_dict()["wire/0-1/calls"][0] == 2
        out = out or [link(data[1])]
        return (
            [*(one.tolist() for one in (*out, link(data[2]))), link.link.link.sent_bytes],
            is_interrupted,
            is_counted,
        )

    expected, position, n_interrupted, n_wrong = run(0)[0], 1, 0, 0
    while True:
        try:
            results, is_interrupted, is_counted = run(position)
        except WireError:
            results, is_interrupted, is_counted = expected, True, False
        # After the call has been counted, Python handles a signal only in its caller.
        if not is_interrupted or is_counted:
            break
        n_wrong += results != expected
        n_interrupted, position = n_interrupted + 1, position + stride
    assert n_interrupted > 5
    assert n_wrong == 0


def test_a_retained_graph_is_differentiated_twice() -> None:
    link = simulate(LinkPolicy(forward=Uniform(8), backward=TopK(0.1)))
    x = torch.randn(8, 1024, requires_grad=True)
    y = link(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, first + first)


def test_an_interrupted_check_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tx, rx = (TensorLink(0, 1, "safe", use_torch=True, fixed=True, verify="step").link for _ in range(2))
    data = torch.from_numpy(DATA[0].view(np.int32))
    message = tx.send(FORWARD, data, F32, SHAPE, MessageKey(0)).message
    message[100] ^= 1
    rx.receive(FORWARD, message, F32, SHAPE, MessageKey(0))

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rx.state.kernels, "to_bools", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rx.check()
    with pytest.raises(WireError, match="payload checksum"):
        rx.check()
