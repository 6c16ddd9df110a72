"""Second names, hard links, of the files that a delta needs, in the delta's own folder.

So a folder is complete by itself, and its bases take no room twice.
"""

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
from ckptz.run.names import is_base_name
from ckptz.store.resolve import SUFFIX, Checkpoint, base_file_name, open_checkpoint

BASE_PREFIX: Final = "base-"  # begins the second names of bases
N_DIGITS: Final = 16  # of the index's digest, in such a name
N_TOLD: Final = 8  # of a content id, where the name of the file stands beside


class Origin:
    """The file of weights that training began from: what would be full files may be stored against it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content_id: str | None = None

    def open_in(self, folder: Path) -> Checkpoint:
        """Open the file by a second name in a folder, which no other weights have.

        Raises:
            ConfigError: no reader would accept the name.
            MissingBaseError: the file system cannot do that.
        """
        if self._content_id is None:
            with contextlib.closing(open_checkpoint(self.path)) as opened:
                self._content_id = opened.content_id()  # a plain file is read whole for it
        name = f"{BASE_PREFIX}{self._content_id[:N_TOLD]}-{self.path.name}"
        linked = folder / base_file_name(Path(name))
        try:
            if linked.is_symlink() and not linked.exists():  # it leads nowhere
                linked.unlink(missing_ok=True)
            if not linked.exists():
                try:
                    os.link(self.path.resolve(), linked)
                except OSError:
                    linked.symlink_to(self.path.resolve())
        except OSError as error:
            raise MissingBaseError(f"{self.path}: cannot be linked into {folder}: {error}") from error
        return open_checkpoint(linked)


def digest_of(path: Path) -> str:
    """Return a digest of the file's bytes: other files may have the same values in other codes."""
    with contextlib.closing(open_bytes(path)) as source:
        digest = (read_envelope(source).metadata or {}).get(KEY_DIGEST) or secrets.token_hex(N_DIGITS)
    return digest[:N_DIGITS]


def second_names(files: Iterable[Path]) -> set[Path]:
    """List those of some files that are in their folders only as bases of others, made by `link_chain`."""
    bases = set[Path]()
    for path in filter(is_base_name, files):
        bases.add(path)
        with contextlib.suppress(CkptzError, OSError), contextlib.closing(open_checkpoint(path)) as opened:
            bases.update(opened.paths)
    return bases


def link_chain(base: Checkpoint, folder: Path) -> tuple[str, ...]:
    """Hard-link every file of an open chain into a folder.

    Returns:
        The names, nearest first; none if the file system does not do that.

    Raises:
        OSError: a file of the chain is not there any more.
    """
    digest = digest_of(Path(base.files[0].name))
    refs = [file.index.base for file in base.files if isinstance(file, Container)]
    names = (f"{BASE_PREFIX}{digest}{SUFFIX}", *(ref.file for ref in refs if ref is not None))
    for file, name in zip(base.files, names, strict=True):
        try:
            os.link(Path(file.name).resolve(), folder / name)  # of a symbolic link its target
        except FileExistsError:
            if not (name.startswith(BASE_PREFIX) or (folder / name).samefile(file.name)):
                return ()
        except OSError:
            return ()
    return names
