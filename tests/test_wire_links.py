"""Links in one process and over sockets; policies in checkpoints."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptz.dtypes import dtype_of
from ckptz.errors import ConfigError, WireError
from ckptz.torch import load_file, save_file
from ckptz.wire import (
    PRESETS,
    RAW,
    CompressLink,
    LinkPolicy,
    PolicyWarning,
    SocketLink,
    TensorLink,
    TopK,
    Uniform,
    check_policy,
    policy_metadata,
    policy_of,
    simulate,
)
from ckptz.wire.header import Direction
from ckptz.wire.state import Place
from tests.support.wire_support import BACKWARD, SHAPE, N, f32_units, floats, rng


def test_every_policy_survives_its_metadata() -> None:
    mixed = LinkPolicy(forward=TopK(0.05, 16), feedback=("ef21", None), rounding="stochastic")
    policies = [*PRESETS.values(), mixed]
    for policy in policies:
        assert LinkPolicy.from_json(policy.to_json()) == policy
    assert len({policy.digest for policy in policies}) == len(policies)


# --- one process --------------------------------------------------------------------------------


def test_gradients_go_through_the_backward_codec() -> None:
    link = simulate(LinkPolicy(forward=Uniform(8), backward=TopK(0.1)))
    x = torch.randn(8, 1024, requires_grad=True)
    y = link(x)
    weights = torch.randn(8, 1024)
    (y * weights).sum().backward()
    assert x.grad is not None
    assert not torch.equal(x, y)
    assert torch.allclose(x, y, atol=0.05)
    assert (x.grad != 0).sum() == 8 * 102
    twin = TensorLink(0, 1, link.policy)
    assert torch.equal(x.grad, twin.simulate(Direction.BACKWARD, weights, Place(0)))


def test_index_reuse_is_the_derivative_of_top_k() -> None:
    link = simulate("paper_top10")
    x = torch.randn(4, 2048, requires_grad=True)
    y = link(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)


def test_torch_and_compiled_kernels_train_alike() -> None:
    results = []
    for use_torch in (False, True):
        torch.manual_seed(0)
        link = simulate(
            LinkPolicy(forward=TopK(0.1), backward=Uniform(2), feedback="ef21"), use_torch=use_torch
        )
        x = torch.randn(8, 1024).to(torch.bfloat16).requires_grad_()
        for _ in range(3):
            link(x).sum().backward()
        results.append((link(x).detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_raw_policy_changes_nothing_and_copies() -> None:
    x = torch.randn(8, 1024)
    y = simulate("raw")(x)
    assert torch.equal(x, y)
    assert x.data_ptr() != y.data_ptr()


def test_integers_and_small_tensors_pass() -> None:
    link = simulate("balanced")
    for x in (torch.arange(10_000).view(10, 1000), torch.randn(3), torch.zeros(0, 5), torch.tensor(True)):
        assert torch.equal(link(x), x)


def test_evaluation_follows_the_policy() -> None:
    x = torch.randn(8, 1024)
    for policy, is_same in ((PRESETS["safe"], False), (LinkPolicy(forward=TopK(0.1), feedback="ef21"), True)):
        layer = CompressLink(policy).eval()
        assert torch.equal(layer(x), x) == is_same
        assert not torch.equal(layer.train()(x), x)


def test_a_simulation_resumes_to_the_bit() -> None:
    policy = LinkPolicy(forward=TopK(0.1), feedback="ef21", rounding="stochastic")
    straight, first = simulate(policy), simulate(policy)
    batches = [torch.randn(8, 1024) for _ in range(4)]
    expected = [straight(b) for b in batches]
    for b in batches[:2]:
        first(b)
    second = simulate(policy)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(batches[2]), expected[2])
    assert torch.equal(second(batches[3]), expected[3])


# --- policies in checkpoints --------------------------------------------------------------------


class Cut(nn.Module):
    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.link, self.head = CompressLink(policy), nn.Linear(8, 8)


def test_loading_a_topk_model_without_compression_warns_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.ckptz"
    save_file(Cut("paper_top10").state_dict(), path)
    with pytest.warns(PolicyWarning, match=r"only seen the greatest 10% of activations"):
        Cut(None).load_state_dict(load_file(path))
    with pytest.warns(PolicyWarning, match="lose accuracy"):
        Cut("balanced").load_state_dict(load_file(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cut("paper_top10").load_state_dict(load_file(path))
        save_file(Cut("balanced").state_dict(), path)
        Cut(None).load_state_dict(load_file(path))


def test_metadata_tells_what_a_model_was_trained_with() -> None:
    metadata = policy_metadata("paper_top10")
    with pytest.warns(PolicyWarning, match="load with the same policy"):
        assert check_policy(metadata) == PRESETS["paper_top10"]
    state = policy_metadata(LinkPolicy(forward=TopK(0.1), feedback="aqsgd"))
    with pytest.warns(PolicyWarning, match="run it without compression"):
        check_policy(state, LinkPolicy(forward=TopK(0.1), eval="same"))
    assert check_policy({}) is None
    with pytest.raises(ConfigError, match="not one of"):
        policy_of("fastest")


# --- sockets ------------------------------------------------------------------------------------


Ends = tuple[SocketLink, SocketLink, socket.socket]


@pytest.fixture
def connect() -> Iterator[Callable[..., Ends]]:
    """Makes both ends of a link, and closes their sockets after the test."""
    opened: list[socket.socket] = []

    def make(policy: LinkPolicy, timeout: float = 5.0) -> Ends:
        left, right = socket.socketpair()
        opened.extend((left, right))
        pair = (SocketLink(end, 0, 1, policy, timeout=timeout) for end in (left, right))
        return (*pair, left)

    yield make
    for end in opened:
        end.close()


def test_tensors_go_both_ways_over_a_socket(connect: Callable[..., Ends]) -> None:
    policy = LinkPolicy(forward=TopK(0.01), backward=TopK(0.01), reuse=True, feedback=("ef21", None))
    first, second, _ = connect(policy)
    for step in range(3):
        x = rng(step).standard_normal(SHAPE).astype(np.float32)
        thread = threading.Thread(target=first.send, args=(x,))
        thread.start()
        y = second.recv(SHAPE).view(np.float32)
        thread.join()
        assert (y != 0).sum() >= 5 * 11
        second.send(x, BACKWARD)
        gradient = first.recv(SHAPE, direction=BACKWARD).view(np.float32)
        assert (gradient != 0).sum() == 5 * 11


def test_bf16_patterns_go_over_a_socket(connect: Callable[..., Ends]) -> None:
    first, second, _ = connect(LinkPolicy(forward=Uniform(8)))
    x = f32_units(rng().standard_normal(N), "BF16").reshape(SHAPE)
    with pytest.raises(ConfigError, match="name the dtype"):
        first.send(x)
    first.send(x, dtype="BF16")
    received = floats(second.recv(SHAPE, "BF16").reshape(-1), "BF16")
    assert np.abs(received - floats(x.reshape(-1), "BF16")).max() < 0.03


def test_a_peer_that_hangs_up_or_falls_silent_is_named(connect: Callable[..., Ends]) -> None:
    first, second, left = connect(LinkPolicy(forward=RAW), timeout=0.3)
    x = np.zeros(100, np.float32)
    first.send(x)
    second.recv((100,))
    begin = time.monotonic()
    with pytest.raises(WireError, match=r"forward, step 1, .*: header: 0 of 64 bytes came within 0.3 s"):
        second.recv((100,))
    assert time.monotonic() - begin < 3
    left.send(b"half a header")
    left.close()
    with pytest.raises(WireError, match="closed the connection after 13 of 64 bytes"):
        second.recv((100,))


def test_a_header_that_claims_too_much_is_refused_before_its_payload_is_read(
    connect: Callable[..., Ends],
) -> None:
    first, second, left = connect(LinkPolicy())
    message = first.link.send(
        Direction.FORWARD, np.zeros(1000, np.uint32), dtype_of("F32"), (1000,), Place(0)
    ).message
    left.sendall(message.tobytes())
    with pytest.raises(WireError, match="tensor 0: plan: "):
        second.recv((10,))
