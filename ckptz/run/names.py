"""Names and paths of checkpoints in a run folder of any writer: compress, frameworks or a Checkpointer.

run/step-100.ckptz                       a file of `ckptz compress` or a Checkpointer
run/epoch=0-step=100.ckpt                a file of Lightning
run/checkpoint-100/model.ckptz           a folder of the Trainer, or a compressed folder
run/epoch=0-step=100.state-9be27a01c35d8f64.ckptz  optimizer state of Lightning, if weights are kept longer
run/base-4f1c0a9b7d2e6853.ckptz          a hard link to the base of other files
run/base-4f1c0a9b-model.safetensors      a link to the pretrained weights
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptz.errors import CkptzError, ConfigError
from ckptz.format.byte_source import is_folder, is_url, path_of
from ckptz.format.envelope import HEAD_BYTES, is_head
from ckptz.format.reader import Container
from ckptz.format.suffixes import LIGHTNING_SUFFIX, SUFFIX
from ckptz.run.step_files import INDEX_FILE, RESIDUAL_PATTERN, StepFile, is_residual_name
from ckptz.store.resolve import open_file

Inode = tuple[int | str, int]
STEP_KEYS: Final = ("step", "global_step")  # of the step in metadata of compressed files
_STEP: Final = r"(?:global_?)?(?:step|checkpoint|iter|iteration)[-_=]?(\d{1,18})"
_IN_NAME: Final = re.compile(rf"(?<![a-z]){_STEP}(?!\d)", re.IGNORECASE)
_FOLDER: Final = re.compile(_STEP, re.IGNORECASE)
_BASE: Final = re.compile(r"base-([0-9a-f]{16}\.ckptz|[0-9a-f]{8}-.+)", re.DOTALL)
_AT_STEP: Final = re.compile(r"(.+)@(\d{1,18})", re.DOTALL)
_WITHOUT_WEIGHTS: Final = re.compile(r"(state|optimizer|scheduler|rng)\b.*|.+\.state-[0-9a-f]{16}\.ckptz")
# Files of the Trainer, accelerate and Lightning that only a resume needs; registered objects may be weights.
_OF_STATE: Final = re.compile(
    r"(state|optimizer|scheduler|sampler|scaler|rng|rng_state|random_states)([-_]\d+)?"
    rf"({RESIDUAL_PATTERN})?\.(ckptz|pt|pth|bin|pkl)"
    r"|.+\.state-[0-9a-f]{16}\.ckptz"
)


def step_of(path: Path, recorded: int | None = None, metadata: Mapping[str, str] | None = None) -> int | None:
    """Return the step of a checkpoint: recorded, in its metadata, its name or its folder's name; or None."""
    if recorded is not None:
        return recorded
    for text in ((metadata or {}).get(key, "") for key in STEP_KEYS):
        if text.isascii() and text.isdigit() and len(text) <= 18:
            return int(text)
    whole = path if is_url(path) else Path(os.path.abspath(path))
    numbers = _IN_NAME.findall(whole.name)
    return int(numbers[-1]) if numbers else step_of_folder(whole.parent)


def step_of_folder(folder: Path) -> int | None:
    """Return the step in the name of a folder; None for another name."""
    match = _FOLDER.fullmatch(folder.name)
    return None if match is None else int(match[1])


def is_base_name(path: Path) -> bool:
    """Return whether a file name is that of a link to a base."""
    return _BASE.fullmatch(path.name) is not None


def run_files(folder: Path, *, with_links: bool = False) -> list[Path]:
    """List the checkpoint files of a folder, and of its subfolders that are named after a step.

    Each file is listed once; `with_links` lists it under each of its names.
    """
    entries = list(folder.iterdir())
    for sub in [path for path in entries if step_of_folder(path) is not None and path.is_dir()]:
        entries += sub.iterdir()
    by_file: dict[object, Path] = {}
    for path in sorted(entries, key=lambda path: (is_base_name(path), path)):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if _is_checkpoint(path):
                by_file.setdefault(path if with_links else inode_of(path), path)
    return sorted(by_file.values())


def inode_of(path: Path) -> Inode:
    """Return the inode of a file, which all its names share."""
    if is_url(path):
        return str(path), 0
    facts = path.stat()
    return facts.st_dev, facts.st_ino


def _is_checkpoint(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_file():
        return False
    if path.suffix != LIGHTNING_SUFFIX:
        return path.suffix == SUFFIX
    with path.open("rb") as file:
        return is_head(file.read(HEAD_BYTES))


def newest_checkpoint(folder: Path, step: int | None = None) -> Path | None:
    """Return the file with the weights of the newest step of a folder, or of `step`; None if there is none.

    A full file is preferred to a delta of the same step. Unreadable files are ignored.
    """
    candidates = []
    for path in run_files(folder):
        with (
            contextlib.suppress(CkptzError, OSError),
            contextlib.closing(open_file(path)) as file,
        ):
            if isinstance(file, Container):
                index = file.index
                at = step_of(path, index.step, index.metadata)
                if step is None or at == step:
                    candidates.append((at is None, -(at or 0), is_auxiliary(path), index.depth, path))
    return min(candidates)[-1] if candidates else None


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint that a user has named.

    Attributes:
        path: the argument: a file, a folder, or "DIR@STEP".
        shards: the folder of a step that several ranks wrote, or None.
        weights: the weights file of the step, if the argument is "DIR@STEP", else None.
    """

    path: Path
    shards: Path | None = None
    weights: Path | None = None

    @property
    def is_folder(self) -> bool:
        """True for a folder, except for that of a step that several ranks wrote."""
        return self.shards is None and is_folder(self.path)

    def newest_file(self) -> Path:
        """Return the file itself, the weights of the step, or the newest checkpoint of the folder.

        Raises:
            ConfigError: the folder holds no checkpoint, or several ranks wrote the step.
        """
        if self.weights is not None:
            return self.weights
        if not is_folder(self.path):
            if (step := self.shards) is not None:
                files = ", ".join(sorted(p.name for p in step.glob(f"*{SUFFIX}") if not is_auxiliary(p)))
                what = f"several ranks wrote this step; name one of its files in {step}: {files}"
                raise ConfigError(f"{self.path}: {what}")
            return self.path
        if (newest := newest_checkpoint(self.path)) is None:
            what = f"holds no {SUFFIX} file that can be read; name a file, or another folder"
            raise ConfigError(f"{self.path}: {what}")
        return newest


def resolve(argument: str | os.PathLike[str]) -> Located:
    """Resolve an argument: "DIR@STEP" to a step of a run, any other path to itself.

    Raises:
        FileNotFoundError: the folder has no such step.
    """
    path = path_of(argument)
    match = _AT_STEP.fullmatch(str(path))
    if match is None or path.exists() or not is_folder(folder := path_of(match[1])):
        is_shards = not is_url(path) and (path / INDEX_FILE).is_file()
        return Located(path, shards=path if is_shards else None)
    step = int(match[2])
    for sub in () if is_url(folder) else folder.iterdir():
        if step_of_folder(sub) == step and (sub / INDEX_FILE).is_file():
            return Located(path, shards=sub)
    if (weights := newest_checkpoint(folder, step)) is None:
        raise FileNotFoundError(f"{folder}: has no {SUFFIX} file of step {step}; ckptz log lists the steps")
    return Located(path, weights=weights)


def holds_state(path: Path) -> bool:
    """Return whether a file, by its name, holds state for a resume but no weights."""
    file = StepFile.parse(path.name)
    return _WITHOUT_WEIGHTS.fullmatch(path.name) is not None if file is None else file.kind == "state"


def is_of_state(name: str) -> bool:
    """Return whether a file of a framework's checkpoint, by its name, is needed only for a resume."""
    return _OF_STATE.fullmatch(name) is not None


def is_auxiliary(path: Path) -> bool:
    """Return whether a file, by its name, has no weights or is only a base or a residual."""
    file = StepFile.parse(path.name)
    is_residual = is_residual_name(path.name) if file is None else file.is_residual
    return is_residual or is_base_name(path) or holds_state(path)
