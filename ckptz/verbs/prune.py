"""`ckptz prune`: removes the checkpoints of a folder that no rule keeps, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

from ckptz.errors import ConfigError, check_int
from ckptz.run.keep import KEEP_ALL, KeepPolicy
from ckptz.run.prune import PruneReport, prune_folder, prune_run
from ckptz.run.step_files import StepFile
from ckptz.store.resolve import Path_
from ckptz.store.storage import LocalFolder, folder_at


def prune(
    folder: Path_, keep: KeepPolicy = KEEP_ALL, *, after: int | None = None, dry_run: bool = False
) -> PruneReport:
    """Remove the steps of a run that no rule keeps, and unfinished files; bases of those that stay are left.

    Args:
        folder: a run of a `Checkpointer`, also behind an fsspec URL, of the Trainer, accelerate or Lightning,
            or what `compress` made of several files. Nobody writes to it meanwhile.
        keep: the rules. Those for weights alone need optimizer states in files of their own.
        after: remove every step after this one first, to go on from there.
        dry_run: only say what would be done.

    Raises:
        FileNotFoundError: no such folder.
        ConfigError: there are no steps, none would be left, the best are asked for and no step records a
            metric, somebody writes to the folder, or the name of a step's folder and its files disagree about
            the step.

    Example:
        >>> import numpy as np, ckptz
        >>> from ckptz.numpy import save_file
        >>> for step in (1, 2, 3):
        ...     save_file({"weight": np.ones(2)}, f"step-{step}.ckptz")
        >>> ckptz.prune(".", ckptz.KeepPolicy(last=2)).removed
        ('step-1.ckptz',)
    """
    if not isinstance(keep, KeepPolicy):
        raise ConfigError(f"keep must be a ckptz.KeepPolicy, got {keep!r}")
    after = None if after is None else check_int("after", after)
    place = folder_at(str(folder))
    local = Path(place.name) if isinstance(place, LocalFolder) else None
    if local is not None and not local.is_dir():
        local.stat()  # says so where nothing is there
        raise ConfigError(f"{folder}: is a file; prune takes the folder of a run")
    if local is None or any(StepFile.parse(path.name) for path in local.iterdir()):
        return prune_folder(str(folder), keep, after=after, dry_run=dry_run)
    return prune_run(local, keep, after=after, dry_run=dry_run)
