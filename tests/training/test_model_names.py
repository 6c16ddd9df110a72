"""Names of a model's state without wrappers, state-dict hooks, and models of other sizes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptz import Checkpointer
from ckptz.errors import ChecksumError, ConfigError, CorruptionError
from ckptz.hooks import Calibration, SensitivityTracker
from ckptz.state.modules import name_without_wrappers, names_in_model
from ckptz.torch import load_file, load_model, save_file
from tests.support.checkpointer_support import Run, flip, restored, same, saved, saved_run, state_of

PLAIN_NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


class UserNames(nn.Module):
    """Model with submodules that have names of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.inner = nn.ModuleDict({"module": nn.Linear(3, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["module"](self.module(x))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def with_first(wrap: Callable[[nn.Module], Any]) -> nn.Sequential:
    model = sequential()
    model[0] = wrap(model[0])
    return model


WRAPPED: dict[str, Callable[[], Any]] = {
    "compiled": lambda: compiled(sequential()),
    "compiled submodule": lambda: with_first(compiled),
    "checkpoint_wrapper of a compiled submodule": lambda: with_first(
        lambda m: checkpoint_wrapper(compiled(m))
    ),
    "compiled checkpoint_wrapper": lambda: with_first(lambda m: compiled(checkpoint_wrapper(m))),
    "DataParallel of a compiled checkpoint_wrapper": lambda: nn.DataParallel(
        with_first(lambda m: compiled(checkpoint_wrapper(m)))
    ),
    "compiled one of a compiled checkpoint_wrapper": lambda: compiled(
        with_first(lambda m: compiled(checkpoint_wrapper(m)))
    ),
    "DataParallel": lambda: nn.DataParallel(sequential()),
    "DataParallel submodule": lambda: with_first(nn.DataParallel),
    "DataParallel of a compiled one": lambda: nn.DataParallel(compiled(with_first(checkpoint_wrapper))),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_checkpoint_moves_between_a_wrapped_and_a_plain_model(tmp_path: Path, wrapped: Any) -> None:
    torch.manual_seed(1)
    model, plain = wrapped(), sequential()
    saved(tmp_path, model)
    assert set(load_file(tmp_path / "step-00000001.ckptz")) == set(PLAIN_NAMES)
    restored(tmp_path, plain)
    values = model.state_dict().values()
    assert all(map(torch.equal, plain.state_dict().values(), values))
    other = wrapped()
    restored(tmp_path, other)
    assert all(map(torch.equal, other.state_dict().values(), values))


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_the_state_of_an_optimizer_moves_between_a_wrapped_and_a_plain_model(
    tmp_path: Path, wrapped: Any
) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [*model.parameters()]

    model, plain = wrapped(), sequential()
    optimizers = [torch.optim.NAdam(one.parameters()) for one in (model, plain)]
    trained(model, optimizers[0])
    saved(tmp_path, model, optimizers[0])
    assert restored(tmp_path, plain, optimizers[1]).is_exact
    assert all(map(torch.equal, trained(plain, optimizers[1]), trained(model, optimizers[0])))


@pytest.mark.parametrize(
    "wrap", [lambda m: m, compiled, nn.DataParallel], ids=["plain", "compiled", "parallel"]
)
def test_a_submodule_that_is_called_module_keeps_its_name(tmp_path: Path, wrap: Any) -> None:
    model = wrap(UserNames())
    saved(tmp_path, model)
    names = {name.rpartition(".")[0] for name in load_file(tmp_path / "step-00000001.ckptz")}
    outer = "0." if wrap is nn.Sequential else ""
    assert names == {f"{outer}module", f"{outer}inner.module"}
    assert name_without_wrappers(nn.DataParallel(UserNames()), "module.module.weight") == "module.weight"


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_gradients_and_inputs_have_names_without_wrappers(wrapped: Any) -> None:
    model = wrapped()
    with SensitivityTracker(model) as tracker:
        assert tracker.missing() == PLAIN_NAMES
    assert list(Calibration(model)._layers) == ["0", "2"]


class Renamed(nn.Module):
    """Model that renames `linear` to `dense` in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}dense.{name}"] = state.pop(f"{prefix}linear.{name}")

    @staticmethod
    def _load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}linear.{name}"] = state.pop(f"{prefix}dense.{name}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["plain", "compiled"])
def test_state_dict_hooks_that_rename_entries_apply(tmp_path: Path, wrap: Any) -> None:
    model, other = wrap(Renamed()), wrap(Renamed())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved(tmp_path, model, optimizer)
    assert set(load_file(tmp_path / "step-00000001.ckptz")) == {"dense.bias", "dense.weight"}
    assert restored(tmp_path, other, torch.optim.AdamW(other.parameters())).is_exact
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_frozen_entries_that_hooks_rename_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(Renamed(), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with Checkpointer(tmp_path, model, trainable_only=True, background=False) as checkpointer:
        checkpointer.save(1)
        assert set(load_file(tmp_path / "step-00000001.ckptz")) == {"1.bias", "1.weight"}
        checkpointer.restore(1)


def test_a_model_without_parameters_is_saved_with_its_extras(tmp_path: Path) -> None:
    position = {"seen": 3}
    with Checkpointer(tmp_path, nn.ReLU(), extra={"position": position}, background=False) as checkpointer:
        checkpointer.save(1)
        position["seen"] = 4
        assert checkpointer.restore_latest() == 1
    assert position == {"seen": 3}


# --- models with more or fewer names ----------------------------------------------------------------


def saved_linear(folder: Path) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    saved(folder, model)
    return model


def test_weights_that_match_are_restored_and_the_other_names_listed(tmp_path: Path) -> None:
    saved = saved_linear(tmp_path)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    kept = copy.deepcopy(model[2].state_dict())
    with Checkpointer(tmp_path, model) as checkpointer:
        with pytest.raises(ConfigError, match=r"has no '2\.weight'.*strict=False"):
            checkpointer.restore(1, weights_only=True)
        assert checkpointer.restore(1, weights_only=True, strict=False) == 1
        restored = checkpointer.restored
    assert not restored.is_exact
    assert restored.missing == ("2.weight", "2.bias")
    assert restored.unexpected == ("1.weight", "1.bias")
    assert same(model[0].state_dict(), saved.get_submodule("0").state_dict())
    assert same(model[2].state_dict(), kept)


def test_a_restore_that_misses_nothing_is_exact_though_not_strict(tmp_path: Path) -> None:
    saved = saved_linear(tmp_path)
    with Checkpointer(tmp_path, copy.deepcopy(saved)) as checkpointer:
        checkpointer.restore(1, weights_only=True, strict=False)
        assert checkpointer.restored.is_exact
        assert checkpointer.restored.missing == checkpointer.restored.unexpected == ()


def test_frozen_weights_that_were_left_out_are_missing_in_another_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    saved(tmp_path, model, trainable_only=True)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with Checkpointer(tmp_path, other) as checkpointer:
        checkpointer.restore(1, weights_only=True, strict=False)
        assert not checkpointer.restored.is_exact
        assert checkpointer.restored.missing == ("0.weight", "0.bias")
    assert torch.equal(other[1].weight, model[1].weight)


@pytest.mark.parametrize("strict", [True, False])
def test_load_model_reads_the_weights_of_a_run(tmp_path: Path, strict: bool) -> None:
    saved = saved_linear(tmp_path)
    other = compiled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    missing, unexpected = load_model(other, tmp_path / "step-00000001.ckptz", strict=strict)
    assert (set(missing), list(unexpected)) == (set(), [])
    assert all(map(torch.equal, other.state_dict().values(), saved.state_dict().values()))


def test_load_model_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    saved_linear(tmp_path)
    for name in ("step-00000001.ckptz", "step-00000001.state.ckptz"):
        with pytest.raises(ConfigError, match="no name matches the model"):
            load_model(nn.ModuleDict({"head": nn.Linear(3, 3)}), tmp_path / name, strict=False)


def test_names_that_begin_with_model_stay_in_files_that_no_run_wrote(tmp_path: Path) -> None:
    save_file({"model.weight": torch.ones(2)}, tmp_path / "step-00000001.ckptz")
    assert list(load_file(tmp_path / "step-00000001.ckptz")) == ["model.weight"]


# --- a newest step that is damaged ------------------------------------------------------------------


@pytest.mark.parametrize("file", ["step-00000003.ckptz", "step-00000003.state.ckptz"])
def test_the_newest_whole_step_is_restored_if_the_newest_is_damaged(tmp_path: Path, file: str) -> None:
    saved_run(tmp_path, 2, full_every=1)
    run = Run(seed=4)
    with run.checkpointer(tmp_path, full_every=1, background=False) as checkpointer:
        checkpointer.restore(2)
        expected = state_of(run)
        run.step()
        checkpointer.save(3)
    flip(tmp_path / file)
    run = Run(seed=5)
    with run.checkpointer(tmp_path) as checkpointer:
        with pytest.raises((ChecksumError, CorruptionError), match=file):
            checkpointer.restore_latest(fall_back=False)
        with pytest.warns(RuntimeWarning, match=r"step 3 cannot be read .* step 2 was restored.*") as caught:
            assert checkpointer.restore_latest() == 2
        assert caught[0].filename == __file__
        assert same(state_of(run), expected)
        assert checkpointer.restored.step == 2
        assert "renamed when it is saved again" in checkpointer.restored.notes[-1]
        checkpointer.discard_after(2)
        checkpointer.save(3)
        checkpointer.wait()
        assert checkpointer.steps()[-1] == 3


def test_the_newest_error_is_raised_if_no_step_is_whole(tmp_path: Path) -> None:
    saved_run(tmp_path, 2, full_every=1)
    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}.state.ckptz")
    run = Run(seed=6)
    before = state_of(run)
    checkpointer = run.checkpointer(tmp_path)
    with pytest.raises((ChecksumError, CorruptionError), match=r"step-00000002\.state\.ckptz"):
        checkpointer.restore_latest()
    assert same(state_of(run), before)


@pytest.mark.parametrize("other", ["plain", "compiled submodule", "DataParallel"])
@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_names_of_wrappers_in_a_file_match_any_model(tmp_path: Path, wrapped: Any, other: str) -> None:
    torch.manual_seed(1)
    model, target = wrapped(), WRAPPED.get(other, sequential)()
    save_file(model.state_dict(), tmp_path / "wrapped.ckptz")
    assert load_model(target, tmp_path / "wrapped.ckptz") == (set(), [])
    assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))


def test_names_that_match_several_entries_are_reported_and_not_guessed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = UserNames()
    model.register_parameter("weight", nn.Parameter(torch.zeros(3, 3)))
    before = copy.deepcopy(model.state_dict())
    names = ["_orig_mod.module.weight", "_orig_mod.module.bias", "module._orig_mod.bias"]
    assert names_in_model(model, before, names) == {name: name for name in names}
    save_file({name: torch.ones(3) for name in names}, tmp_path / "odd.ckptz")
    with pytest.raises(RuntimeError, match=r"Missing key.*\n.*Unexpected key.*_orig_mod\.module\.bias"):
        load_model(model, tmp_path / "odd.ckptz")


def test_equal_names_go_before_those_of_wrappers() -> None:
    model, names = UserNames(), ["module.weight", "module.module.weight", "_orig_mod.module.bias"]
    model_names = names_in_model(model, model.state_dict(), names)
    expected = ["module.weight", "module.module.weight", "module.bias"]
    assert model_names == dict(zip(names, expected, strict=True))
