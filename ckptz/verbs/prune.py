"""`ckptz prune`: delete the checkpoints of a folder that no keep rule selects."""

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
    """Delete the steps of a run that no rule keeps, and unfinished files; bases of kept files stay.

    Args:
        folder: folder of a run, written by a `Checkpointer` (also behind an fsspec URL), the Trainer,
            accelerate, Lightning or `compress`. No other process may write to it meanwhile.
        keep: the rules. Rules for weights need optimizer states in separate files.
        after: first delete every step after this one, to continue training from it.
        dry_run: delete nothing; report what would be deleted.

    Returns:
        The deleted and the kept files, with their sizes in bytes.

    Raises:
        FileNotFoundError: no such folder.
        ConfigError: the folder has no steps, none would be left, the best steps are to be kept but no step
            records a metric, another process is writing to the folder, or the name of a step's folder
            contradicts the step in its files.

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
    location = folder_at(str(folder))
    local = Path(location.name) if isinstance(location, LocalFolder) else None
    if local is not None and not local.is_dir():
        local.stat()  # raises FileNotFoundError if nothing exists
        raise ConfigError(f"{folder}: is a file; name the folder of a run")
    if local is None or any(StepFile.parse(path.name) for path in local.iterdir()):
        return prune_folder(str(folder), keep, last_step=after, dry_run=dry_run)
    return prune_run(local, keep, last_step=after, dry_run=dry_run)
