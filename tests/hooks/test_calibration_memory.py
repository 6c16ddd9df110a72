"""Calibrations: layers that share one sum, and the limit on the memory of all sums."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckptz.errors import ConfigError
from ckptz.guidance.files import CalibrationFile
from ckptz.hooks import Calibration
from tests.support.calibration_support import (
    Array,
    Attention,
    cap_for,
    check_covariance,
    covariance_of,
    normal,
    recorded,
    stack,
)

# --- sharing ---------------------------------------------------------------------------------------


def expected_of(calls: Iterable[str], layer: str, batch: torch.Tensor) -> Array:
    inputs = [batch, batch + 1, batch]
    return sum(covariance_of(inputs[int(call[1])].numpy()) for call in calls if call[0] == layer) + np.zeros(
        (4, 4)
    )


def test_layers_with_the_same_input_share_one_matrix(tmp_path: Path) -> None:
    model, batch = Attention(["q0", "k0", "v0"]), normal(5, 4)
    calibration = recorded(model, batch, batch)
    assert calibration.shared == [("q", "k", "v")]
    check_covariance(calibration.covariance("k"), 2 * covariance_of(batch.numpy()))
    calibration.save(tmp_path / "calibration")
    with CalibrationFile(tmp_path / "calibration") as file:
        rows = {
            row.module: [(one.tensor, one.n_samples) for one in row.inputs] for row in file.content.modules
        }
        assert rows == {layer: [("q+k+v", 10)] for layer in "qkv"}


def test_equal_tensors_are_not_the_same_tensor() -> None:
    assert recorded(Attention(["q0", "k2"]), normal(5, 4)).shared == []


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_order_of_calls_gives_every_layer_its_own_sum(n: int) -> None:
    batch = normal(5, 4)
    choices = [f"{layer}{tensor}" for layer in "qk" for tensor in "012"]
    for calls in itertools.product(choices, repeat=n):
        calibration = recorded(Attention(calls), batch)
        for layer in {call[0] for call in calls}:
            check_covariance(calibration.covariance(layer), expected_of(calls, layer, batch))
        assert calibration.n_samples == {
            layer: 5 * sum(call[0] == layer for call in calls) for layer in "qk" if layer in "".join(calls)
        }


def test_layers_may_share_in_one_batch_and_not_in_the_next() -> None:
    model, batch = Attention(["q0", "k0"]), normal(5, 4)
    calibration = Calibration(model)
    with calibration:
        model(batch)
        model.calls = ["q0", "k1"]
        model(batch)
    check_covariance(calibration.covariance("q"), expected_of(["q0", "q0"], "q", batch))
    check_covariance(calibration.covariance("k"), expected_of(["k0", "k1"], "k", batch))


def test_a_tensor_that_is_changed_in_place_is_another_input() -> None:
    class Changing(Attention):
        def forward(self, batch: torch.Tensor) -> None:
            batch = batch.clone()
            self.q(batch)
            self.k(batch.relu_())

    batch = normal(5, 4)
    calibration = recorded(Changing([]), batch)
    check_covariance(calibration.covariance("k"), covariance_of(batch.relu().numpy()))
    with torch.inference_mode():  # inference tensors have no version counter
        calibration = recorded(Changing([]), batch)
    check_covariance(calibration.covariance("k"), covariance_of(batch.relu().numpy()))


def test_convolutions_share_a_covariance_only_if_they_unfold_equally() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 5, 3)
            self.c = nn.Conv2d(2, 3, 3, stride=2)

        def forward(self, batch: torch.Tensor) -> None:
            for layer in (self.a, self.b, self.c):
                layer(batch)

    assert recorded(Branches(), normal(1, 2, 7, 7)).shared == [("a", "b")]


def test_a_layer_that_is_used_again_sums_all_its_calls() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = self.alias = nn.Linear(4, 4)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in (self.layer, self.alias, self.layer):
                batch = layer(batch)
            return batch

    model, batch = Repeated(), normal(5, 4)
    with torch.no_grad():
        states = [batch, model.layer(batch), model.layer(model.layer(batch))]
    calibration = recorded(model, batch)
    check_covariance(calibration.covariance("layer"), covariance_of(torch.cat(states).numpy()))
    assert calibration.n_samples == {"layer": 15}


# --- the cap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("less", [0, 8])
def test_the_layers_with_the_largest_sums_are_skipped_and_named(less: int) -> None:
    model = stack(4, 16, 8, 16, 2)  # sums of 4, 16, 8 and 16
    calibration = recorded(model, normal(3, 4), normal(3, 4), memory_cap=cap_for(4, 8, 16) - less)
    assert set(calibration.skipped) == ({"3"} if not less else {"1", "3"})
    assert "1024 bytes" in calibration.skipped["3"]
    assert calibration.missing() == []
    assert set(calibration.n_samples) == {"0", "1", "2", "3"} - set(calibration.skipped)


@pytest.mark.parametrize("order", [*itertools.permutations((2, 4, 6, 8))])
def test_what_is_skipped_is_larger_than_what_is_not(order: tuple[int, ...]) -> None:
    for n_kept in range(5):
        cap = cap_for(*sorted(order)[:n_kept]) + 8
        calibration = recorded(stack(*order, 1), normal(3, order[0]), memory_cap=cap)
        kept = sorted(order[int(name)] for name in calibration.n_samples)
        assert kept == sorted(order)[:n_kept]


def test_shared_sums_count_once() -> None:
    calibration = recorded(Attention(["q0", "k0", "v0"]), normal(5, 4), memory_cap=cap_for(4))
    assert calibration.skipped == {}


def test_late_layers_may_displace_larger_ones_from_complete_batches() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 2), nn.Linear(4, 2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (self.wide if batch.shape[-1] == 6 else self.narrow)(batch)
            return result

    model = Experts()
    calibration = Calibration(model, memory_cap=cap_for(6))
    with calibration:
        model(normal(3, 6))
        assert calibration.n_samples == {"wide": 3}
        model(normal(2, 4))
    assert calibration.n_samples == {"narrow": 2}
    assert list(calibration.skipped) == ["wide"]


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_of_nothing_is_refused(cap: int) -> None:
    with pytest.raises(ConfigError, match="memory_cap"):
        Calibration(nn.Linear(2, 2), memory_cap=cap)


def test_layers_whose_weight_is_no_parameter_are_named() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    calibration = recorded(model, normal(2, 4))
    assert calibration.skipped == {"0": "its weight is computed and not a parameter"}
    assert list(calibration.n_samples) == ["1"]
