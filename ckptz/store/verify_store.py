"""What is wrong with a folder of steps beyond its single files: those that do not match, and leftovers."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckptz.errors import CkptzError, ConfigError, CorruptionError
from ckptz.store.resolve import SUFFIX
from ckptz.store.step_files import StepFile
from ckptz.store.steps import StepStore


def checkpoint_files(folder: Path) -> list[Path]:
    """List every `.ckptz` file of a folder by name, bases that are kept for others included.

    What a killed writer left is not among them.

    Raises:
        ConfigError: there is none.
    """
    left = leftovers(folder)
    names = sorted(e.name for e in folder.iterdir() if e.name.endswith(SUFFIX) and e.name not in left)
    if not names:
        raise ConfigError(
            f"{folder}: holds no {SUFFIX} files; name a folder of checkpoints, or write checksums of other "
            "files with ckptz seal while they are whole"
        )
    return [folder / name for name in names]


def mismatched_pairs(folder: Path) -> list[tuple[Path, CorruptionError]]:
    """Find files of a Checkpointer's store that do not belong to the others of their step, with errors.

    These are states of other weights, and residuals of other lossy files. A folder of anything else has none.
    What cannot be read is for `verify_file` to complain of.
    """
    found = []
    with contextlib.closing(StepStore(str(folder))) as store:
        sizes = store.listing().sizes
        for file, n_bytes in sorted(sizes.items()):
            of = StepFile(file.step, file.kind if file.is_exact else "weights")
            with contextlib.suppress(CkptzError, OSError, KeyError):  # what it belongs to may be gone
                facts, wanted = store.facts(file, n_bytes), store.facts(of, sizes[of]).content_id
                if (facts.exact_of if file.is_exact else facts.weights) not in (None, wanted):
                    path, remedy = folder / file.name, "resume from another step"
                    remedy = "delete it, and the step restores with loss" if file.is_exact else remedy
                    what = "values" if file.is_exact else "weights"
                    error = CorruptionError(f"{path}: belongs to other {what} than {of.name} holds; {remedy}")
                    found.append((path, error))
    return found


def leftovers(folder: Path) -> tuple[str, ...]:
    """Name the files that a killed writer left; the next writer and `ckptz prune` remove them."""
    with contextlib.closing(StepStore(str(folder))) as store:
        return store.listing().leftovers
