"""Lightning with `.ckptz` checkpoints: kept checkpoints resume bit for bit, whichever others were deleted."""

import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

import ckptz
from ckptz import KeepPolicy, KeepRules, restore
from ckptz.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    MissingBaseError,
    UnsupportedError,
)
from ckptz.format.reader import Container
from ckptz.integrations import versions
from ckptz.integrations.lightning import CkptzIO, RequireCheckpointIO, load_from_checkpoint
from ckptz.run.names import run_files
from ckptz.state.torch import TYPE_KEY, from_plain
from ckptz.store.resolve import open_checkpoint

pytestmark = [pytest.mark.apps, pytest.mark.usefixtures("deltas_at_any_cost")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_loop.py"
N_STEPS = 10


class Model(LightningModule):
    """Small network with dropout; its logged score rises and falls."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.log("score", float((7 * self.global_step) % 10), on_step=True)
        return (self.net(batch) - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def train_dataloader(self) -> Any:
        data = torch.randn(4 * N_STEPS, 64, generator=torch.Generator().manual_seed(2))
        return torch.utils.data.DataLoader(data, batch_size=4)


def fit(
    folder: Path, io: Any, n_steps: int = N_STEPS, ckpt_path: Path | None = None, **checkpointing: Any
) -> tuple[Trainer, ModelCheckpoint]:
    """Train and save at every step."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"save_top_k": 2, "monitor": "score", "mode": "max"} | checkpointing
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **settings)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_steps=n_steps,
            accelerator="cpu",
            plugins=[io],
            callbacks=[callback],
            log_every_n_steps=1,
            **quiet,
        )
        trainer.fit(Model(), ckpt_path=ckpt_path)
    return trainer, callback


def same(value: Any, expected: Any) -> bool:
    """Return True if two nested states are bit-identical."""
    if isinstance(expected, torch.Tensor):
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor and value.dtype == expected.dtype and torch.equal(value, expected)
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    return bool(value == expected)


class Both(CkptzIO):
    """Checkpoint IO that also writes the file that Lightning itself would have written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        TorchCheckpointIO().save_checkpoint(checkpoint, Path(path).parent / "torch" / Path(path).name)


@pytest.mark.parametrize("way", ["plain", "async"])
def test_every_kept_checkpoint_is_what_lightning_saved(way: str, tmp_path: Path) -> None:
    io = Both(full_every=4, jobs=1)
    _, callback = fit(tmp_path, AsyncCheckpointIO(io) if way == "async" else io)
    kept = [Path(path) for path in callback.best_k_models]
    assert len(kept) == 2
    if way == "plain":
        assert sorted(tmp_path.glob("*.ckpt")) == sorted(kept)
        assert len(list(tmp_path.glob("base-*"))) <= 6, "what no checkpoint needs is gone"
    for path in kept:
        original = torch.load(tmp_path / "torch" / path.name, weights_only=False)
        assert same(io.load_checkpoint(path), original)
    assert any(open_checkpoint(path).depth for path in kept), "some are deltas"


def test_every_kept_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    first, callback = fit(tmp_path / "run", CkptzIO(full_every=4, jobs=1))
    expected = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    moments = first.optimizers[0].state_dict()
    for path in map(Path, callback.best_k_models):
        io = CkptzIO(full_every=4, jobs=1)
        checkpoint = io.load_checkpoint(path)
        resumed, _ = fit(tmp_path / f"from-{path.stem}", io, ckpt_path=path)
        assert resumed.global_step == N_STEPS
        assert checkpoint["global_step"] < N_STEPS
        exact, _ = fit_from_torch(tmp_path / f"exact-{path.stem}", checkpoint)
        assert same(dict(resumed.model.state_dict()), dict(exact.model.state_dict()))
        assert same(resumed.optimizers[0].state_dict(), exact.optimizers[0].state_dict())
    assert same(dict(first.model.state_dict()), expected)
    assert moments["state"]


def fit_from_torch(
    folder: Path, checkpoint: dict[str, Any], n_steps: int = N_STEPS
) -> tuple[Trainer, ModelCheckpoint]:
    """Resume from a state with Lightning's own checkpoint IO."""
    folder.mkdir()
    torch.save(checkpoint, folder / "state.ckpt")
    return fit(folder / "run", TorchCheckpointIO(), n_steps, folder / "state.ckpt")


def test_weights_outlive_their_optimizer_state(tmp_path: Path) -> None:
    keep = KeepPolicy(last=2, weights=KeepRules(last=1, every=5, best=1, lower_is_better=False))
    io = Both(full_every=4, keep=keep, jobs=1)
    _, callback = fit(tmp_path, io, save_top_k=-1, save_last=True)
    assert Path(callback.best_model_path).name == "step=8.ckpt"
    steps = {path.stem for path in tmp_path.glob("step*.ckpt")}
    assert steps == {f"step={i}" for i in (5, 8, 9, 10)}
    states = {path.name.partition(".")[0] for path in tmp_path.glob("*.state-*")}
    assert states == {"step=9", "step=10", "last"}
    for name in sorted(steps | {"last"}):
        original = torch.load(tmp_path / "torch" / f"{name}.ckpt", weights_only=False)
        if name not in states:
            del original["optimizer_states"], original["lr_schedulers"]
        assert same(CkptzIO().load_checkpoint(tmp_path / f"{name}.ckpt"), original), name
    for path in run_files(tmp_path):
        ckptz.verify(path)
    exact, _ = fit_from_torch(tmp_path / "exact", io.load_checkpoint(tmp_path / "step=10.ckpt"), 12)
    resumed, _ = fit(
        tmp_path, CkptzIO(full_every=4, keep=keep, jobs=1), 12, tmp_path / "last.ckpt", save_top_k=-1
    )
    assert same(dict(resumed.model.state_dict()), dict(exact.model.state_dict()))
    with pytest.raises(KeyError, match="contains only the model"):
        fit(tmp_path / "new", CkptzIO(), ckpt_path=tmp_path / "step=5.ckpt")


def test_keep_rules_that_contradict_lightning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set its save_top_k=-1"):
        fit(tmp_path, CkptzIO(keep=KeepPolicy(), jobs=1))
    with pytest.raises(ConfigError, match="keep needs the step"):
        CkptzIO(keep=KeepPolicy()).save_checkpoint({"state_dict": {}}, tmp_path / "best.ckpt")
    with pytest.raises(ConfigError, match="cannot outlive a lossy optimizer state"):
        CkptzIO(config=ckptz.Grid(), keep=KeepPolicy(weights=KeepRules()))


@pytest.mark.parametrize("io", [CkptzIO(jobs=1), TorchCheckpointIO()])
def test_a_module_loads_from_a_checkpoint(io: Any, tmp_path: Path) -> None:
    trainer, callback = fit(tmp_path, io, n_steps=2, monitor=None, save_top_k=1)
    loaded = load_from_checkpoint(Model, callback.best_model_path)
    assert loaded.hparams.width == 64
    assert same(dict(loaded.state_dict()), dict(trainer.model.state_dict()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_from_checkpoint(Model, callback.best_model_path, width=32)


def test_the_last_checkpoint_and_its_link(tmp_path: Path) -> None:
    for save_last in (True, "link"):
        folder = tmp_path / str(save_last)
        trainer, callback = fit(folder, CkptzIO(jobs=1), n_steps=3, save_last=save_last)
        loaded = CkptzIO().load_checkpoint(Path(callback.last_model_path))
        assert same(loaded["state_dict"], dict(trainer.model.state_dict()))


def test_a_checkpoint_of_lightning_itself_is_read(tmp_path: Path) -> None:
    _, callback = fit(tmp_path, TorchCheckpointIO(), n_steps=2, monitor=None, save_top_k=1)
    loaded = CkptzIO().load_checkpoint(callback.best_model_path, weights_only=False)
    assert loaded["global_step"] == 2


@pytest.mark.slow
def test_a_stopped_example_resumes(tmp_path: Path) -> None:
    for n_steps in (6, 12):
        command = [sys.executable, str(EXAMPLE), str(tmp_path), str(n_steps)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        assert "the best are" in process.stdout
    assert CkptzIO().load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 12


# --- files ---------------------------------------------------------------------------------------------


def a_state(drift: float = 0.0) -> dict[str, Any]:
    weight = torch.arange(6000.0).reshape(60, 100).sin() + drift
    return {"state_dict": OrderedDict(weight=weight, tied=weight), "epoch": 3, "global_step": 5}


def test_a_file_that_replaces_itself(tmp_path: Path) -> None:
    io = CkptzIO(jobs=1)
    for i in range(3):
        io.save_checkpoint(a_state(i / 1000), tmp_path / "last.ckpt")
        assert same(io.load_checkpoint(tmp_path / "last.ckpt"), a_state(i / 1000))


def test_equal_values_under_other_codes_are_told_apart(tmp_path: Path) -> None:
    """Lossy files with one content id may differ in their codes, so neither can replace the other."""
    io = CkptzIO(config=ckptz.KMeans(levels=4), exact=0, jobs=1)
    state = {"state_dict": {"weight": torch.randn(64, 80).round()}}
    for i in range(4):
        io.save_checkpoint(state, tmp_path / f"{i}.ckpt")
        state = io.load_checkpoint(tmp_path / f"{i}.ckpt")
    for i in range(3):
        io.remove_checkpoint(tmp_path / f"{i}.ckpt")
    assert same(io.load_checkpoint(tmp_path / "3.ckpt"), state)


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    io = CkptzIO(jobs=1)
    io.save_checkpoint(a_state(), tmp_path / "0.ckpt")
    io.save_checkpoint(a_state(0.001), tmp_path / "1.ckpt")
    for path in (*tmp_path.glob("base-*"), tmp_path / "0.ckpt"):
        path.unlink()
    with pytest.raises(MissingBaseError, match=r"1\.ckpt.*base-"):
        io.load_checkpoint(tmp_path / "1.ckpt")


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    CkptzIO(jobs=1).save_checkpoint(a_state(), tmp_path / "0.ckpt")
    restore(tmp_path / "0.ckpt", tmp_path / "0.pt")
    assert same(torch.load(tmp_path / "0.pt", weights_only=True), a_state())
    with ckptz.safe_open(tmp_path / "0.ckpt", "pt") as file:
        assert isinstance(open_checkpoint(tmp_path / "0.ckpt").container, Container)
        assert len(file.keys()) == 1, "tied tensors are stored once"


@pytest.mark.parametrize("where", [None, "cpu", {"cuda:0": "cpu"}, lambda storage, _: storage])
def test_tensors_go_where_they_are_wanted(where: Any, tmp_path: Path) -> None:
    io = CkptzIO(jobs=1)
    io.save_checkpoint(a_state(), tmp_path / "0.ckpt")
    assert same(io.load_checkpoint(tmp_path / "0.ckpt", map_location=where, weights_only=True), a_state())
    assert io.load_checkpoint(tmp_path / "0.ckpt", "meta")["state_dict"]["weight"].device.type == "meta"


# --- bad input -----------------------------------------------------------------------------------------


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    io = CkptzIO()
    with pytest.raises(UnsupportedError, match=r"hyper_parameters\.net"):
        io.save_checkpoint({"hyper_parameters": {"net": torch.nn.Linear(1, 1)}}, tmp_path / "0.ckpt")
    with pytest.raises(ConfigError, match=r"'states\.0\.weight' is on the meta device"):
        io.save_checkpoint({"states": [{"weight": torch.empty(3, device="meta")}]}, tmp_path / "0.ckpt")
    assert not list(tmp_path.iterdir())


def test_arguments_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="full_every"):
        CkptzIO(full_every=65)
    with pytest.raises(ConfigError, match="LOSSLESS"):
        CkptzIO(config="kmeans")
    with pytest.raises(TypeError, match="storage_options"):
        CkptzIO().save_checkpoint({}, tmp_path / "0.ckpt", storage_options={})
    with pytest.raises(UnsupportedError, match="s3://"):
        CkptzIO().save_checkpoint({}, "s3://bucket/0.ckpt")
    with pytest.raises(FileNotFoundError):
        CkptzIO().load_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "junk.ckpt").write_bytes(b"no checkpoint at all")
    with pytest.raises(FormatError):
        CkptzIO().load_checkpoint(tmp_path / "junk.ckpt")


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_a_strategy_that_passes_the_plugin_by_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=f"{strategy.__name__} does not use CheckpointIO"):
        RequireCheckpointIO().setup(SimpleNamespace(strategy=strategy()), None, "fit")


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, DDPStrategy])
def test_strategies_that_call_the_plugin_are_fine(strategy: Any) -> None:
    RequireCheckpointIO().setup(SimpleNamespace(strategy=strategy()), None, "fit")


@pytest.mark.parametrize(
    ("version", "warns"), [("2.6.6", False), ("2.7.0", True), ("1.9", True), ("main", True)]
)
def test_an_untested_version_says_so(version: str, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.warn_untested("lightning", version, ((2, 5), (2, 6)))
    assert len(caught) == warns
    assert all(str(one.message).startswith(f"lightning {version} is outside") for one in caught)


# --- values of other types -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {TYPE_KEY: "os.system", "value": "ls"},
        {TYPE_KEY: ["Path"], "value": "x"},
        {TYPE_KEY: "complex", "value": ["a", 2]},
        {TYPE_KEY: "scalar", "value": ["O", b"12345678"]},
        {TYPE_KEY: "scalar", "value": ["<f8", b"1"]},
        {TYPE_KEY: "defaultdict", "value": ["eval", []]},
        {TYPE_KEY: "set", "value": [[]]},
        {TYPE_KEY: "ndarray", "value": 3},
        {TYPE_KEY: "Path"},
    ],
)
def test_a_forged_type_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError):
        from_plain([value])


class Halves(Model):
    """Model with bf16 weights whose optimizer keeps its state in fp32."""

    def configure_optimizers(self) -> Any:
        self.to(torch.bfloat16)
        return torch.optim.AdamW(self.parameters())

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch.to(torch.bfloat16)).square().mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for state in self.trainer.optimizers[0].state.values():
            state["exp_avg"] = state["exp_avg"].float()


@pytest.mark.parametrize(("module", "is_exact"), [(Model, True), (Halves, False)])
def test_what_lightning_restores_is_compared(module: Any, is_exact: bool, tmp_path: Path) -> None:
    def fitted(n_steps: int, **how: Any) -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        callbacks = [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1), RequireCheckpointIO()]
        plugins = [AsyncCheckpointIO(CkptzIO(jobs=1))]
        trainer = Trainer(max_steps=n_steps, accelerator="cpu", plugins=plugins, callbacks=callbacks, **quiet)
        trainer.fit(module(), **how)

    fitted(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(2, ckpt_path=tmp_path / "step=1.ckpt")
    [text] = [text for text in map(str, (w.message for w in caught)) if "restored, but not exactly" in text]
    assert "random states: Lightning saves none" in text
    cast = "optimizer_states.0.state.0.exp_avg: float32 [64, 64] saved, bfloat16 [64, 64] now"
    assert (cast in text) == (not is_exact)
    assert ("; " in text) == (not is_exact), "nothing else differs"
    assert "state_dict.net" not in text
