"""The folder of a Checkpointer (the store). Each step has two files, of weights and of all other state.

    step-00000100.ckptz              the weights of step 100
    step-00000100.state.ckptz        optimizer state, random number generators, extras
    step-00000100.exact-9be27a01c35d8f64.ckptz  residual of lossy weights; see residuals.py
    step-00000100.state.exact-1b2c01977f0a44de.ckptz  residual of lossy state
    step-00000100.ckptz.unreadable-1 a file that was unreadable when its step was saved again
    .step-00000100.ckptz.hidden      an empty marker: the file is kept only as the base of others
    base-4f1c0a9b-model.safetensors  a link to the pretrained weights of the run, if there are any
    .ckptz-lock                      lock of the writing process, see lock.py

Weights and state form separate chains, so that a prune can delete the state of a step and keep its weights
without rewriting a file. A residual is never a base, so it can be deleted at any time. A step exists when its
weights do, because they are published last. Files never change, and no readable file changes its name, so
other processes may read while one writes. Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from ckptz.errors import ConfigError, CorruptionError, FormatError, TruncatedError, WriteError
from ckptz.format.caches import LastChunks
from ckptz.format.publish import Publication, abandoned, make_folder, publish_together
from ckptz.format.suffixes import SUFFIX, TEMPORARY_SUFFIX
from ckptz.format.written import Written
from ckptz.run.chain import N_REMEMBERED, base_of_next, files_of_kind
from ckptz.run.links import BASE_PREFIX, Origin
from ckptz.run.step_files import (
    ABANDONED_SECONDS,
    EXACT_OF_KEY,
    FILE_KINDS,
    OWNER,
    WEIGHTS_KEY,
    ChainRule,
    FileFacts,
    FileKind,
    Kept,
    Listing,
    StepFile,
)
from ckptz.run.writer import UNREAD, write_against
from ckptz.store.lock import NOT_ALLOWED, Lock, Spool, acquire, not_writable
from ckptz.store.resolve import MAX_DEPTH, Checkpoint, Path_, open_checkpoint
from ckptz.store.storage import LocalFolder, UploadFolder, folder_at

UNREADABLE: Final = ".unreadable-"  # before the number in the new name of an unreadable file
MOVED: Final = (
    "the folder was renamed or removed since the step before, so this one begins another of the old name: "
    "move the files together, or go on in the renamed one",
)


class StepStore:
    """A folder of steps, on this machine or behind an fsspec URL.

    Args:
        folder_or_url: the folder, which a writer creates if it does not exist.
        origin: the file of pretrained weights, or None; full files of weights are stored as deltas to it.
        last: cache of the decoded chunks of the newest file, which the next delta needs; None to decode them
            again.
    """

    def __init__(
        self, folder_or_url: Path_, origin: Path | None = None, last: LastChunks | None = None
    ) -> None:
        self._origin, self.last = None if origin is None else Origin(origin), last
        self._place = folder_at(folder_or_url)
        self._folder = Path(self._place.name) if isinstance(self._place, LocalFolder) else None
        self.name = self._place.name
        self._facts: dict[StepFile, tuple[int, FileFacts]] = {}
        self._written: dict[FileKind, deque[tuple[int, int]]] = {
            kind: deque(maxlen=N_REMEMBERED) for kind in FILE_KINDS
        }
        self._lock: Lock | None = None
        self._inode: tuple[int, int] | None = None  # of the folder, when it was locked
        self._moved: tuple[str, ...] = ()
        self._spool: Spool | None = None

    # --- listing --------------------------------------------------------------------------------

    def listing(self) -> Listing:
        """List the files of the folder."""
        listing = Listing.of(self._place.sizes())
        if self._folder is not None:
            return listing
        # Some object stores show the files of an interrupted upload, which count as leftovers: only files
        # shorter than their headers say, as one that is unreadable now may be complete.
        newest = max((file.step for file in listing.sizes), default=None)
        lossy = {f: n for f, n in listing.sizes.items() if f.step == newest and not f.is_residual}
        cut = {file for file, result in self.read_facts(lossy).items() if isinstance(result, TruncatedError)}
        cut |= {file for file in listing.sizes if file.lossy in cut}
        whole = listing.without(cut)
        return replace(whole, leftovers=(*whole.leftovers, *(file.name for file in sorted(cut))))

    def facts(self, file: StepFile, n_bytes: int) -> FileFacts:
        """Return the facts that the index of a file records; `n_bytes` is its size in the listing.

        Raises:
            FormatError: the file is damaged.
        """
        known = self._facts.get(file)
        if known is not None and known[0] == n_bytes:
            return known[1]
        source = self._place.open_header(file.name, n_bytes)
        facts = FileFacts.read(source)
        if facts is None:
            raise FormatError(f"{source.name}: not a .ckptz file")
        if facts.step not in (file.step, None):
            raise CorruptionError(f"{source.name}: holds step {facts.step}; it was renamed")
        self._facts[file] = n_bytes, facts
        return facts

    def read_facts(self, sizes: Mapping[StepFile, int]) -> dict[StepFile, FileFacts | Exception]:
        """Return the facts of files, or the errors of reading them; `sizes` are those of the listing."""
        results: dict[StepFile, FileFacts | Exception] = {}
        for file, n_bytes in sizes.items():
            try:
                results[file] = self.facts(file, n_bytes)
            except Exception as error:  # stores behind URLs have errors of their own
                results[file] = error
        return results

    def other_facts(self) -> dict[str, FileFacts | Exception]:
        """Return the facts of files that are not of a step, which users may store against steps.

        Of a file that cannot be read now, the reason; a damaged one is of no use with its base either.
        """
        results = dict[str, FileFacts | Exception]()
        for name, n_bytes in self._place.sizes().items():
            is_other = name.endswith(SUFFIX) and not name.startswith((".", BASE_PREFIX))
            if is_other and StepFile.parse(name) is None:
                try:
                    if (facts := FileFacts.read(self._place.open_header(name, n_bytes))) is not None:
                        results[name] = facts
                except FormatError:
                    continue
                except Exception as error:  # stores behind URLs have errors of their own
                    results[name] = error
        return results

    # --- reading --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, file: StepFile) -> Iterator[Checkpoint]:
        """Open a file with its chain; files of a remote store are downloaded first.

        Raises:
            FileNotFoundError: no such file.
            MissingBaseError: a base is missing.
            FormatError: a file of the chain is damaged.
        """
        if isinstance(self._place, UploadFolder):
            sizes = self.listing().sizes
            for member in self.chain(file, sizes):
                path = self.local_folder / member.name
                if not path.exists() or path.stat().st_size != sizes.get(member):
                    self._place.download(member.name, path)
        elsewhere = () if self._origin is None else (self._origin.path.parent,)
        with contextlib.closing(open_checkpoint(self.local_folder / file.name, elsewhere)) as checkpoint:
            yield checkpoint

    @property
    def local_folder(self) -> Path:
        """The local folder of the files: the store itself, or the temporary folder of a remote store."""
        if self._folder is not None:
            return self._folder
        if self._spool is None:
            self._spool = Spool()
        return self._spool.folder

    def chain(self, file: StepFile, sizes: dict[StepFile, int]) -> list[StepFile]:
        """List a file and its bases, nearest first, up to a full file or to a base that is not in `sizes`.

        Raises:
            FormatError: a file is damaged.
        """
        members = [file]
        while (last := members[-1]) in sizes and len(members) <= MAX_DEPTH:
            base = self.facts(last, sizes[last]).base
            base_file = None if base is None else StepFile.parse(base.file)
            if base_file is None:
                break
            members.append(base_file)
        return members

    # --- writing --------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the folder for writing, and delete the unfinished files of a killed writer.

        Raises:
            ConfigError: another process holds the lock.
            WriteError: the user may not write to the folder.
            OSError: the disk fails.
        """
        if self._lock is not None:
            if not self._lock.is_lost:
                return
            self._lock.release()
            self._lock = None
        try:
            if self._folder is not None:
                make_folder(self._folder)
                folder_stat = self._folder.stat()
                if self._inode not in (None, (folder_stat.st_dev, folder_stat.st_ino)):
                    self._moved = MOVED
                self._inode = folder_stat.st_dev, folder_stat.st_ino
            self._lock = acquire(self._place, self._folder)
        except OSError as error:
            if error.errno not in NOT_ALLOWED or isinstance(error, WriteError):
                raise
            raise not_writable(str(error.filename or self.name), error) from error
        for name in (*self.listing().leftovers, *self._abandoned()):
            with contextlib.suppress(OSError):  # a folder of that name, or no permission
                self._place.remove(name)

    def _abandoned(self) -> Iterator[str]:
        """Yield unfinished files of other programs, such as a rebase, that have not changed for an hour."""
        if self._folder is not None:
            yield from (path.name for path in abandoned(self._folder))
            for path in self._folder.glob(f".*{TEMPORARY_SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                    if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                        yield path.name

    def close(self) -> None:
        """Release the lock and temporary files; the store must not be used after this."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def check_new(self, step: int, unreadable: Collection[int] = ()) -> None:
        """Check that a step is later than all steps of the folder, except for unreadable ones.

        Raises:
            ConfigError: it is not.
        """
        newest = max((one for one in self.listing().weights_steps if one not in unreadable), default=-1)
        if step <= newest:
            raise ConfigError(
                f"{self.name}: step {step} is not after {newest}, the newest that is there; to go on from an "
                "earlier step, first remove the later ones with discard_after or ckptz prune --after"
            )

    def set_aside(self, step: int) -> tuple[str, ...]:
        """Rename the files of an unreadable step, so that it can be saved again; return the new names.

        The files may become readable later, after a repair of the disk, so none is deleted. No readable file
        needs them, because all later steps are unreadable too.

        Raises:
            OSError: the disk is full or fails; the step is unchanged.
        """
        self.check_lock()
        names, files = self._place.sizes(), [file for file in self.listing().sizes if file.step == step]
        for n in itertools.count(1):
            aside = {file: f"{file.name}{UNREADABLE}{n}" for file in files}
            if names.keys().isdisjoint(aside.values()):
                break
        for file, name in aside.items():
            self._place.copy(file.name, name)
        # Weights first: without them the step does not exist, and the next writer deletes the rest.
        for file in sorted(files, key=lambda file: (file.kind != "weights", file.is_residual)):
            self.remove(file)
        return tuple(aside.values())

    @contextlib.contextmanager
    def publishing(self, step: int, notes: list[str]) -> Iterator[Publication]:
        """Publish the files of a step, written in `local_folder`, together or not at all.

        Args:
            step: a step later than all others.
            notes: list to which notes for the user are added.

        Raises:
            WriteError: another writer has locked the folder; nothing is published.
        """
        notes += self._moved
        self._moved = ()
        for kind in FILE_KINDS:  # markers of a removal that was cut off would hide the new step
            self._place.remove(StepFile(step, kind).marker)
        self._facts = {file: facts for file, facts in self._facts.items() if file.step != step}
        with publish_together(OWNER) as files:
            yield files
            self.check_lock()

    def write_against_base(
        self,
        kind: FileKind,
        write: Callable[[Checkpoint | None, int], Written],
        rule: ChainRule,
        notes: list[str],
    ) -> Written:
        """Write a file as a delta to the base that the rule chooses, or as a full file.

        Args:
            kind: kind of the file.
            write: writes the file, and replaces what an earlier attempt has written; called with its base and
                its position in the chain, or with None and 0.
            rule: chooses the base.
            notes: list to which the reason is added if a base cannot be read.
        """

        def attempt(opened: tuple[Checkpoint, int] | None) -> Written:
            base, position = (None, 0) if opened is None else opened
            written = write(base, position)
            for path in () if base is None else base.paths:
                path.stat()  # raises if somebody has deleted it meanwhile
            if position and base is not None and base.container is not None:
                position -= FileFacts.of(base.container).position
            self._written[kind].append((position, written.stored_bytes))
            return written

        find = functools.partial(self.open_base, kind, rule)
        return write_against(find, attempt, notes, f"{kind}: {UNREAD}")

    def open_base(
        self, kind: FileKind, rule: ChainRule, stack: contextlib.ExitStack
    ) -> tuple[Checkpoint, int] | None:
        """Open the base of the next file of a kind; `stack` closes it.

        Returns:
            The base and the position of the next file in its chain, 0 for a delta to the pretrained weights.
            None for a full file.

        Raises:
            Exception: the base cannot be read; stores behind URLs have errors of their own.
        """
        base_file, position = self._base_file(kind, rule)
        if base_file is not None:
            base = stack.enter_context(self.opened(base_file))
            base.share_decoded(self.last)
            return base, position
        if self._origin is not None and kind == "weights":
            return self._origin.open_in(self.local_folder, stack), 0
        return None

    def open_newest(self, kind: FileKind, stack: contextlib.ExitStack) -> Checkpoint | None:
        """Open the newest file of a kind, which `stack` closes; None if there is none.

        Raises:
            Exception: it cannot be read; stores behind URLs have errors of their own.
        """
        steps = self.listing().steps_of(kind)
        if not steps:
            return None
        newest = stack.enter_context(self.opened(StepFile(steps[-1], kind)))
        newest.share_decoded(self.last)
        return newest

    def next_is_full(self, rule: ChainRule) -> bool:
        """Return whether the next file of weights will certainly be a full file."""
        if self._origin is not None:
            return False
        try:
            return self._base_file("weights", rule)[0] is None
        except Exception:  # stores behind URLs have errors of their own; `open_base` reports them
            return False

    def _base_file(self, kind: FileKind, rule: ChainRule) -> tuple[StepFile | None, int]:
        listing = self.listing()
        steps = listing.steps_of(kind)
        if not steps:
            return None, 0
        newest = StepFile(steps[-1], kind)
        plain = self.facts(newest, listing.sizes[newest]).tensor_bytes
        kept = Kept() if rule.kept is None else rule.kept[kind]
        files = files_of_kind(kind, kept, listing, self.read_facts(listing.sizes))
        rest = sum(n for file, n in listing.sizes.items() if file.kind == kind and file.is_residual)
        sizes = self._written[kind], plain, rest
        base = base_of_next(files, rule, None if rule.kept is None else kept, steps, sizes)
        return base, 0 if base is None else files[newest].position + 1

    def upload(self, *files: StepFile) -> None:
        """Upload published files to a remote store, and keep local copies only of the next base."""
        if not isinstance(self._place, UploadFolder) or self._spool is None:
            return
        try:
            for file in files:
                self._place.upload(self._spool.folder / file.name, file.name)
        except BaseException:
            for file in files:
                (self._spool.folder / file.name).unlink(missing_ok=True)
            raise
        with contextlib.suppress(Exception):  # the step is complete; local copies only save downloads
            sizes = self.listing().sizes
            chains = [self.chain(file, sizes) for file in files if not file.is_residual]
            self._spool.keep_only(frozenset(member.name for chain in chains for member in chain))

    # --- tools of a prune ----------------------------------------------------------------------

    def check_lock(self) -> None:
        """Check that this process still holds the lock.

        Raises:
            WriteError: another process has taken the lock, or the store is closed.
        """
        if self._lock is None:
            raise WriteError(errno.EBUSY, f"{self.name}: is closed; another may write here now")
        self._lock.check()

    def hide(self, file: StepFile) -> None:
        """Mark a file as kept only as a base, which hides it from users."""
        with self._place.publish(file.marker):
            pass

    def remove(self, file: StepFile) -> None:
        """Delete a file, and then its marker."""
        self._place.remove(file.name)
        self._place.remove(file.marker)
        self._facts.pop(file, None)


def mismatched_pairs(folder: Path) -> list[tuple[Path, CorruptionError]]:
    """Return files of a Checkpointer that do not belong to the other files of their step, with errors.

    These are states of other weights, and residuals of other lossy files. Unreadable files are left out,
    because `verify` reports them.
    """
    mismatches = []
    with contextlib.closing(StepStore(str(folder))) as store:
        read = store.read_facts(store.listing().sizes)
    known = {file: facts for file, facts in sorted(read.items()) if isinstance(facts, FileFacts)}
    for file, facts in known.items():
        of = file.lossy if file.is_residual else StepFile(file.step, "weights")
        content_id = facts.metadata.get(EXACT_OF_KEY if file.is_residual else WEIGHTS_KEY)
        # The other file may have been deleted.
        if of in known and content_id not in (None, known[of].content_id):
            path, remedy = folder / file.name, "resume from another step"
            remedy = "delete it, and the step restores with loss" if file.is_residual else remedy
            what = "values" if file.is_residual else "weights"
            error = CorruptionError(f"{path}: belongs to other {what} than {of.name} holds; {remedy}")
            mismatches.append((path, error))
    return mismatches


def leftovers(folder: Path) -> tuple[str, ...]:
    """List the files that a killed writer left; the next writer and `ckptz prune` delete them."""
    with contextlib.closing(StepStore(str(folder))) as store:
        return store.listing().leftovers
