"""The tracker of gradients: averages, steps, names and files."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ckptz.errors import CalibrationError, ConfigError
from ckptz.guidance.files import KEY_CONTENT, SensitivityFile
from ckptz.hooks import SensitivityTracker
from tests.support.hooks_support import process_group, rewrite


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(n: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator) for _ in range(n)]


def backward(model: nn.Module, batch: torch.Tensor, factor: float = 1.0) -> None:
    (model(batch).square().mean() * factor).backward()


def plain_step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()


def expected_averages(model: nn.Module, beta: float) -> dict[str, np.ndarray]:
    """Return float64 averages of the gradients that an optimizer hook records."""
    averages: dict[str, np.ndarray] = {}
    optimizer = SGD(model.parameters(), lr=0.1)

    def keep(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.double().numpy()
                old = averages.get(name, gradient)
                averages[name] = beta * gradient + (1 - beta) * old

    optimizer.register_step_pre_hook(keep)
    for batch in batches():
        plain_step(model, optimizer, batch)
    return averages


def check_close(tracker: SensitivityTracker, expected: dict[str, np.ndarray], rtol: float = 1e-5) -> None:
    averages = tracker.gradients()
    assert set(averages) == set(expected)
    for name, average in averages.items():
        assert average.dtype == torch.float32
        np.testing.assert_allclose(average.numpy(), expected[name], rtol, atol=1e-7, err_msg=name)


# --- what is averaged -------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.9, 0.3, 1.0])
def test_the_average_weighs_the_new_gradient_by_beta(beta: float) -> None:
    model = a_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with SensitivityTracker(model, beta=beta) as tracker:
        for batch in batches():
            plain_step(model, optimizer, batch)
    check_close(tracker, expected_averages(a_model(), beta))


def test_sensitivity_is_the_average_times_the_weight_as_it_is_now() -> None:
    model = a_model()
    with SensitivityTracker(model) as tracker:
        plain_step(model, SGD(model.parameters(), lr=0.1), batches()[0])
    gradients, weights = tracker.gradients(), dict(model.named_parameters())
    for name, values in tracker.sensitivity().items():
        assert not values.requires_grad
        assert torch.equal(values, (gradients[name] * weights[name]).abs())


def test_micro_batches_are_one_step() -> None:
    model = a_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with SensitivityTracker(model, beta=0.5) as tracker:
        for batch in batches(2):
            optimizer.zero_grad()
            for part in batch.split(2):
                backward(model, part, 1 / 3)
            optimizer.step()
    other = a_model()
    optimizer = SGD(other.parameters(), lr=0.1)
    with SensitivityTracker(other, beta=0.5) as full_batch:
        for batch in batches(2):
            plain_step(other, optimizer, batch)
    check_close(tracker, {name: average.numpy() for name, average in full_batch.gradients().items()})


def test_clipped_gradients_are_averaged_as_clipped() -> None:
    def clipped(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        backward(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    model = a_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with SensitivityTracker(model, beta=1.0) as tracker:
        clipped(model, optimizer, batches()[0])
    norm = torch.stack([average.norm() for average in tracker.gradients().values()]).norm()
    assert norm == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_scaled_gradients_are_averaged_unscaled_and_skipped_steps_not_at_all(
    fused: bool, unscale: bool
) -> None:
    model = a_model()
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with SensitivityTracker(model, beta=1.0) as tracker:
        for factor in (1.0, float("inf")):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(model(batches()[0]).square().mean() * factor).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert all(map(torch.equal, before, model.parameters())), "the second step is to be skipped"
    other = a_model()
    backward(other, batches()[0])
    gradients = {name: parameter.grad for name, parameter in other.named_parameters()}
    check_close(tracker, {name: one.numpy() for name, one in gradients.items() if one is not None})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_averaged_in_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 2, bias=False).to(dtype)
    optimizer = SGD(model.parameters(), lr=0.0)
    gradients = [torch.full((2, 4), value, dtype=dtype) for value in (1.0, 1.0 + 2**-7)]
    with SensitivityTracker(model, beta=0.25) as tracker:
        for gradient in gradients:
            model.weight.grad = gradient
            optimizer.step()
    assert torch.equal(tracker.gradients()["weight"], torch.full((2, 4), 1 + 2**-9))


def test_sparse_gradients_of_embeddings_are_averaged_densely() -> None:
    averages = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(6, 3, sparse=sparse)
        optimizer = SGD(model.parameters(), lr=0.1) if not sparse else SparseAdam(model.parameters(), lr=0.1)
        with SensitivityTracker(model) as tracker:
            for tokens in ([0, 2, 2], [5, 2, 1]):
                optimizer.zero_grad()
                model(torch.tensor(tokens)).sum().backward()
                optimizer.step()
        averages.append(tracker.gradients()["weight"])
    assert not averages[1].is_sparse
    torch.testing.assert_close(averages[0], averages[1])


def test_channels_last_weights_keep_their_values(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), lr=0.0)
    with SensitivityTracker(model) as tracker:
        for _ in range(2):
            backward(model, torch.ones(1, 3, 5, 5))
            optimizer.step()
            gradient = model.weight.grad
            optimizer.zero_grad()
    torch.testing.assert_close(tracker.gradients()["weight"], gradient)
    tracker.save(tmp_path / "averages")
    with SensitivityFile(tmp_path / "averages") as file:
        np.testing.assert_array_equal(file.recorded["weight"].read(), tracker.gradients()["weight"].numpy())


def test_every_optimizer_updates_its_own_parameters() -> None:
    model = a_model()
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    stranger = nn.Linear(2, 2)
    with SensitivityTracker(model) as tracker:
        backward(stranger, torch.ones(1, 2))
        SGD(stranger.parameters(), lr=0.1).step()
        assert tracker.gradients() == {}
        backward(model, batches()[0])
        first.step()
        assert list(tracker.gradients()) == ["0.weight", "0.bias"]
        second.step()
    assert tracker.missing() == []


# --- names ------------------------------------------------------------------------------------------


def test_frozen_and_unused_parameters_are_missing() -> None:
    model = a_model()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model[0].weight.requires_grad_(False)
    with SensitivityTracker(model) as tracker:
        plain_step(model, SGD(model.parameters(), lr=0.1), batches()[0])
    assert tracker.missing() == ["unused", "0.weight"]
    assert set(tracker.sensitivity()) == {"0.bias", "2.weight", "2.bias"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embedding(tokens))
        return result


def test_a_tied_weight_is_averaged_once_and_found_by_any_of_its_names(tmp_path: Path) -> None:
    model = Tied()
    with SensitivityTracker(model) as tracker:
        plain_step(model, SGD(model.parameters(), lr=0.1), torch.tensor([1, 2]))
    assert list(tracker.gradients()) == ["embedding.weight"]
    tracker.save(tmp_path / "averages")
    with SensitivityFile(tmp_path / "averages") as file:
        matched, unmatched = file.match({"head.weight": (5, 4)})
    assert list(matched) == ["head.weight"]
    assert unmatched == []


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # the default backend starts processes


def replicated(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.require_backward_grad_sync = False  # without other ranks
    return wrapped


@pytest.mark.parametrize("wrap", [replicated, DataParallel, compiled])
def test_wrapped_models_have_their_own_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = a_model()
    with process_group():
        wrapped = wrap(model)
        run = model if wrap is compiled else wrapped  # names need no compiler
        with SensitivityTracker(wrapped) as tracker:
            plain_step(run, SGD(wrapped.parameters(), lr=0.1), batches()[0])
    assert list(tracker.gradients()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("beta", [0.0, -0.1, 1.1, float("nan")])
def test_beta_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta"):
        SensitivityTracker(a_model(), beta=beta)


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'weight' has no shape yet"):
        SensitivityTracker(nn.LazyLinear(2))


def test_a_sharded_model_is_refused() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
        with pytest.raises(ConfigError, match="'weight' is sharded"):
            SensitivityTracker(model)


# --- hooks and their removal ------------------------------------------------------------------------


def test_nothing_is_averaged_after_the_block() -> None:
    model = a_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with SensitivityTracker(model) as tracker:
        plain_step(model, optimizer, batches()[0])
    kept = {name: average.clone() for name, average in tracker.gradients().items()}
    plain_step(model, optimizer, batches()[1])
    assert all(torch.equal(average, tracker.gradients()[name]) for name, average in kept.items())


def test_a_deleted_tracker_removes_its_hook() -> None:
    n_before = len(_global_optimizer_pre_hooks)
    tracker = SensitivityTracker(a_model())
    assert len(_global_optimizer_pre_hooks) == n_before + 1
    del tracker
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == n_before


# --- files ------------------------------------------------------------------------------------------


def tracked(n_steps: int = 2, seed: int = 0) -> tuple[nn.Module, Optimizer, SensitivityTracker]:
    torch.manual_seed(seed)
    model = a_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    tracker = SensitivityTracker(model, beta=0.7)
    for batch in batches(n_steps):
        plain_step(model, optimizer, batch)
    return model, optimizer, tracker


def by_file(tracker: SensitivityTracker, other: SensitivityTracker, path: Path) -> None:
    tracker.save(path / "averages.safetensors")
    other.load(path / "averages.safetensors")


def by_state(tracker: SensitivityTracker, other: SensitivityTracker, path: Path) -> None:
    torch.save(tracker.state_dict(), path / "state.pt")
    other.load_state_dict(torch.load(path / "state.pt", weights_only=True))


@pytest.mark.parametrize("way", [by_file, by_state])
def test_a_restored_tracker_continues_bit_for_bit(tmp_path: Path, way: Any) -> None:
    model, optimizer, tracker = tracked()
    with tracker, SensitivityTracker(model) as other:
        way(tracker, other, tmp_path)
        assert other.beta == 0.7
        for average, restored in zip(tracker.gradients().values(), other.gradients().values(), strict=True):
            assert torch.equal(average, restored)
            assert average.data_ptr() != restored.data_ptr()
        plain_step(model, optimizer, batches(3)[2])
        assert list(map(torch.Tensor.tolist, tracker.gradients().values())) == list(
            map(torch.Tensor.tolist, other.gradients().values())
        )


@pytest.mark.parametrize("way", [by_file, by_state])
def test_another_models_averages_are_refused(tmp_path: Path, way: Any) -> None:
    tracker = tracked()[2]
    with pytest.raises(CalibrationError, match="of a model with other parameters"):
        way(tracker, SensitivityTracker(nn.Linear(4, 8)), tmp_path)


def test_a_changed_state_is_refused() -> None:
    tracker = tracked()[2]
    state = tracker.state_dict()
    state["averages"]["0.weight"] = torch.ones(3)
    with pytest.raises(CalibrationError, match="the state"):
        tracker.load_state_dict(state)


def test_averages_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    tracker = tracked()[2]
    tracker.gradients()["2.bias"][0] = float("nan")
    with pytest.raises(CalibrationError, match=r"averages.*'2\.bias' is not finite"):
        tracker.save(tmp_path / "averages")
    assert os.listdir(tmp_path) == []


def test_the_file_is_read_with_numpy_and_matched_by_name(tmp_path: Path) -> None:
    tracker = tracked()[2]
    tracker.save(tmp_path / "averages")
    shapes = {"module.0.weight": (8, 4), "model.2.weight": (3, 8), "else": (1,)}
    with SensitivityFile(tmp_path / "averages") as file:
        matched, unmatched = file.match(shapes)
        assert {name: one.names for name, one in matched.items()} == {
            "module.0.weight": ("0.weight",),
            "model.2.weight": ("2.weight",),
        }
        assert unmatched == ["0.bias", "2.bias"]
        read = matched["module.0.weight"].read()
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, tracker.gradients()["0.weight"].numpy())
        with pytest.raises(CalibrationError, match=r"averages: tensor '0\.bias' has shape \[4\].*\[8\]"):
            file.match({"0.bias": (4,)})


def read_all(path: Path) -> None:
    with SensitivityFile(path) as file:
        for average in file.recorded.values():
            average.read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, _: tensors.pop("0.bias"), r"'0\.bias' is missing"),
        (lambda tensors, _: tensors.update({"0.bias": np.zeros(8, np.float16)}), r"'0\.bias' is F16"),
        (lambda _, metadata: metadata.update({KEY_CONTENT: "{}"}), "damaged .*missing required field"),
        (lambda _, metadata: metadata.clear(), "has no such content"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "averages"
    tracked()[2].save(path)
    rewrite(path, change)
    with pytest.raises(CalibrationError, match=f"averages: .*{message}"):
        read_all(path)
