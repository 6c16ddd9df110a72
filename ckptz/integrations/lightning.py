"""Lightning's checkpoints as `.ckptz` files.

    trainer = Trainer(plugins=[CkptzIO()])
    trainer = Trainer(plugins=[AsyncCheckpointIO(CkptzIO())])

Files keep the names that Lightning gives them, `*.ckpt`, and `Trainer(...).fit(ckpt_path=...)` resumes
from them. See docs/frameworks.md.
"""

from __future__ import annotations

import contextlib
import glob
import io
import secrets
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ckptz import lazy

try:
    import lightning
    import torch
    from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import SingleDeviceXLAStrategy, Strategy, XLAStrategy
except ModuleNotFoundError as error:
    raise lazy.needs_extra(error, "lightning") from None

from ckptz.api.read import PathLike
from ckptz.codec.effort import EffortName
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.format.suffixes import SUFFIX
from ckptz.guidance.momentum import Momentum, UpdateTracker
from ckptz.integrations.linked import Chain, ChainOptions, job_of, read_newest, warn_of_differences
from ckptz.integrations.versions import warn_untested
from ckptz.run.keep import KeepPolicy
from ckptz.run.links import N_DIGITS
from ckptz.run.names import is_of_state, step_of
from ckptz.run.step_files import METRIC_KEY, STATE_KEY
from ckptz.state.torch import on_device
from ckptz.store.resolve import open_checkpoint
from ckptz.training.compare import differences, fingerprint
from ckptz.write.job import WriteJob, mark_restored

TESTED: Final = ((2, 6), (2, 6))  # first and last version that the tests ran with
warn_untested("lightning", lightning.__version__, TESTED)

__all__ = ["CkptzIO", "RequireCheckpointIO", "load_from_checkpoint"]

NO_RANDOM_STATES: Final = "random states: Lightning saves none, so dropout and shuffling draw other numbers"
# These call the plug-in like the others, around steps of their own.
_CALL_THE_PLUGIN: Final = (XLAStrategy, SingleDeviceXLAStrategy)


class CkptzIO(CheckpointIO):  # type: ignore[misc]  # lightning is not followed by mypy
    """Saves and loads Lightning's checkpoints as full files and deltas.

    The bases of a checkpoint are linked into its folder as `base-*.ckptz`, and deleted with the last
    checkpoint that needs them, so `save_top_k` and `save_last` work as usual. Lossless checkpoints restore
    bit for bit. Only one process may write to a folder.

    Args:
        config: the method, lossless by default.
        full_every: largest number of saves from one full file to the next, 1 to 64; full files are more
            frequent if that takes less disk.
        exact: number of newest checkpoints that stay exact by residual files if `config` is lossy.
        keep: keep rules, for `ModelCheckpoint(save_top_k=-1)`, which deletes nothing itself. With rules for
            weights, optimizer and schedulers are in a separate file `NAME.state-DIGITS.ckptz`, which is
            deleted before the checkpoint. The best and the last checkpoint of ModelCheckpoint are always
            kept, the best one possibly without its state.
        effort: "fast", "default" or "small": time to spend on smaller files.
        jobs: number of threads, by default one for each core.
        base: a checkpoint of this plug-in that training began from; full files are stored as deltas to it.

    Raises:
        ConfigError: an argument is out of range, or `keep` has rules for weights and `config` makes optimizer
            state lossy, which a checkpoint stores in one file with the weights.

    Example:
        >>> import torch
        >>> from ckptz.integrations.lightning import CkptzIO
        >>> io = CkptzIO()
        >>> io.save_checkpoint({"state_dict": {"weight": torch.ones(2)}, "epoch": 1}, "last.ckpt")
        >>> io.load_checkpoint("last.ckpt")
        {'state_dict': {'weight': tensor([1., 1.])}, 'epoch': 1}
    """

    def __init__(
        self,
        *,
        config: Method = LOSSLESS,
        full_every: int = 16,
        exact: int = 1,
        keep: KeepPolicy | None = None,
        effort: EffortName = "default",
        jobs: int | None = None,
        base: PathLike | None = None,
    ) -> None:
        options = ChainOptions(
            config=config, full_every=full_every, exact=exact, keep=keep, effort=effort, jobs=jobs, base=base
        )
        self._is_split = keep is not None and keep.weights is not None
        if self._is_split and config.loses_state:
            raise ConfigError(
                "keep: weights cannot outlive a lossy optimizer state here; use LOSSLESS or KMeans"
            )
        kept = {"weights": None, "state": None} if keep is None else keep.by_kind
        self._chain = Chain(options, kept["weights"])
        self._states = Chain(replace(options, base=None), kept["state"])
        self._tracker = UpdateTracker() if config.loses_state else None
        self._torch = TorchCheckpointIO()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the checkpoint that was written last."""
        return tuple(self._chain.notes)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, which appears when it is complete.

        Args:
            checkpoint: nested plain values and tensors.
            path: the file, on a local or mounted file system.
            storage_options: not used.

        Raises:
            TypeError: `storage_options` are given.
            UnsupportedError: a value that cannot be stored without code; the message names it.
            WriteError: the disk is full or fails; an earlier file of this name is unchanged.
        """
        if storage_options is not None:
            raise TypeError("CkptzIO takes no storage_options; leave them out of Trainer.save_checkpoint")
        place, keep = _local(path), self._chain.options.keep
        step = _step_of(checkpoint)
        if keep is not None and step_of(place, step) is None:
            raise ConfigError(f"{path}: keep needs the step; name the file after it, such as step=100.ckpt")
        job = self._write_state(place, checkpoint) if self._is_split else self._job(checkpoint)
        self._chain.write(place, job)
        for state in list(place.parent.glob(f"{glob.escape(place.stem)}.state-*")):
            if is_of_state(state.name) and state != _state_of(place):  # of an earlier file of this name
                self._states.remove(state)
        self._chain.settle()
        keys = ("best_model_path", "last_model_path")  # which Lightning may load as "best" and "last"
        named = {Path(state[key]).name for state in _monitors(checkpoint) for key in keys if state.get(key)}
        self._chain.options.prune(place.parent, named)

    def _job(self, checkpoint: dict[str, Any]) -> WriteJob:
        """Make the job of a file, with the metric of ModelCheckpoint in its metadata if there is one."""
        step = _step_of(checkpoint)
        momentum = None if self._tracker is None else Momentum(self._tracker, step)
        scores = [state["current_score"] for state in _monitors(checkpoint) if state.get("monitor")]
        is_clear = len(scores) == 1 and scores[0] is not None
        metadata = {METRIC_KEY: repr(float(scores[0]))} if is_clear else None
        return replace(job_of(checkpoint, step), momentum=momentum, metadata=metadata)

    def _write_state(self, path: Path, checkpoint: dict[str, Any]) -> WriteJob:
        """Write optimizer and schedulers to a separate file; return the job of the other entries."""
        state = {key: checkpoint[key] for key in _STATE_KEYS if key in checkpoint}
        job = self._job({key: value for key, value in checkpoint.items() if key not in state})
        if not state:
            return job
        name = f"{path.stem}.state-{secrets.token_hex(N_DIGITS // 2)}{SUFFIX}"
        self._states.write(path.with_name(name), job_of(state, job.step))
        return replace(job, metadata={**(job.metadata or {}), STATE_KEY: name})

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; every chunk is checked against its checksum.

        Args:
            path: the file; one that Lightning itself wrote earlier is read by Lightning.
            map_location: a device for the tensors; by default, and for a function or a dict, the CPU.
            weights_only: for files of Lightning itself; a `.ckptz` file never runs code.

        Raises:
            FileNotFoundError: no such file.
            FormatError: it is damaged.
            MissingBaseError: a base is missing.
        """
        place = _local(path)
        if zipfile.is_zipfile(place):
            loaded: dict[str, Any] = self._torch.load_checkpoint(
                path, map_location=map_location, weights_only=weights_only
            )
            return loaded
        checkpoint: dict[str, Any] = read_newest(place, self._chain.options.jobs)
        self._chain.resume_from(place)
        if (state := _state_of(place)) is not None and state.exists():
            checkpoint |= read_newest(state, self._chain.options.jobs)
            self._states.resume_from(state)
        mark_restored(self._job(checkpoint))
        if map_location is None or isinstance(map_location, dict) or callable(map_location):
            return checkpoint
        moved: dict[str, Any] = on_device(checkpoint, map_location)
        return moved

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint; bases of others are kept until those are deleted.

        Raises:
            ConfigError: `keep` is set, which deletes checkpoints itself.
        """
        if self._chain.options.keep is not None:
            raise ConfigError(f"{path}: ModelCheckpoint and keep both delete; set its save_top_k=-1")
        self._chain.remove(_local(path))


_STATE_KEYS: Final = ("optimizer_states", "lr_schedulers")  # entries that only a resume needs


def _step_of(checkpoint: dict[str, Any]) -> int | None:
    step = checkpoint.get("global_step")
    return step if isinstance(step, int) else None


def _state_of(path: Path) -> Path | None:
    """Return the state file of a checkpoint, or None if it has none."""
    with contextlib.closing(open_checkpoint(path)) as opened:
        name = (opened.metadata or {}).get(STATE_KEY)
    return path.resolve().with_name(name) if name is not None and is_of_state(name) else None


def _monitors(checkpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the states of the ModelCheckpoint callbacks in a checkpoint."""
    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and "best_model_path" in state:
            yield state


def _local(path: PathLike) -> Path:
    if "://" in str(path):
        raise UnsupportedError(f"{path}: CkptzIO writes to local and mounted folders; sync them afterwards")
    return Path(path)


def load_from_checkpoint(
    module_class: Any, path: PathLike, map_location: Any | None = None, **kwargs: Any
) -> Any:
    """Load a module as `module_class.load_from_checkpoint(path)` does, from a file that `CkptzIO` wrote.

    Lightning reads the checkpoint from a torch file in memory, which needs twice its size. Checkpoints of
    Lightning itself are loaded too.

    Args:
        module_class: class of a `LightningModule` or `LightningDataModule`.
        path: the file.
        map_location: a device for the tensors; by default the CPU.
        kwargs: other arguments of `load_from_checkpoint`: `strict`, `hparams_file`, hyper-parameters.

    Returns:
        The module.

    Raises:
        FileNotFoundError: no such file.
        FormatError: it is damaged.
        MissingBaseError: a base is missing.

    Example:
        >>> from ckptz.integrations.lightning import load_from_checkpoint
        >>> model = load_from_checkpoint(MyModule, "last.ckpt", strict=False)  # doctest: +SKIP
    """
    if zipfile.is_zipfile(path):
        return module_class.load_from_checkpoint(path, map_location=map_location, **kwargs)
    file = io.BytesIO()
    torch.save(CkptzIO().load_checkpoint(path), file)
    file.seek(0)
    # This process made these bytes from plain values, so reading them runs no foreign code.
    kwargs["weights_only"] = False
    return module_class.load_from_checkpoint(file, map_location=map_location or "cpu", **kwargs)


class RequireCheckpointIO(Callback):  # type: ignore[misc]  # the same
    """Refuses strategies that do not use the plug-in, and compares a resumed run with its checkpoint.

    FSDP, ModelParallel and DeepSpeed write checkpoints of their own, which would silently not be compressed.
    After a resume, a warning names entries of the model, optimizers, schedulers and scaler that differ from
    the checkpoint: Lightning casts state to the dtype of the weights. It also names random states, which
    checkpoints of Lightning do not have.

    Example:
        >>> from ckptz.integrations.lightning import CkptzIO, RequireCheckpointIO
        >>> trainer = Trainer(plugins=[CkptzIO()], callbacks=[RequireCheckpointIO()])  # doctest: +SKIP
    """

    _loaded: tuple[str, Any] | None = None  # path and fingerprint of the checkpoint that is being restored

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the strategy; Lightning calls this before training.

        Raises:
            ConfigError: the strategy does not use the plug-in.
        """
        strategy = type(trainer.strategy)
        is_own = strategy.save_checkpoint is not Strategy.save_checkpoint
        if is_own and not issubclass(strategy, _CALL_THE_PLUGIN):
            raise ConfigError(
                f"{strategy.__name__} does not use CheckpointIO, so CkptzIO would never be called; save "
                "sharded state with ckptz.integrations.dcp, or choose another strategy such as DDP"
            )

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Record the content of a checkpoint; Lightning has loaded only the model at this point."""
        del pl_module
        self._loaded = str(trainer.ckpt_path), fingerprint(checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compare the restored state with the checkpoint; Lightning has restored all of it at this point."""
        del pl_module
        if self._loaded is None:
            return
        (path, saved), self._loaded = self._loaded, None
        strategy, precision = trainer.strategy, trainer.precision_plugin
        live = {
            "state_dict": strategy.lightning_module_state_dict(),
            "optimizer_states": [strategy.optimizer_state(one) for one in trainer.optimizers],
            "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            type(precision).__qualname__: precision.state_dict(),
        }
        live = {name: value for name, value in live.items() if name in saved}
        lines = differences({name: saved[name] for name in live}, fingerprint(live))
        warn_of_differences(Path(path), [*lines, NO_RANDOM_STATES])
