"""Calibrations: sums of every kind of layer against plain float64, sharing, the memory cap, and the file."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hooks_support import process_group, rewrite
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptz.convert.guide_files import CalibrationFile
from ckptz.convert.guide_format import KEY_CONTENT, KEY_VERSION, Kind
from ckptz.errors import CalibrationError, ConfigError, UnsupportedError
from ckptz.hooks import Calibration
from ckptz.hooks import inputs as inputs_module

Array = np.ndarray[Any, np.dtype[Any]]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recorded(model: nn.Module, *batches: torch.Tensor, memory_cap: int = 1 << 30) -> Calibration:
    calibration = Calibration(model, memory_cap=memory_cap)
    with calibration:
        for batch in batches:
            model(batch)
    return calibration


def second_moments(vectors: Array) -> Array:
    """sum(x x^T) of rows, in float64."""
    wide = np.asarray(vectors, np.float64)
    total: Array = wide.T @ wide
    return total


def check_moments(found: torch.Tensor, expected: Array) -> None:
    assert found.dtype == torch.float32
    assert torch.equal(found, found.mT)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


# --- every kind of layer ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (4,), (0, 4)])
def test_linear_layers_sum_the_vectors_of_the_last_dimension(shape: tuple[int, ...]) -> None:
    batch = normal(*shape)
    calibration = recorded(nn.Linear(4, 3), batch)
    vectors = batch.reshape(-1, 4).numpy()
    check_moments(calibration.moments(""), second_moments(vectors))
    assert calibration.n_samples == {"": len(vectors)}


def test_inputs_of_half_precision_are_summed_in_float32() -> None:
    model, batch = nn.Linear(4, 3).bfloat16(), normal(50, 4).bfloat16()
    check_moments(recorded(model, batch).moments(""), second_moments(batch.float().numpy()))


def test_autocast_does_not_reach_the_sums() -> None:
    model, batch = nn.Linear(4, 3), normal(50, 4)
    with torch.autocast("cpu", torch.bfloat16):
        calibration = recorded(model, batch)
    check_moments(calibration.moments(""), second_moments(batch.numpy()))


def test_sums_of_any_mode_add_up_and_are_saved(tmp_path: Path) -> None:
    class Enabling(nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                result: torch.Tensor = self.get_submodule("inner")(batch.requires_grad_())
                return result

    model, batch = Enabling(4, 3), normal(5, 4)
    model.inner = nn.Linear(4, 2)
    calibration = Calibration(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with calibration, mode():
            model(batch.clone())
    assert not calibration.moments("inner").requires_grad
    check_moments(calibration.moments("inner"), 4 * second_moments(batch.numpy()))
    calibration.save(tmp_path / "calibration")


def test_a_model_in_a_wrapper_has_its_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with process_group(tmp_path):
        calibration = recorded(DistributedDataParallel(model), normal(5, 4))
    check_moments(calibration.moments("0"), second_moments(normal(5, 4).numpy()))


def patches_of(batch: torch.Tensor, conv: Any) -> list[Array]:
    """For each group, the vectors that a convolution multiplies `weight.flatten(1)` with, one by one.

    Found out from the layer itself: its response to one input is the sum of what its weight picks.
    """
    n = conv.weight[0].numel()
    groups = []
    for group in range(conv.groups):
        probe = type(conv)(
            conv.in_channels,
            n * conv.groups,
            conv.kernel_size,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            padding_mode=conv.padding_mode,
            bias=False,
        ).double()
        probe.weight.data = torch.eye(n, dtype=torch.float64).repeat(conv.groups, 1).view(probe.weight.shape)
        picked = probe(batch.double()).detach()
        picked = picked if picked.ndim > len(conv.kernel_size) + 1 else picked[None]
        picked = picked.unflatten(1, (conv.groups, n))[:, group].flatten(2)
        groups.append(picked.permute(0, 2, 1).reshape(-1, n).numpy())
    return groups


CONV1D = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": "same", "padding_mode": "reflect"},
    {"padding": "valid", "groups": 3},
    {"padding": 2, "padding_mode": "circular", "groups": 2},
]
CONV2D = [
    {},
    {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    {"padding": "same", "kernel_size": (2, 4), "padding_mode": "replicate"},
    {"padding": 1, "groups": 6, "stride": 3},
    {"padding": (1, 2), "groups": 2, "padding_mode": "circular"},
    {"kernel_size": 1},
]


@pytest.mark.parametrize("part", [1, 1 << 24])
@pytest.mark.parametrize(
    ("layer", "shape", "options"),
    [
        *((nn.Conv1d, (3, 6, 9), options) for options in CONV1D),
        *((nn.Conv2d, (3, 6, 7, 8), options) for options in CONV2D),
        (nn.Conv1d, (6, 9), {}),
        (nn.Conv2d, (6, 7, 8), {}),
    ],
)
def test_convolutions_sum_what_lies_under_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
    layer: Callable[..., nn.Module],
    shape: tuple[int, ...],
    options: dict[str, Any],
    part: int,
) -> None:
    monkeypatch.setattr(inputs_module, "PART_ELEMENTS", part)
    conv: Any = layer(6, 12, **{"kernel_size": 3} | options)
    batch = normal(*shape)
    calibration = recorded(conv, batch)
    groups = patches_of(batch, conv)
    expected = np.stack([second_moments(vectors) for vectors in groups])
    check_moments(calibration.moments(""), expected[0] if conv.groups == 1 else expected)
    assert calibration.n_samples == {"": len(groups[0])}


def test_a_convolutions_moments_predict_the_error_of_a_changed_weight() -> None:
    conv, batch = nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), normal(2, 4, 5, 5)
    moments = recorded(conv, batch).moments("").double()
    before, change = conv(batch), normal(6, 2, 3, 3, seed=1) * 0.1
    conv.weight.data += change
    error = (conv(batch) - before).double().square().sum()
    rows = change.double().flatten(1).view(2, 3, -1)
    torch.testing.assert_close(torch.einsum("gon,gnm,gom->", rows, moments, rows), error, rtol=1e-5, atol=0.0)


def test_embeddings_count_tokens() -> None:
    tokens = torch.tensor([[0, 2, 2], [4, 2, 0]])
    calibration = recorded(nn.Embedding(5, 3, padding_idx=0), tokens, tokens[:1])
    assert calibration.moments("").tolist() == [3, 0, 5, 0, 1]
    assert calibration.n_samples == {"": 9}


def test_inputs_given_by_name_are_recorded() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(input=batch)
            return result

    check_moments(recorded(Named(), normal(5, 4)).moments("layer"), second_moments(normal(5, 4).numpy()))


def test_the_fused_path_of_encoder_layers_is_not_taken() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    calibration = recorded(model, normal(2, 3, 8))
    assert calibration.n_samples == {"linear1": 6, "linear2": 6}
    assert calibration.missing() == ["self_attn.out_proj"]  # attention uses this weight without its layer


# --- batches ----------------------------------------------------------------------------------------


def test_several_batches_are_as_one() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 2))
    batches = [normal(n, 2, 8, seed=n) for n in (1, 4, 3)]
    one, several = recorded(model, torch.cat(batches)), recorded(model, *batches)
    twice = recorded(model, batches[0])
    with twice:
        for batch in batches[1:]:
            model(batch)
    for name in ("0", "2"):
        torch.testing.assert_close(one.moments(name), several.moments(name))
        assert torch.equal(twice.moments(name), several.moments(name))
    assert one.n_samples == several.n_samples == twice.n_samples == {"0": 48, "2": 8}


def test_nothing_is_recorded_outside_of_the_block_and_gradients_are_back() -> None:
    model = nn.Linear(4, 3)
    calibration = Calibration(model)
    with calibration:
        assert not model(normal(2, 4)).requires_grad
    assert model(normal(2, 4)).requires_grad
    assert calibration.n_samples == {"": 2}
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_layers_called_without_the_model_are_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    calibration = Calibration(model)
    with calibration:
        model[0](normal(2, 4))
        model(normal(5, 4))
        model[0](normal(1, 4))
    assert calibration.n_samples == {"0": 8, "1": 5}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_batch_that_is_not_finite_is_left_out_as_a_whole(bad: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2))
    good = recorded(model, normal(3, 4), normal(2, 4))
    broken = nn.Sequential(model[0], Poison(), model[2])
    calibration = Calibration(broken)
    with calibration:
        broken(normal(3, 4))
        broken[1].value = bad
        with pytest.raises(CalibrationError, match="layer '2': its input is not finite"):
            broken(normal(3, 4))
        broken[1].value = None
        broken(normal(2, 4))
    assert calibration.n_samples == {"0": 5, "2": 5}
    for name in ("0", "2"):
        assert torch.equal(calibration.moments(name), good.moments(name))


def test_the_first_of_the_layers_that_got_bad_values_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    batch = normal(3, 4)  # lives on, while what the layers pass on does not
    batch[0, 1] = float("nan")
    calibration = Calibration(model)
    with calibration, pytest.raises(CalibrationError, match="layer '0'"):
        model(batch)
    assert calibration.n_samples == {}


class Poison(nn.Module):
    """Puts a value into what passes through; None lets it pass."""

    def __init__(self) -> None:
        super().__init__()
        self.value: float | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.value is None:
            return batch
        batch = batch.clone()
        batch[0, 1] = self.value
        return batch


def test_a_batch_that_raises_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 2))
    calibration = Calibration(model)
    with calibration:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model(normal(3, 4))
    assert calibration.n_samples == {}
    assert calibration.missing() == ["0", "1"]


def test_an_interrupted_block_keeps_complete_batches() -> None:
    model = nn.Linear(4, 4)
    calibration = Calibration(model)
    with contextlib.suppress(KeyboardInterrupt), calibration:
        model(normal(3, 4))
        raise KeyboardInterrupt
    assert calibration.n_samples == {"": 3}


def test_a_calibration_is_not_entered_twice() -> None:
    calibration = Calibration(nn.Linear(4, 4))
    with calibration, pytest.raises(ConfigError, match="recording already"):
        calibration.__enter__()


# --- sharing ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Layers that get the same tensor; `calls` says which are called with which of the inputs."""

    def __init__(self, calls: Iterable[str]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.calls = list(calls)

    def forward(self, batch: torch.Tensor) -> None:
        inputs = [batch, batch + 1, batch.clone()]
        for call in self.calls:
            getattr(self, call[0])(inputs[int(call[1])])


def expected_of(calls: Iterable[str], layer: str, batch: torch.Tensor) -> Array:
    inputs = [batch, batch + 1, batch]
    return sum(second_moments(inputs[int(call[1])].numpy()) for call in calls if call[0] == layer) + np.zeros(
        (4, 4)
    )


def test_layers_with_the_same_input_share_one_matrix(tmp_path: Path) -> None:
    model, batch = Attention(["q0", "k0", "v0"]), normal(5, 4)
    calibration = recorded(model, batch, batch)
    assert calibration.shared == [("q", "k", "v")]
    check_moments(calibration.moments("k"), 2 * second_moments(batch.numpy()))
    calibration.save(tmp_path / "calibration")
    with CalibrationFile.open(tmp_path / "calibration") as file:
        assert [(one.tensor, one.modules, one.n_samples) for one in file.sums] == [
            ("q+k+v", ("q", "k", "v"), 10)
        ]


def test_equal_tensors_are_not_the_same_tensor() -> None:
    assert recorded(Attention(["q0", "k2"]), normal(5, 4)).shared == []


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_order_of_calls_gives_every_layer_its_own_sum(n: int) -> None:
    batch = normal(5, 4)
    choices = [f"{layer}{tensor}" for layer in "qk" for tensor in "012"]
    for calls in itertools.product(choices, repeat=n):
        calibration = recorded(Attention(calls), batch)
        for layer in {call[0] for call in calls}:
            check_moments(calibration.moments(layer), expected_of(calls, layer, batch))
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
    check_moments(calibration.moments("q"), expected_of(["q0", "q0"], "q", batch))
    check_moments(calibration.moments("k"), expected_of(["k0", "k1"], "k", batch))


def test_a_tensor_that_is_changed_in_place_is_another_input() -> None:
    class Changing(Attention):
        def forward(self, batch: torch.Tensor) -> None:
            batch = batch.clone()
            self.q(batch)
            self.k(batch.relu_())

    batch = normal(5, 4)
    calibration = recorded(Changing([]), batch)
    check_moments(calibration.moments("k"), second_moments(batch.relu().numpy()))
    with torch.inference_mode():  # its tensors do not count their changes
        calibration = recorded(Changing([]), batch)
    check_moments(calibration.moments("k"), second_moments(batch.relu().numpy()))


def test_convolutions_share_only_if_they_unfold_alike() -> None:
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
    check_moments(calibration.moments("layer"), second_moments(torch.cat(states).numpy()))
    assert calibration.n_samples == {"layer": 15}


# --- memory -----------------------------------------------------------------------------------------


def stack(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def cap_for(*widths: int) -> int:
    """A cap that sums of these sizes just fit into: a batch and all before it."""
    return 2 * 4 * sum(n * n for n in widths)


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


# --- files ------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """One layer of each kind, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.conv, self.head = nn.Conv1d(6, 6, 3, padding=1, groups=2), nn.Linear(6, 7, bias=False)
        self.gate = nn.Linear(6, 6)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.linear(hidden) * self.gate(hidden)
        result: torch.Tensor = self.head(self.conv(hidden.mT).mT)
        return result


def everything() -> tuple[Everything, Calibration]:
    torch.manual_seed(0)
    model = Everything()
    return model, recorded(model, torch.tensor([[0, 2, 2, 6], [1, 1, 3, 2]]))


SHAPES = {
    "embedding.weight": (7, 6),
    "linear.weight": (6, 6),
    "conv.weight": (6, 3, 3),
    "gate.weight": (6, 6),
    "linear.bias": (6,),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    everything()[1].save(tmp_path / "calibration")
    return tmp_path / "calibration"


def test_what_is_loaded_equals_what_was_saved_to_the_bit(saved: Path) -> None:
    model, calibration = everything()
    other = Calibration(model)
    other.load(saved)
    assert other.n_samples == calibration.n_samples
    assert other.shared == calibration.shared == [("linear", "gate")]
    for layer in calibration.n_samples:
        assert torch.equal(other.moments(layer), calibration.moments(layer))
    again = saved.with_name("again")
    other.save(again)
    assert again.read_bytes() == saved.read_bytes()
    with other, calibration:
        model(torch.tensor([[5, 5]]))
    assert torch.equal(other.moments("conv"), calibration.moments("conv"))


def test_the_file_gives_an_encoder_what_it_needs(saved: Path) -> None:
    calibration = everything()[1]
    with CalibrationFile.open(saved) as file:
        matched, unmatched = file.match(SHAPES)
        assert unmatched == []
        axes = {
            name: {kind: one.axis for kind, one in what.moments.items()} for name, what in matched.items()
        }
        assert axes == {
            "embedding.weight": {"embedding": 0, "linear": 1},
            "linear.weight": {"linear": 1},
            "conv.weight": {"conv": 1},
            "gate.weight": {"linear": 1},
        }
        layers: list[tuple[str, Kind, str]] = [
            ("embedding.weight", "embedding", "embedding"),
            ("embedding.weight", "linear", "head"),
            ("linear.weight", "linear", "linear"),
            ("gate.weight", "linear", "gate"),
            ("conv.weight", "conv", "conv"),
        ]
        for name, kind, layer in layers:
            one = matched[name].moments[kind]
            np.testing.assert_array_equal(one.read(), calibration.moments(layer).numpy())
            assert one.n_samples == 8
            assert one.read().dtype == (np.float64 if kind == "embedding" else np.float32)


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "model.module.", "_orig_mod.module."])
def test_names_match_behind_the_prefixes_of_wrappers(saved: Path, prefix: str) -> None:
    with CalibrationFile.open(saved) as file:
        matched, unmatched = file.match({f"{prefix}head.weight": (7, 6), f"{prefix}other": (1,)})
        assert list(matched) == [f"{prefix}head.weight"]
        assert unmatched == ["linear.weight", "conv.weight", "gate.weight"]


def test_exact_names_go_before_prefixes(saved: Path) -> None:
    with CalibrationFile.open(saved) as file:
        assert list(file.match({"model.gate.weight": (9,), "gate.weight": (6, 6)})[0]) == ["gate.weight"]


def test_a_checkpoint_with_another_shape_is_refused(saved: Path) -> None:
    with (
        CalibrationFile.open(saved) as file,
        pytest.raises(CalibrationError, match=r"calibration: tensor 'conv\.weight' .*3, 5\].*3, 3\]"),
    ):
        file.match(SHAPES | {"conv.weight": (6, 3, 5)})


def test_layers_that_share_a_weight_are_summed_up(tmp_path: Path) -> None:
    model = stack(4, 4, 4)
    model[1].weight = model[0].weight
    calibration = recorded(model, normal(5, 4))
    calibration.save(tmp_path / "calibration")
    with CalibrationFile.open(tmp_path / "calibration") as file:
        one = file["0.weight"].moments["linear"]
        expected = calibration.moments("0") + calibration.moments("1")
        np.testing.assert_array_equal(one.read(), expected.numpy())
        assert one.n_samples == 10


def test_another_models_calibration_is_refused(saved: Path) -> None:
    with pytest.raises(CalibrationError, match="calibration: is of another model"):
        Calibration(stack(4, 4)).load(saved)


def test_a_calibration_of_nothing_is_not_saved(tmp_path: Path) -> None:
    calibration = Calibration(nn.Linear(2, 2))
    with pytest.raises(CalibrationError, match="no input was recorded"):
        calibration.save(tmp_path / "calibration")
    with pytest.raises(CalibrationError, match="no input was recorded"):
        calibration.moments("")
    assert os.listdir(tmp_path) == []


def content(change: Callable[[Any], None]) -> Callable[[Any, dict[str, str]], None]:
    """A change of the parsed metadata."""

    def apply(_: Any, metadata: dict[str, str]) -> None:
        value = json.loads(metadata[KEY_CONTENT])
        change(value)
        metadata[KEY_CONTENT] = json.dumps(value)

    return apply


def row(index: int, **fields: Any) -> Callable[[Any, dict[str, str]], None]:
    """A change of one layer's row; 0 embedding, 1 linear, 2 conv, 3 head, 4 gate."""
    return content(lambda value: value["modules"][index].update(fields))


def tensor(name: str, array: Any) -> Callable[[dict[str, Any], Any], None]:
    return lambda tensors, _: tensors.update({name: array})


def spoil(name: str, index: Any, value: float) -> Callable[[dict[str, Any], Any], None]:
    return lambda tensors, _: tensors[name].__setitem__(index, value)


DAMAGED = {
    "not JSON": (lambda _, metadata: metadata.update({KEY_CONTENT: "[1,"}), "damaged .*not valid JSON"),
    "not text": (lambda _, metadata: metadata.update({KEY_CONTENT: '"\\ud800"'}), "damaged"),
    "another type": (lambda _, metadata: metadata.update({KEY_CONTENT: "[]"}), "damaged .*Expected `object`"),
    "no content": (lambda _, metadata: metadata.pop(KEY_CONTENT), "damaged"),
    "other content": (lambda _, metadata: metadata.clear(), "has no such content"),
    "unknown kind": (row(1, kind="conv3d"), "damaged .*'conv3d'"),
    "unknown field": (row(1, extra=1), "damaged .*`extra`"),
    "negative count": (row(1, inputs=[{"tensor": "head", "n_samples": -1}]), "damaged"),
    "no inputs": (row(1, inputs=[]), "damaged"),
    "no weight": (row(1, weight=[]), "damaged"),
    "deep": (lambda _, metadata: metadata.update({KEY_CONTENT: "[" * 100_000}), "damaged"),
    "missing tensor": (lambda tensors, _: tensors.pop("head"), "'head' is missing"),
    "dtype": (tensor("head", np.zeros((6, 6), np.float16)), "'head' is F16, not F32 or F64"),
    "counts as floats": (tensor("embedding", np.zeros(7)), "'embedding' is F64, not I64"),
    "shape": (tensor("head", np.zeros((6, 7), np.float32)), r"'head' has shape \[6, 7\], which does not fit"),
    "scalar": (tensor("head", np.zeros((), np.float32)), "does not fit"),
    "groups": (tensor("conv", np.zeros((4, 9, 9), np.float32)), r"'conv' .* does not fit the conv weight"),
    "counts": (tensor("embedding", np.zeros(6, np.int64)), "does not fit the embedding weight"),
    "weight shape": (row(1, shape=[6]), "does not fit the linear weight"),
    "huge weight": (row(2, shape=[6, 1 << 62, 1 << 62]), "does not fit the conv weight"),
    "tensor twice": (row(3, inputs=[{"tensor": "head", "n_samples": 8}] * 2), "lists a tensor twice"),
    "samples disagree": (row(4, inputs=[{"tensor": "linear+gate", "n_samples": 9}]), "contradictions"),
    "module twice": (row(4, module="linear"), "contradictions"),
    "name twice": (row(4, weight=["gate.weight", "linear.weight"]), "name of two parameters"),
    "shapes disagree": (row(3, shape=[8, 6]), "listed with several shapes"),
    "not finite": (spoil("linear+gate", (0, 1), np.nan), r"'linear\+gate' has values that are not finite"),
    "infinite": (spoil("conv", (1, 0, 0), np.inf), "'conv' has values that are not finite"),
    "not symmetric": (spoil("conv", (1, 0, 1), 7.0), "'conv' is not a symmetric sum of squares"),
    "negative square": (spoil("head", (2, 2), -1.0), "'head' is not a symmetric sum of squares"),
    "negative tokens": (spoil("embedding", 3, -1), "'embedding' has negative counts"),
}


def read_all(path: Path) -> None:
    with CalibrationFile.open(path) as file:
        for weight in file.values():
            for one in weight.moments.values():
                one.read()


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused(saved: Path, case: str) -> None:
    change, message = DAMAGED[case]
    rewrite(saved, change)
    with pytest.raises(CalibrationError, match=f"calibration: .*{message}"):
        read_all(saved)
    with pytest.raises(CalibrationError):
        everything()[1].load(saved)


def test_values_are_checked_only_when_they_are_read(saved: Path) -> None:
    rewrite(saved, spoil("conv", 0, np.nan))
    with CalibrationFile.open(saved) as file:
        file["linear.weight"].moments["linear"].read()
        with pytest.raises(CalibrationError, match="not finite"):
            file["conv.weight"].moments["conv"].read()


def test_newer_missing_and_cut_files_are_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for n_bytes in (0, 7, 200, len(whole) - 1):
        saved.write_bytes(whole[:n_bytes])
        with pytest.raises(CalibrationError, match="calibration: not a whole safetensors file"):
            CalibrationFile.open(saved)
    saved.write_bytes(whole)
    rewrite(saved, lambda _, metadata: metadata.update({KEY_VERSION: "2"}))
    with pytest.raises(UnsupportedError, match="calibration: version '2'"):
        CalibrationFile.open(saved)
    with pytest.raises(FileNotFoundError):
        CalibrationFile.open(saved.with_name("none"))


def test_files_are_read_without_torch(saved: Path) -> None:
    code = (
        "import sys; from ckptz.convert.guide_files import CalibrationFile as File\n"
        f"with File.open({str(saved)!r}) as file: print(file['conv.weight'].moments['conv'].read().shape)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(2, 9, 9)\n"


# --- transformers -----------------------------------------------------------------------------------


@functools.cache
def a_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_a_gpt2_is_recorded_whole(tmp_path: Path) -> None:
    model, tokens = a_gpt2(), torch.arange(24).view(2, 12)
    seen: dict[str, Array] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0].reshape(-1, args[0].shape[-1]).numpy()})
        )
        for name, module in model.named_modules()
        if type(module).__name__ in ("Conv1D", "Linear")
    ]
    calibration = recorded(model, tokens)
    for handle in handles:
        handle.remove()
    assert len(seen) == 9
    for name, vectors in seen.items():
        check_moments(calibration.moments(name), second_moments(vectors))
    assert calibration.moments("transformer.wte").tolist() == [1] * 24 + [0] * 16
    assert calibration.missing() == []
    calibration.save(tmp_path / "calibration")
    model.save_pretrained(tmp_path)  # without the tied head
    shapes = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if "lm_head" not in name
    }
    with CalibrationFile.open(tmp_path / "calibration") as file:
        matched, unmatched = file.match(shapes)
        assert unmatched == []
        assert matched["transformer.h.1.mlp.c_proj.weight"].moments["conv1d_t"].axis == 0
        assert matched["transformer.h.1.mlp.c_proj.weight"].moments["conv1d_t"].read().shape == (32, 32)
        assert set(matched["transformer.wte.weight"].moments) == {"embedding", "linear"}


def test_a_llama_shares_the_inputs_of_its_projections() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    layer = "model.layers.0"
    assert recorded(model, torch.arange(24).view(2, 12)).shared == [
        tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
    ]
