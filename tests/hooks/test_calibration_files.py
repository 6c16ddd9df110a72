"""Files of calibrations: contents, matching models, and refusals."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptz.errors import CalibrationError, UnsupportedError
from ckptz.guidance.files import KEY_CONTENT, KEY_VERSION, CalibrationFile, LayerKind
from ckptz.hooks import Calibration
from tests.support.calibration_support import normal, recorded, stack
from tests.support.hooks_support import rewrite


class Everything(nn.Module):
    """Network with one layer of each kind, and a head that is tied to the embedding."""

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


def test_a_loaded_calibration_equals_the_saved_one_bit_for_bit(saved: Path) -> None:
    model, calibration = everything()
    other = Calibration(model)
    other.load(saved)
    assert other.n_samples == calibration.n_samples
    assert other.shared == calibration.shared == [("linear", "gate")]
    for layer in calibration.n_samples:
        assert torch.equal(other.covariance(layer), calibration.covariance(layer))
    copy = saved.with_name("copy")
    other.save(copy)
    assert copy.read_bytes() == saved.read_bytes()
    with other, calibration:
        model(torch.tensor([[5, 5]]))
    assert torch.equal(other.covariance("conv"), calibration.covariance("conv"))


def test_the_file_has_the_covariances_and_axes_of_each_weight(saved: Path) -> None:
    calibration = everything()[1]
    with CalibrationFile(saved) as file:
        matched, unmatched = file.match(SHAPES)
        assert unmatched == []
        axes = {
            name: {kind: covariance.axis for kind, covariance in weight.covariances.items()}
            for name, weight in matched.items()
        }
        assert axes == {
            "embedding.weight": {"embedding": 0, "linear": 1},
            "linear.weight": {"linear": 1},
            "conv.weight": {"conv": 1},
            "gate.weight": {"linear": 1},
        }
        layers: list[tuple[str, LayerKind, str]] = [
            ("embedding.weight", "embedding", "embedding"),
            ("embedding.weight", "linear", "head"),
            ("linear.weight", "linear", "linear"),
            ("gate.weight", "linear", "gate"),
            ("conv.weight", "conv", "conv"),
        ]
        for name, kind, layer in layers:
            covariance = matched[name].covariances[kind]
            np.testing.assert_array_equal(covariance.read(), calibration.covariance(layer).numpy())
            assert covariance.n_samples == 8
            assert covariance.read().dtype == (np.float64 if kind == "embedding" else np.float32)


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "model.module.", "_orig_mod.module."])
def test_names_match_behind_the_prefixes_of_wrappers(saved: Path, prefix: str) -> None:
    with CalibrationFile(saved) as file:
        matched, unmatched = file.match({f"{prefix}head.weight": (7, 6), f"{prefix}other": (1,)})
        assert list(matched) == [f"{prefix}head.weight"]
        assert unmatched == ["linear.weight", "conv.weight", "gate.weight"]


def test_names_match_with_wrappers_of_submodules(saved: Path) -> None:
    names = ("model.head._orig_mod.weight", "gate._checkpoint_wrapped_module._orig_mod.weight")
    with CalibrationFile(saved) as file:
        matched, _ = file.match({names[0]: (7, 6), names[1]: (6, 6), "head.module.weight": (1,)})
    assert set(matched) == set(names)


def test_exact_names_go_before_prefixes(saved: Path) -> None:
    with CalibrationFile(saved) as file:
        assert list(file.match({"model.gate.weight": (9,), "gate.weight": (6, 6)})[0]) == ["gate.weight"]


def test_a_checkpoint_with_another_shape_is_refused(saved: Path) -> None:
    with (
        CalibrationFile(saved) as file,
        pytest.raises(CalibrationError, match=r"calibration: tensor 'conv\.weight' .*3, 5\].*3, 3\]"),
    ):
        file.match(SHAPES | {"conv.weight": (6, 3, 5)})


def test_layers_that_share_a_weight_are_summed_up(tmp_path: Path) -> None:
    model = stack(4, 4, 4)
    model[1].weight = model[0].weight
    calibration = recorded(model, normal(5, 4))
    calibration.save(tmp_path / "calibration")
    with CalibrationFile(tmp_path / "calibration") as file:
        covariance = file.recorded["0.weight"].covariances["linear"]
        expected = calibration.covariance("0") + calibration.covariance("1")
        np.testing.assert_array_equal(covariance.read(), expected.numpy())
        assert covariance.n_samples == 10


def test_another_models_calibration_is_refused(saved: Path) -> None:
    with pytest.raises(CalibrationError, match="calibration: is of another model"):
        Calibration(stack(4, 4)).load(saved)


def test_a_calibration_of_nothing_is_not_saved(tmp_path: Path) -> None:
    calibration = Calibration(nn.Linear(2, 2))
    with pytest.raises(CalibrationError, match="no input was recorded"):
        calibration.save(tmp_path / "calibration")
    with pytest.raises(CalibrationError, match="no input was recorded"):
        calibration.covariance("")
    assert os.listdir(tmp_path) == []


# --- damage ----------------------------------------------------------------------------------------


def content(change: Callable[[Any], None]) -> Callable[[Any, dict[str, str]], None]:
    """Return a function that changes the parsed metadata of a file."""

    def apply(_: Any, metadata: dict[str, str]) -> None:
        value = json.loads(metadata[KEY_CONTENT])
        change(value)
        metadata[KEY_CONTENT] = json.dumps(value)

    return apply


def row(index: int, **fields: Any) -> Callable[[Any, dict[str, str]], None]:
    """Return a function that changes the row of a layer: 0 embedding, 1 linear, 2 conv, 3 head, 4 gate."""
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
    with CalibrationFile(path) as file:
        for weight in file.recorded.values():
            for covariance in weight.covariances.values():
                covariance.read()


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
    with CalibrationFile(saved) as file:
        file.recorded["linear.weight"].covariances["linear"].read()
        with pytest.raises(CalibrationError, match="not finite"):
            file.recorded["conv.weight"].covariances["conv"].read()


def test_newer_missing_and_cut_files_are_refused(saved: Path) -> None:
    content = saved.read_bytes()
    for n_bytes in (0, 7, 200, len(content) - 1):
        saved.write_bytes(content[:n_bytes])
        with pytest.raises(CalibrationError, match="calibration: not a complete safetensors file"):
            CalibrationFile(saved)
    saved.write_bytes(content)
    rewrite(saved, lambda _, metadata: metadata.update({KEY_VERSION: "2"}))
    with pytest.raises(UnsupportedError, match="calibration: version '2'"):
        CalibrationFile(saved)
    with pytest.raises(FileNotFoundError):
        CalibrationFile(saved.with_name("none"))


def test_files_are_read_without_torch(saved: Path) -> None:
    code = (
        "import sys; from ckptz.guidance.files import CalibrationFile as File\n"
        f"conv = File({str(saved)!r}).recorded['conv.weight']; print(conv.covariances['conv'].read().shape)\n"
        "assert 'torch' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "(2, 9, 9)\n"
