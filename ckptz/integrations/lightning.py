"""Lightning's checkpoints as `.ckptz` files.

    trainer = Trainer(plugins=[CkptzIO()])
    trainer = Trainer(plugins=[AsyncCheckpointIO(CkptzIO())])

Files keep the names that Lightning gives them, `*.ckpt`, and `Trainer(...).fit(ckpt_path=...)` resumes
from them. See docs/frameworks.md.
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceXLAStrategy, Strategy, XLAStrategy

from ckptz.api.read import PathLike
from ckptz.codec.effort import EffortName
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.guidance.trail import Momentum, Trail
from ckptz.integrations.linked import Chain, ChainOptions, job_of, read_newest
from ckptz.integrations.versions import warn_untested
from ckptz.state.torch import on_device
from ckptz.write.pipeline import Job, mark_restored

TESTED: Final = ((2, 6), (2, 6))  # first and last version that the tests ran with
warn_untested("lightning", lightning.__version__, TESTED)

__all__ = ["CkptzIO", "RequireCheckpointIO"]

# These call the plug-in like the others, around steps of their own.
_CALL_THE_PLUGIN: Final = (XLAStrategy, SingleDeviceXLAStrategy)


class CkptzIO(CheckpointIO):  # type: ignore[misc]  # lightning is not followed by mypy
    """Saves and loads Lightning's checkpoints, each stored against the one before.

    The files that a checkpoint needs have second names in its folder, `base-*.ckptz`, and are deleted
    with the last checkpoint that needs them: `save_top_k` and `save_last` work as ever. Without loss, all
    of a checkpoint comes back bit for bit. One process writes to a folder.

    Args:
        config: what files may lose; nothing by default.
        full_every: at least every so many saves a file needs no other; 1 to 64. More of them need no other
            where old files go so soon that less disk is taken without.
        exact: so many newest checkpoints come back bit for bit though `config` is lossy.
        effort: "fast", "default" or "small": how much time to spend on smaller files.
        jobs: threads, all cores by default.
        base: a checkpoint of Lightning's, written by this plug-in, that training began from; those that would
            need no other file are stored against it.

    Raises:
        ConfigError: an argument is out of range.

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
        effort: EffortName = "default",
        jobs: int | None = None,
        base: PathLike | None = None,
    ) -> None:
        options = ChainOptions(
            config=config, full_every=full_every, exact=exact, effort=effort, jobs=jobs, base=base
        )
        self._chain = Chain(options)
        self._trail = Trail() if config.loses_state else None
        self._torch = TorchCheckpointIO()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the checkpoint that was written last."""
        return tuple(self._chain.notes)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, which appears whole or not at all.

        Args:
            checkpoint: nested plain values and tensors.
            path: the file, on a local or mounted file system.
            storage_options: not used.

        Raises:
            TypeError: `storage_options` are given.
            UnsupportedError: a value that cannot be kept without running code; the message says which.
            WriteError: the disk is full or fails; what was there stays.
        """
        if storage_options is not None:
            raise TypeError("CkptzIO takes no storage_options; leave them out of Trainer.save_checkpoint")
        self._chain.write(_local(path), self._job(checkpoint))
        self._chain.settle()

    def _job(self, checkpoint: dict[str, Any]) -> Job:
        found = checkpoint.get("global_step")
        step = found if isinstance(found, int) else None
        momentum = None if self._trail is None else Momentum(self._trail, step)
        return replace(job_of(checkpoint, step), momentum=momentum)

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, every chunk of it held against its checksum.

        Args:
            path: the file; one that Lightning itself wrote earlier is read by Lightning.
            map_location: a device for the tensors; by default, and for a function or a dict, the CPU.
            weights_only: for files of Lightning itself; a `.ckptz` file never runs code.

        Raises:
            FileNotFoundError: no such file.
            FormatError: it is damaged.
            MissingBaseError: a file that it is stored against is missing.
        """
        place = _local(path)
        if zipfile.is_zipfile(place):
            loaded: dict[str, Any] = self._torch.load_checkpoint(
                path, map_location=map_location, weights_only=weights_only
            )
            return loaded
        checkpoint: dict[str, Any] = read_newest(place, self._chain.options.jobs)
        self._chain.go_on_from(place)
        mark_restored(self._job(checkpoint))
        if map_location is None or isinstance(map_location, dict) or callable(map_location):
            return checkpoint
        moved: dict[str, Any] = on_device(checkpoint, map_location)
        return moved

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint; what others are stored against stays until they go."""
        self._chain.remove(_local(path))


def _local(path: PathLike) -> Path:
    if "://" in str(path):
        raise UnsupportedError(f"{path}: CkptzIO writes to local and mounted folders; sync them afterwards")
    return Path(path)


class RequireCheckpointIO(Callback):  # type: ignore[misc]  # the same
    """Stops a run whose strategy writes checkpoints of its own and passes the plug-in by.

    Such are FSDP, ModelParallel and DeepSpeed: without this, their checkpoints are simply not compressed.

    Example:
        >>> from ckptz.integrations.lightning import CkptzIO, RequireCheckpointIO
        >>> trainer = Trainer(plugins=[CkptzIO()], callbacks=[RequireCheckpointIO()])  # doctest: +SKIP
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Look at the strategy before anything runs; Lightning calls this.

        Raises:
            ConfigError: it would pass the plug-in by.
        """
        kind = type(trainer.strategy)
        if kind.save_checkpoint is not Strategy.save_checkpoint and not issubclass(kind, _CALL_THE_PLUGIN):
            raise ConfigError(
                f"{kind.__name__} does not use CheckpointIO, so CkptzIO would never be called; save sharded "
                "state with ckptz.integrations.dcp, or choose another strategy such as DDP"
            )
