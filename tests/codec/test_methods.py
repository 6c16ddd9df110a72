"""Registered methods work with every function that writes files.

One method is that of docs/adding-a-method.md; the other has an axis, which a search varies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.numpy

import ckptz
from ckptz.codec.lossless import EXACT
from ckptz.codec.method import Method, Recipe, Setting, checked, is_large_weight
from ckptz.codec.quantizer import Quantizer
from ckptz.codec.registry import METHODS, method_named
from ckptz.codec.tensor import TensorToEncode
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.errors import ConfigError
from ckptz.format.dtypes import DType
from ckptz.format.plan import Domain, ExplicitTable, Plan, QuantizationMap
from ckptz.numpy import load_file, save_file
from ckptz.search.spaces import SPACES, CubeSpace
from ckptz.state.roles import Role
from tests.support.cli_support import ckptz as command
from tests.support.spec_support import ROOT, python_of

torch = pytest.importorskip("torch")


@dataclass(frozen=True, slots=True)
class Nearest(Quantizer):
    """Quantizer to the nearest of evenly spaced levels from -ceiling to ceiling."""

    ceiling: float
    levels: int

    def codes(self, begin: int, end: int, patterns: Any) -> Any:
        positions = (patterns.view(np.float32) / self.ceiling + 1) * ((self.levels - 1) / 2)
        return np.rint(positions).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class EvenRecipe(Recipe):
    levels: int
    name: ClassVar[str] = "even"

    def settings(self) -> dict[str, Setting]:
        return {"levels": self.levels}

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        values = tensor.source.patterns(0, tensor.source.n_patterns).view(np.float32)
        ceiling = float(np.abs(values).max())
        table = np.linspace(-ceiling, ceiling, self.levels, dtype=np.float32).view(np.uint32)
        quant_map = QuantizationMap(ExplicitTable(table[None]), np.zeros(1, np.int64))
        return TensorPlan(Plan(quant_map=quant_map, domain=Domain.LINEAR), Nearest(ceiling, self.levels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Even(Method):
    """Method with evenly spaced levels, whose number a search chooses from an axis."""

    levels: int = 64
    name: ClassVar[str] = "even"

    def recipe(self, role: Role, dtype: DType, shape: tuple[int, ...]) -> Recipe:
        is_coded = dtype.name == "F32" and is_large_weight(role, dtype, shape)
        return EvenRecipe(self.levels) if is_coded else EXACT


@pytest.fixture
def page(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Return the variables of the code in docs/adding-a-method.md, which registers a method and uses it."""
    code = compile(python_of(ROOT / "docs" / "adding-a-method.md"), "page", "exec", dont_inherit=True)
    names: dict[str, Any] = {"__name__": "page"}
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        exec(code, names)
    yield names
    del METHODS["sign"], SPACES["sign"]


@pytest.fixture
def sign(page: dict[str, Any]) -> type[Method]:
    """Return the method of the page: the sign of each weight, and a multiple of the mean magnitude."""
    method: type[Method] = page["Sign"]
    return method


@pytest.fixture
def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"w": rng.standard_normal((64, 128), np.float32), "b": rng.standard_normal(64, np.float32)}


def is_signs(restored: Any, exact: Any, gain: float = 1.0) -> bool:
    """Return whether restored weights are signs times `gain` times the mean magnitude of the exact ones."""
    level = np.float32(gain * np.abs(exact).mean())
    return bool(np.array_equal(restored, np.where(exact >= 0, level, -level)))


def test_the_code_of_the_page_restores_signs(page: dict[str, Any]) -> None:
    assert is_signs(page["restored"], page["weight"], 2.0)


def test_compress_inspect_and_verify_support_it(
    sign: type[Method], state: dict[str, Any], tmp_path: Path
) -> None:
    safetensors.numpy.save_file(state, tmp_path / "a.safetensors")
    (report,) = ckptz.compress(tmp_path / "a.safetensors", config=sign())
    assert report.n_lossy == 1
    records = {tensor.name: tensor.lossy for tensor in ckptz.inspect(report.output).tensors}
    assert (records["w"].method, records["w"].settings) == ("sign", {"gain": 1.0})
    assert records["b"] is None
    assert ckptz.verify(report.output, against=tmp_path / "a.safetensors").n_lossy == 1


def test_a_checkpointer_supports_it(sign: type[Method], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 64)
    exact = model.weight.detach().numpy().copy()
    keep = ckptz.KeepPolicy(exact=0)
    with ckptz.Checkpointer(tmp_path, model, config=sign(), keep=keep, background=False) as saver:
        saver.save(1)
        saver.restore(1)
    assert is_signs(model.weight.detach().numpy(), exact)


def test_a_search_varies_its_only_setting(sign: type[Method], state: dict[str, Any], tmp_path: Path) -> None:
    safetensors.numpy.save_file(state, tmp_path / "a.safetensors")

    def mean_magnitude(tensors: dict[str, Any]) -> float:
        return float(tensors["w"].abs().mean())

    exact = float(np.abs(state["w"]).mean())
    budget = ckptz.Budget(mean_magnitude, 2 * exact, relative=False, lower_is_better=True)
    (report,) = ckptz.compress(tmp_path / "a.safetensors", config=sign(), budget=budget)
    assert report.search.method == "sign"
    feasible_gains = [trial.config["gain"] for trial in report.search.trials if trial.is_feasible]
    assert 2.5 < max(feasible_gains) <= 3.0  # the mean may be three times the exact one
    assert is_signs(load_file(report.output)["w"], state["w"], report.search.config["gain"])


def test_a_search_over_an_axis_predicts_sizes_within_ten_percent(
    state: dict[str, Any], tmp_path: Path
) -> None:
    state["w"] = np.random.default_rng(1).standard_normal((256, 256), np.float32)
    safetensors.numpy.save_file(state, tmp_path / "a.safetensors")
    errors = {}

    def mean_square_error(tensors: dict[str, Any]) -> float:
        return float(np.square(tensors["w"].numpy() - state["w"]).mean())

    ckptz.register(Even)
    SPACES["even"] = CubeSpace(axes={"levels": (128, 64, 32, 16, 8, 4, 2)})
    try:
        for levels in (16, 8):
            save_file(state, tmp_path / "b.ckptz", config=Even(levels=levels))
            errors[levels] = float(np.square(load_file(tmp_path / "b.ckptz")["w"] - state["w"]).mean())
        limit = (errors[16] + errors[8]) / 2
        budget = ckptz.Budget(mean_square_error, limit, relative=False, lower_is_better=True)
        search = ckptz.SearchOptions(budgets=(budget,), template=Even())
        (report,) = ckptz.compress(tmp_path / "a.safetensors", search=search)
    finally:
        del METHODS["even"], SPACES["even"]
    assert report.search.config == {"levels": 16}
    assert report.search.n_predicted == 7
    for trial in report.search.trials:
        assert trial.predicted_bytes == pytest.approx(trial.n_bytes, rel=0.1), trial.config


def test_the_command_line_shows_its_settings(sign: type[Method]) -> None:
    text = command("compress", "--help-methods").stdout
    assert "--set gain=... (default 1.0)" in text
    assert "multiple of the mean magnitude." in text


def test_the_command_line_supports_it(sign: type[Method], state: dict[str, Any], tmp_path: Path) -> None:
    from ckptz_cli.main import main

    safetensors.numpy.save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["compress", str(tmp_path / "a.safetensors"), "--method", "sign", "--set", "gain=2", "-q"])
    assert is_signs(load_file(tmp_path / "a.ckptz")["w"], state["w"], 2.0)


def test_methods_that_are_not_registered_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'even' is not registered"):
        save_file({"w": np.zeros((64, 64), np.float32)}, tmp_path / "a.ckptz", config=Even())
    with pytest.raises(ConfigError, match="no method 'even'"):
        method_named("even")
    with pytest.raises(ConfigError, match="must be a configuration"):
        checked("grid")
    assert not list(tmp_path.iterdir())


def test_a_name_can_be_registered_for_one_class_only(sign: type[Method]) -> None:
    with pytest.raises(ConfigError, match="registered already"):
        ckptz.register(type("Sign", (sign,), {}))
    assert ckptz.register(sign) is sign
