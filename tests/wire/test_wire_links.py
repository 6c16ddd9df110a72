"""Simulated links in one process, policies in checkpoints, and compiled layers."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptz.errors import ConfigError
from ckptz.torch import load_file, save_file
from ckptz.wire import (
    PRESETS,
    CompressLink,
    LinkPolicy,
    PolicyWarning,
    TensorLink,
    TopK,
    Uniform,
    check_policy,
    policy_metadata,
    policy_of,
    simulate,
)
from ckptz.wire.header import Direction
from ckptz.wire.state import MessageKey


def test_every_policy_has_a_json_form() -> None:
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
    assert not torch.equal(x, y)
    assert torch.allclose(x, y, atol=0.05)
    assert (x.grad != 0).sum() == 8 * 102
    twin = TensorLink(0, 1, link.policy)
    assert torch.equal(x.grad, twin.simulate(Direction.BACKWARD, weights, MessageKey(0)))


def test_with_index_reuse_gradients_have_the_positions_of_activations() -> None:
    link = simulate("paper_top10")
    x = torch.randn(4, 2048, requires_grad=True)
    y = link(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad != 0, y != 0)


def test_torch_and_compiled_kernels_train_the_same() -> None:
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
    with pytest.warns(PolicyWarning, match=r"only seen the largest 10% of activations"):
        Cut(None).load_state_dict(load_file(path))
    with pytest.warns(PolicyWarning, match="lose accuracy"):
        Cut("balanced").load_state_dict(load_file(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cut("paper_top10").load_state_dict(load_file(path))
        save_file(Cut("balanced").state_dict(), path)
        Cut(None).load_state_dict(load_file(path))


def test_loading_a_file_warns_unless_its_policy_is_named(tmp_path: Path) -> None:
    path = tmp_path / "top10.ckptz"
    save_file({"w": torch.ones(4)}, path, policy_metadata("paper_top10"))
    with pytest.warns(PolicyWarning, match="have only seen the largest 10%"):
        assert load_file(path)["w"].tolist() == [1, 1, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_file(path, link_policy="paper_top10")


def test_metadata_record_the_policy_of_training() -> None:
    metadata = policy_metadata("paper_top10")
    with pytest.warns(PolicyWarning, match="load with the same policy"):
        assert check_policy(metadata) == PRESETS["paper_top10"]
    state = policy_metadata(LinkPolicy(forward=TopK(0.1), feedback="aqsgd"))
    with pytest.warns(PolicyWarning, match="disable compression"):
        check_policy(state, LinkPolicy(forward=TopK(0.1), eval="same"))
    assert check_policy({}) is None
    with pytest.raises(ConfigError, match="not one of"):
        policy_of("fastest")


COMPILED = {
    **{
        f"{codec} {feedback}": LinkPolicy(forward=codec, backward=codec, feedback=feedback)
        for codec in (Uniform(4), TopK(0.25))
        for feedback in (None, "ef", "ef21", "aqsgd")
    },
    "mixed feedback": LinkPolicy(forward=TopK(0.25), backward=Uniform(8), feedback=("ef21", "ef")),
    "feedback of one direction": LinkPolicy(forward=TopK(0.25), backward=TopK(0.1), feedback=(None, "ef21")),
    "reuse": LinkPolicy(forward=TopK(0.25), backward=TopK(0.25), reuse=True),
    "reuse and feedback": LinkPolicy(
        forward=TopK(0.25), backward=TopK(0.25), reuse=True, feedback=("ef21", None), rounding="stochastic"
    ),
    **PRESETS,
}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.slow),
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.apps),
    ],
)
@pytest.mark.parametrize("policy", COMPILED)
def test_a_compiled_layer_gives_the_bits_of_an_eager_one(policy: str, backend: str) -> None:
    """The code around the layer only multiplies by 2, which every backend computes exactly."""
    ids = torch.arange(4) if COMPILED[policy].feedback_of(Direction.FORWARD) == "aqsgd" else None
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = CompressLink(COMPILED[policy])

        def run(x: Tensor, layer: nn.Module = layer) -> Tensor:
            out: Tensor = layer(x * 2, ids) * 2
            return out

        step = torch.compile(run, backend=backend) if is_compiled else run
        for _ in range(3):
            x = torch.randn(4, 2048, requires_grad=True)
            out = step(x)
            out.backward(torch.randn(4, 2048))
            results.append((out.detach(), x.grad))
        results.append((layer.simulation.link.link.sent_bytes, layer.simulation.link.link.raw_bytes))
    eager, compiled = results[:4], results[4:]
    assert eager[3] == compiled[3]
    for a, b in zip(eager[:3], compiled[:3], strict=True):
        assert a[1] is not None
        assert all(map(torch.equal, a, b))
