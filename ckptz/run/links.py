"""Hard links to the bases of a delta in the folder of the delta, which makes the folder self-contained."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ckptz.errors import CkptzError, MissingBaseError
from ckptz.format.byte_source import open_bytes
from ckptz.format.envelope import read_envelope
from ckptz.format.index import KEY_DIGEST
from ckptz.format.reader import Container
from ckptz.format.suffixes import SUFFIX
from ckptz.run.names import is_base_name
from ckptz.store.resolve import Checkpoint, base_file_name, open_checkpoint

BASE_PREFIX: Final = "base-"  # prefix of the names of links to bases
N_DIGITS: Final = 16  # digits of the index's digest in such a name
N_TOLD: Final = 8  # digits of the content id in the name of a link to pretrained weights


class Origin:
    """The file of pretrained weights, which may be the base of files that would be full files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content_id: str | None = None

    def open_in(self, folder: Path, stack: contextlib.ExitStack) -> Checkpoint:
        """Link the file into a folder, under a name with its content id; open the link, which `stack` closes.

        Raises:
            ConfigError: a delta cannot record the name.
            MissingBaseError: the file system has no links.
        """
        if self._content_id is None:
            with contextlib.closing(open_checkpoint(self.path)) as opened:
                self._content_id = opened.content_id()  # of a plain file it is computed from all tensors
        name = f"{BASE_PREFIX}{self._content_id[:N_TOLD]}-{self.path.name}"
        linked = folder / base_file_name(Path(name))
        try:
            if linked.is_symlink() and not linked.exists():  # dangling
                linked.unlink(missing_ok=True)
            if not linked.exists():
                try:
                    os.link(self.path.resolve(), linked)
                except OSError:
                    linked.symlink_to(self.path.resolve())
        except OSError as error:
            raise MissingBaseError(f"{self.path}: cannot be linked into {folder}: {error}") from error
        return stack.enter_context(contextlib.closing(open_checkpoint(linked)))


def index_digest(path: Path) -> str:
    """Return the digest of a file's index, which differs for equal values in other codes."""
    with contextlib.closing(open_bytes(path)) as source:
        digest = (read_envelope(source).metadata or {}).get(KEY_DIGEST) or secrets.token_hex(N_DIGITS)
    return digest[:N_DIGITS]


def second_names(files: Iterable[Path]) -> set[Path]:
    """Return those of some files that are only links to bases, made by `link_chain`."""
    bases = set[Path]()
    for path in filter(is_base_name, files):
        bases.add(path)
        with contextlib.suppress(CkptzError, OSError), contextlib.closing(open_checkpoint(path)) as opened:
            bases.update(opened.paths)
    return bases


def link_chain(base: Checkpoint, folder: Path) -> tuple[str, ...]:
    """Hard-link every file of an open chain into a folder.

    Returns:
        The names of the links, nearest first; empty if the file system cannot link them.

    Raises:
        OSError: a file of the chain has been deleted.
    """
    digest = index_digest(Path(base.files[0].name))
    refs = [file.index.base for file in base.files if isinstance(file, Container)]
    names = (f"{BASE_PREFIX}{digest}{SUFFIX}", *(ref.file for ref in refs if ref is not None))
    for file, name in zip(base.files, names, strict=True):
        try:
            os.link(Path(file.name).resolve(), folder / name)  # the target of a symbolic link
        except FileExistsError:
            if not (name.startswith(BASE_PREFIX) or (folder / name).samefile(file.name)):
                return ()
        except OSError:
            return ()
    return names
