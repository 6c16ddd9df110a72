"""Calibrations: sums of every kind of layer compared with float64, batches, and models."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptz.errors import CalibrationError, ConfigError
from ckptz.guidance.files import CalibrationFile
from ckptz.hooks import Calibration
from ckptz.hooks import calibration as calibration_module
from tests.support.calibration_support import Array, check_covariance, covariance_of, normal, recorded
from tests.support.hooks_support import process_group

# --- every kind of layer ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (4,), (0, 4)])
def test_linear_layers_sum_the_vectors_of_the_last_dimension(shape: tuple[int, ...]) -> None:
    batch = normal(*shape)
    calibration = recorded(nn.Linear(4, 3), batch)
    vectors = batch.reshape(-1, 4).numpy()
    check_covariance(calibration.covariance(""), covariance_of(vectors))
    assert calibration.n_samples == {"": len(vectors)}


def test_inputs_of_half_precision_are_summed_in_float32() -> None:
    model, batch = nn.Linear(4, 3).bfloat16(), normal(50, 4).bfloat16()
    check_covariance(recorded(model, batch).covariance(""), covariance_of(batch.float().numpy()))


def test_autocast_does_not_reach_the_sums() -> None:
    model, batch = nn.Linear(4, 3), normal(50, 4)
    with torch.autocast("cpu", torch.bfloat16):
        calibration = recorded(model, batch)
    check_covariance(calibration.covariance(""), covariance_of(batch.numpy()))


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
    assert not calibration.covariance("inner").requires_grad
    check_covariance(calibration.covariance("inner"), 4 * covariance_of(batch.numpy()))
    calibration.save(tmp_path / "calibration")


def test_a_model_in_a_wrapper_has_its_own_names() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with process_group():
        calibration = recorded(DistributedDataParallel(model), normal(5, 4))
    check_covariance(calibration.covariance("0"), covariance_of(normal(5, 4).numpy()))


def patches_of(batch: torch.Tensor, conv: Any) -> list[Array]:
    """Return for each group the vectors that a convolution multiplies with `weight.flatten(1)`.

    They are derived from the layer itself: with a one-hot weight, its output is the selected input.
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
def test_convolutions_sum_the_inputs_under_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
    layer: Callable[..., nn.Module],
    shape: tuple[int, ...],
    options: dict[str, Any],
    part: int,
) -> None:
    monkeypatch.setattr(calibration_module, "PART_ELEMENTS", part)
    conv: Any = layer(6, 12, **{"kernel_size": 3} | options)
    batch = normal(*shape)
    calibration = recorded(conv, batch)
    groups = patches_of(batch, conv)
    expected = np.stack([covariance_of(vectors) for vectors in groups])
    check_covariance(calibration.covariance(""), expected[0] if conv.groups == 1 else expected)
    assert calibration.n_samples == {"": len(groups[0])}


def test_a_convolutions_covariance_predicts_the_error_of_a_changed_weight() -> None:
    conv, batch = nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), normal(2, 4, 5, 5)
    covariance = recorded(conv, batch).covariance("").double()
    before, change = conv(batch), normal(6, 2, 3, 3, seed=1) * 0.1
    conv.weight.data += change
    error = (conv(batch) - before).double().square().sum()
    rows = change.double().flatten(1).view(2, 3, -1)
    torch.testing.assert_close(
        torch.einsum("gon,gnm,gom->", rows, covariance, rows), error, rtol=1e-5, atol=0.0
    )


def test_embeddings_count_tokens() -> None:
    tokens = torch.tensor([[0, 2, 2], [4, 2, 0]])
    calibration = recorded(nn.Embedding(5, 3, padding_idx=0), tokens, tokens[:1])
    assert calibration.covariance("").tolist() == [3, 0, 5, 0, 1]
    assert calibration.n_samples == {"": 9}


def test_inputs_given_by_name_are_recorded() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(input=batch)
            return result

    check_covariance(recorded(Named(), normal(5, 4)).covariance("layer"), covariance_of(normal(5, 4).numpy()))


def test_the_fused_path_of_encoder_layers_is_not_taken() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    calibration = recorded(model, normal(2, 3, 8))
    assert calibration.n_samples == {"linear1": 6, "linear2": 6}
    # Attention uses this weight without calling its layer.
    assert calibration.missing() == ["self_attn.out_proj"]


# --- batches ---------------------------------------------------------------------------------------


def test_several_batches_are_as_one() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 2))
    batches = [normal(n, 2, 8, seed=n) for n in (1, 4, 3)]
    joined, several = recorded(model, torch.cat(batches)), recorded(model, *batches)
    twice = recorded(model, batches[0])
    with twice:
        for batch in batches[1:]:
            model(batch)
    for name in ("0", "2"):
        torch.testing.assert_close(joined.covariance(name), several.covariance(name))
        assert torch.equal(twice.covariance(name), several.covariance(name))
    assert joined.n_samples == several.n_samples == twice.n_samples == {"0": 48, "2": 8}


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
        assert torch.equal(calibration.covariance(name), good.covariance(name))


def test_the_first_of_the_layers_that_got_bad_values_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    batch = normal(3, 4)  # it stays alive, unlike the layers' outputs
    batch[0, 1] = float("nan")
    calibration = Calibration(model)
    with calibration, pytest.raises(CalibrationError, match="layer '0'"):
        model(batch)
    assert calibration.n_samples == {}


class Poison(nn.Module):
    """Layer that writes a value into its input, or returns it unchanged if the value is None."""

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


# --- transformers ----------------------------------------------------------------------------------


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
        check_covariance(calibration.covariance(name), covariance_of(vectors))
    assert calibration.covariance("transformer.wte").tolist() == [1] * 24 + [0] * 16
    assert calibration.missing() == []
    calibration.save(tmp_path / "calibration")
    model.save_pretrained(tmp_path)  # without the tied head
    shapes = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if "lm_head" not in name
    }
    with CalibrationFile(tmp_path / "calibration") as file:
        matched, unmatched = file.match(shapes)
        assert unmatched == []
        assert matched["transformer.h.1.mlp.c_proj.weight"].covariances["conv1d_t"].axis == 0
        assert matched["transformer.h.1.mlp.c_proj.weight"].covariances["conv1d_t"].read().shape == (32, 32)
        assert set(matched["transformer.wte.weight"].covariances) == {"embedding", "linear"}


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
