"""accelerate's save_state with models in `.ckptz` files."""

import importlib
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")

import accelerate
from accelerate.utils import DistributedType, ProjectConfiguration

from ckptz import Grid, KeepPolicy, KeepRules, verify
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.integrations import accelerate as integration
from ckptz.integrations.accelerate import ChainOptions, register
from ckptz.integrations.versions import UntestedVersionWarning
from ckptz.run.names import run_files
from ckptz.run.step_files import COMPLETE
from ckptz.torch import load_model

pytestmark = pytest.mark.apps


def prepared(folder: Path, n_models: int = 1, **project: Any) -> Any:
    """Return an accelerator with models and optimizers that it has prepared."""
    torch.manual_seed(1)
    config = ProjectConfiguration(project_dir=str(folder), **project)
    accelerator = accelerate.Accelerator(cpu=True, project_config=config)
    models = [accelerator.prepare(torch.nn.Linear(40, 30)) for _ in range(n_models)]
    optimizers = [accelerator.prepare(torch.optim.AdamW(model.parameters())) for model in models]
    return accelerator, models, optimizers


def train(accelerator: Any, models: list[Any], optimizers: list[Any]) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        accelerator.backward(model(torch.ones(2, 40)).square().sum())
        optimizer.step()
        optimizer.zero_grad()


def weights(models: list[Any]) -> list[torch.Tensor]:
    return [tensor.clone() for model in models for tensor in model.state_dict().values()]


@pytest.mark.parametrize("exact", [0, 1])
def test_the_newest_lossy_models_are_restored_exactly(tmp_path: Path, exact: int) -> None:
    accelerator, models, optimizers = prepared(tmp_path, 2)
    register(accelerator, ChainOptions(config=Grid(min_elements=1), exact=exact, jobs=1))
    for step in range(2):
        train(accelerator, models, optimizers)
        accelerator.save_state(str(tmp_path / str(step)))
    saved = weights(models)
    train(accelerator, models, optimizers)
    accelerator.load_state(str(tmp_path / "1"))
    is_equal = [torch.equal(a, b) for a, b in zip(weights(models), saved, strict=True)]
    assert all(is_equal) == bool(exact)


@pytest.mark.usefixtures("deltas_at_any_cost")
@pytest.mark.parametrize("is_automatic", [True, False])
def test_weights_outlive_their_optimizer_state(tmp_path: Path, is_automatic: bool) -> None:
    accelerator, models, optimizers = prepared(tmp_path, 2, automatic_checkpoint_naming=is_automatic)
    keep = KeepPolicy(last=2, weights=KeepRules(last=1, every=3))
    register(accelerator, ChainOptions(full_every=4, keep=keep, jobs=1))
    saved, run = [], tmp_path / "checkpoints"
    for i in range(8):
        train(accelerator, models, optimizers)
        accelerator.save_state(None if is_automatic else str(run / f"checkpoint_{i}"))
        saved.append(weights(models))
    assert sorted(path.name for path in run.iterdir()) == [f"checkpoint_{i}" for i in (0, 3, 6, 7)]
    assert {path.parent.name for path in run.rglob("optimizer*.bin")} == {"checkpoint_6", "checkpoint_7"}
    for path in run_files(run):
        verify(path)
    assert not list(run.rglob("*.safetensors"))
    for i in (6, 7):
        train(accelerator, models, optimizers)
        accelerator.load_state(str(run / f"checkpoint_{i}"))
        assert all(map(torch.equal, weights(models), saved[i]))
    with pytest.raises(ConfigError, match="checkpoint_3: only the weights of this step were kept"):
        accelerator.load_state(str(run / "checkpoint_3"))
    load_model(models[1], run / "checkpoint_3" / "model_1.ckptz")
    assert torch.equal(models[1].weight, saved[3][2])


def test_keep_rules_need_a_step_and_no_other_limit(tmp_path: Path) -> None:
    accelerator, *_ = prepared(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    with pytest.raises(ConfigError, match="total_limit and keep both delete checkpoints"):
        register(accelerator, ChainOptions(keep=KeepPolicy()))
    accelerator, *_ = prepared(tmp_path)
    register(accelerator, ChainOptions(keep=KeepPolicy()))
    with pytest.raises(ConfigError, match=r"newest: keep needs a folder named after its step"):
        accelerator.save_state(str(tmp_path / "newest"))


def test_what_accelerate_saved_alone_loads_and_hooks_can_go(tmp_path: Path) -> None:
    accelerator, models, optimizers = prepared(tmp_path)
    accelerator.save_state(str(tmp_path / "before"))
    expected = weights(models)
    registration = register(accelerator)
    train(accelerator, models, optimizers)
    accelerator.load_state(str(tmp_path / "before"))
    assert all(map(torch.equal, weights(models), expected))
    registration.remove()
    accelerator.save_state(str(tmp_path / "after"))
    assert (tmp_path / "after" / "model.safetensors").is_file()


def test_an_untested_version_says_so_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "__version__", "9.0.1")
    with pytest.warns(UntestedVersionWarning, match=r"accelerate 9\.0\.1 is outside"):
        importlib.reload(integration)


def test_ways_with_checkpoints_of_their_own_are_refused() -> None:
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        with pytest.raises(UnsupportedError, match=kind.value):
            register(SimpleNamespace(distributed_type=kind))


def test_load_state_that_is_not_strict_lists_what_does_not_match(tmp_path: Path) -> None:
    accelerator, models, _ = prepared(tmp_path)
    register(accelerator)
    accelerator.save_state(str(tmp_path / "1"))
    expected = models[0].weight.detach().clone()
    models[0].register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    models[0].weight.data.zero_()
    with pytest.raises(RuntimeError, match="scale"):
        accelerator.load_state(str(tmp_path / "1"))
    with pytest.warns(RuntimeWarning, match=r"missing \['scale'\], unexpected nothing"):
        accelerator.load_state(str(tmp_path / "1"), strict=False)
    assert torch.equal(models[0].weight, expected)
    with pytest.raises(RuntimeError, match="scale"):
        accelerator.load_state(str(tmp_path / "1"))


def test_load_state_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    accelerator, models, _ = prepared(tmp_path)
    registration = register(accelerator)
    accelerator.save_state(str(tmp_path / "1"))
    del models[0].weight, models[0].bias
    models[0].register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(ConfigError, match="no name matches the model"):
        accelerator.load_state(str(tmp_path / "1"), strict=False)
    registration.remove()
    assert "load_state" not in vars(accelerator)


@pytest.mark.parametrize("is_saved_compiled", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_compiled_models_load_into_plain_ones_and_the_other_way_round(
    tmp_path: Path, is_saved_compiled: bool, strict: bool
) -> None:
    def made(is_compiled: bool) -> tuple[Any, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        inner: Any = torch.nn.Linear(4, 3)
        inner = torch.compile(inner, backend="eager") if is_compiled else inner
        model = accelerator.prepare(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.DataParallel(inner)))
        register(accelerator)
        return accelerator, model

    accelerator, saved = made(is_saved_compiled)
    accelerator.save_state(str(tmp_path / "1"))
    other, back = made(not is_saved_compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        other.load_state(str(tmp_path / "1"), strict=strict)
    assert all(map(torch.equal, back.parameters(), saved.parameters()))


class Counter:
    """Object with a state, registered for checkpointing in addition to the models."""

    def __init__(self) -> None:
        self.n, self.is_reset = 1, False

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = 0 if self.is_reset else state["n"]


def test_what_accelerate_restores_itself_is_compared(tmp_path: Path) -> None:
    accelerator, models, optimizers = prepared(tmp_path)
    counter = Counter()
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizers[0].optimizer, 2))
    accelerator.register_for_checkpointing(counter)
    register(accelerator)
    train(accelerator, models, optimizers)
    accelerator.save_state(str(tmp_path / "1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        accelerator.load_state(str(tmp_path / "1"))
    models[0].to(torch.bfloat16)
    accelerator.save_state(str(tmp_path / "2"))
    counter.is_reset = True
    with pytest.warns(RuntimeWarning, match=r"2: restored, but not exactly") as caught:
        accelerator.load_state(str(tmp_path / "2"))
    [text] = [str(warning.message) for warning in caught if "not exactly" in str(warning.message)]
    assert "custom_checkpoint_0.pkl.n: 1 saved, 0 now" in text
    assert "optimizer.bin.state.0.exp_avg: float32 [30, 40] saved, bfloat16 [30, 40] now" in text
    assert "model" not in text


class Drawing(Counter):
    """Object that draws random numbers in `load_state_dict`, after the random states were restored."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        random.random()
        np.random.rand()
        torch.rand(1)


def test_random_states_are_compared(tmp_path: Path) -> None:
    accelerator, models, optimizers = prepared(tmp_path)
    register(accelerator)
    train(accelerator, models, optimizers)
    accelerator.register_for_checkpointing(Drawing())
    accelerator.save_state(str(tmp_path / "1"))
    with pytest.warns(RuntimeWarning, match=r"1: restored, but not exactly") as caught:
        accelerator.load_state(str(tmp_path / "1"))
    [text] = [str(warning.message) for warning in caught if "not exactly" in str(warning.message)]
    for name in ("random_state.1", "numpy_random_seed", "torch_manual_seed"):
        assert f"random_states_0.pkl.{name}" in text
    assert "optimizer" not in text
    for damage in (lambda path: path.write_bytes(b"no pickle"), Path.unlink):  # accelerate ignores both
        damage(tmp_path / "1" / "random_states_0.pkl")
        with pytest.warns(RuntimeWarning, match=r"random_states_0\.pkl: not restored"):
            accelerator.load_state(str(tmp_path / "1"))


def test_every_process_takes_the_mark_of_completeness_away_before_it_writes(tmp_path: Path) -> None:
    """Each process writes its random states, possibly before the main process has written anything."""
    accelerator, models, optimizers = prepared(tmp_path)
    registration = register(accelerator)
    train(accelerator, models, optimizers)
    accelerator.save_state(str(tmp_path / "1"))
    assert (tmp_path / "1" / COMPLETE).exists()
    registration._accelerator = SimpleNamespace(is_main_process=False)
    registration.save([], [], str(tmp_path / "1"))
    assert not (tmp_path / "1" / COMPLETE).exists()
    assert (tmp_path / "1" / "model.ckptz").exists()
