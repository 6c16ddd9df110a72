"""A store: the folder of a training run. Each step is two files that describe themselves.

    step-00000100.ckptz              the weights of step 100
    step-00000100.state.ckptz        what resuming needs beside them: optimizer, random numbers, extras
    step-00000100.exact.ckptz        a residual: the same weights without loss, where the file loses something
    step-00000100.state.exact.ckptz  the same of the state
    step-00000100.ckptz.unreadable-1 a file that could not be read when its step was saved again
    .step-00000100.ckptz.hidden      an empty file: that file is there only as a base of others
    base-4f1c0a9b-model.safetensors  a second name of the weights that the run began from, if it was told them
    .ckptz-lock                      see lock.py

Weights and state are chains of their own, so that a prune can drop the state of a step and keep its
weights without rewriting a byte. Nothing is stored against a residual, so one may go at any time. A step
exists when its weights do: they get their name last. Files never change, and none that can be read changes
its name, so anyone may read while one process writes. Knows no torch.
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
from typing import BinaryIO, Final

from ckptz.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    TruncatedError,
    WriteError,
)
from ckptz.format.caches import LastChunks
from ckptz.format.publish import (
    TEMPORARY_SUFFIX,
    Publication,
    abandoned,
    make_folder,
    publish_together,
)
from ckptz.format.written import Written
from ckptz.run.chain import N_REMEMBERED, base_of_next, files_of_kind
from ckptz.run.links import Origin
from ckptz.run.step_files import (
    ABANDONED_SECONDS,
    EXACT_OF_KEY,
    KINDS,
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

UNREADABLE: Final = ".unreadable-"  # behind the name of a file that was set aside, before a number
MOVED: Final = (
    "the folder was renamed or removed since the step before, so this one begins another of the old name: "
    "move the files together, or go on in the renamed one",
)


class StepStore:
    """A folder of steps, on this machine or behind an fsspec URL.

    Args:
        folder_or_url: need not exist; a writer makes it.
        origin: the file of weights that training began from, if there is one; full files of weights become
            deltas against it.
        last: where to hold what the file before restores to, for chains in which each file is stored against
            that; None to decode it anew.
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
            kind: deque(maxlen=N_REMEMBERED) for kind in KINDS
        }
        self._lock: Lock | None = None
        self._inode: tuple[int, int] | None = None  # of the folder, when it was locked
        self._moved: tuple[str, ...] = ()
        self._spool: Spool | None = None

    # --- what is there --------------------------------------------------------------------------

    def listing(self) -> Listing:
        """List what is in the folder now."""
        listing = Listing.of(self._place.sizes())
        return listing if self._folder is not None else self._less_cut_off(listing)

    def _less_cut_off(self, listing: Listing) -> Listing:
        """The listing with an upload that was cut off among the leftovers, where the store shows such.

        It is certainly shorter than it says: what cannot be read now may be whole.
        """
        newest = max((file.step for file in listing.sizes), default=None)
        lossy = {f: n for f, n in listing.sizes.items() if f.step == newest and not f.is_exact}
        cut = {file for file, result in self.read_facts(lossy).items() if isinstance(result, TruncatedError)}
        cut |= {file.exact for file in cut} & set(listing.sizes)
        whole = listing.without(cut)
        return replace(whole, leftovers=(*whole.leftovers, *(file.name for file in sorted(cut))))

    def facts(self, file: StepFile, n_bytes: int) -> FileFacts:
        """Read the index of a file, of `n_bytes` as listed, for its facts.

        Raises:
            FormatError: it is damaged.
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
        """Read the facts of files, of sizes as listed, or why they cannot be read."""
        results: dict[StepFile, FileFacts | Exception] = {}
        for file, n_bytes in sizes.items():
            try:
                results[file] = self.facts(file, n_bytes)
            except Exception as error:  # stores behind URLs have errors of their own
                results[file] = error
        return results

    # --- reading --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, file: StepFile) -> Iterator[Checkpoint]:
        """Open a file with its chain; of a remote store it is brought here first.

        Raises:
            FileNotFoundError: no such file.
            MissingBaseError: the chain is broken.
            FormatError: a file of it is damaged.
        """
        self._fetch(file)
        elsewhere = () if self._origin is None else (self._origin.path.parent,)
        with contextlib.closing(open_checkpoint(self.local_folder / file.name, elsewhere)) as checkpoint:
            yield checkpoint

    @property
    def local_folder(self) -> Path:
        """The folder of the files on this machine: the store itself, or for a remote store a spool."""
        if self._folder is not None:
            return self._folder
        if self._spool is None:
            self._spool = Spool()
        return self._spool.folder

    def _fetch(self, file: StepFile) -> None:
        if not isinstance(self._place, UploadFolder):
            return
        sizes = self.listing().sizes
        for member in self.chain(file, sizes):
            path = self.local_folder / member.name
            if not path.exists() or path.stat().st_size != sizes.get(member):
                self._place.download(member.name, path)

    def chain(self, file: StepFile, sizes: dict[StepFile, int]) -> list[StepFile]:
        """List a file and those that it needs, nearest first, up to a full file or to what is not listed.

        Raises:
            FormatError: one of them is damaged.
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
        """Make this the folder's one writer, and clean up after one that was killed.

        Raises:
            ConfigError: another process is.
            WriteError: this user may not write to the folder.
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
            with contextlib.suppress(OSError):  # a folder of that name, or of somebody who lets nobody else
                self._place.remove(name)

    def _abandoned(self) -> Iterator[str]:
        """Unfinished files of others, such as a rebase, to which nobody has written for long."""
        if self._folder is not None:
            yield from (path.name for path in abandoned(self._folder))
            for path in self._folder.glob(f".*{TEMPORARY_SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                    if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                        yield path.name

    def close(self) -> None:
        """Release the lock, so that others may write; nothing may be done with the store after this."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def check_new(self, step: int, unreadable: Collection[int] = ()) -> None:
        """Require that a step comes after all that are there, but for unreadable ones.

        Raises:
            ConfigError: it does not.
        """
        newest = max((one for one in self.listing().weights_steps if one not in unreadable), default=-1)
        if step <= newest:
            raise ConfigError(
                f"{self.name}: step {step} is not after {newest}, the newest that is there; to go on from an "
                "earlier step, first remove the later ones with discard_after or ckptz prune --after"
            )

    def set_aside(self, step: int) -> tuple[str, ...]:
        """Rename the files of an unreadable step, so that it can be written again; return their new names.

        They may become readable later, as after a repair of the disk, so none is deleted. No other file needs
        them: all later steps are unreadable, too.

        Raises:
            OSError: the disk is full or fails; the step is there as before.
        """
        self.check_lock()
        names, files = self._place.sizes(), [file for file in self.listing().sizes if file.step == step]
        for n in itertools.count(1):
            aside = {file: f"{file.name}{UNREADABLE}{n}" for file in files}
            if names.keys().isdisjoint(aside.values()):
                break
        for file, name in aside.items():
            self._place.copy(file.name, name)
        # Weights first: without them the step is not there, and the next writer removes the others.
        for file in sorted(files, key=lambda file: (file.kind != "weights", file.is_exact)):
            self.remove(file)
        return tuple(aside.values())

    @contextlib.contextmanager
    def publishing(self, step: int, notes: list[str]) -> Iterator[Publication]:
        """Open a group for the files of a step, in `local_folder`: all get their names, or none does.

        Args:
            step: after all that are there.
            notes: are told what the user should know.

        Raises:
            WriteError: another writer took the folder meanwhile; all that was there stays.
        """
        notes += self._moved
        self._moved = ()
        for file in (StepFile(step, kind) for kind in KINDS):
            self._place.remove(file.marker)  # of a removal that was cut off, it would hide the new step
            for one in (file, file.exact):
                self._facts.pop(one, None)
        with publish_together(OWNER) as files:
            yield files
            self.check_lock()

    def write_against_base(
        self,
        kind: FileKind,
        sink: BinaryIO,
        write: Callable[[Checkpoint | None, int], Written],
        rule: ChainRule,
        notes: list[str],
    ) -> Written:
        """Write a file of a kind against its base at a position behind a full file, or as a full file.

        Args:
            kind: of the file.
            sink: the file; emptied before each try.
            write: writes it, given the base and the position, or None and 0.
            rule: chooses the base.
            notes: are told why there is a full file in place of a delta.
        """

        def attempt(opened: tuple[Checkpoint, int] | None) -> Written:
            sink.seek(0)
            sink.truncate()
            base, position = (None, 0) if opened is None else opened
            written = write(base, position)
            for path in () if base is None else base.paths:
                path.stat()  # others may have deleted it meanwhile
            if position and base is not None and base.container is not None:
                position -= FileFacts.of(base.container).position
            self._written[kind].append((position, written.stored_bytes))
            return written

        find = functools.partial(self.open_base, kind, rule)
        return write_against(find, attempt, notes, f"{kind}: {UNREAD}")

    def open_base(
        self, kind: FileKind, rule: ChainRule, held: contextlib.ExitStack
    ) -> tuple[Checkpoint, int] | None:
        """Open what the next file of a kind is stored against, to be closed with `held`; give its position.

        Returns:
            None for a full file; position 0 behind what training began from.

        Raises:
            CkptzError, OSError: it cannot be read; what stores behind URLs raise.
        """
        base_file, position = self._base_file(kind, rule)
        if base_file is not None:
            base = held.enter_context(self.opened(base_file))
            base.share_decoded(self.last)
            return base, position
        if self._origin is not None and kind == "weights":
            origin = self._origin.open_in(self.local_folder)
            return held.enter_context(contextlib.closing(origin)), 0
        return None

    def next_is_full(self, kind: FileKind, rule: ChainRule) -> bool:
        """Return whether the next file of a kind will certainly be a full file."""
        if self._origin is not None and kind == "weights":
            return False
        try:
            return self._base_file(kind, rule)[0] is None
        except Exception:  # stores behind URLs have errors of their own; `base` tells of them
            return False

    def _base_file(self, kind: FileKind, rule: ChainRule) -> tuple[StepFile | None, int]:
        listing = self.listing()
        steps = listing.steps_of(kind)
        if not steps:
            return None, 0
        newest = StepFile(steps[-1], kind)
        plain = self.facts(newest, listing.sizes[newest]).tensor_bytes
        kept = Kept() if rule.kept is None else rule.kept[kind]
        facts = {f: fact for f, fact in self.read_facts(listing.sizes).items() if isinstance(fact, FileFacts)}
        files = files_of_kind(kind, kept, listing, facts)
        rest = sum(n for file, n in listing.sizes.items() if file.kind == kind and file.is_exact)
        sizes = self._written[kind], plain, rest
        base = base_of_next(files, rule, None if rule.kept is None else kept, steps, sizes)
        return base, 0 if base is None else files[newest].position + 1

    def upload(self, *files: StepFile) -> None:
        """Upload published files to a remote store, and keep only the next base here."""
        if not isinstance(self._place, UploadFolder) or self._spool is None:
            return
        try:
            for file in files:
                self._place.upload(self._spool.folder / file.name, file.name)
        except BaseException:
            for file in files:
                (self._spool.folder / file.name).unlink(missing_ok=True)
            raise
        with contextlib.suppress(Exception):  # the step is there; these copies only save downloads
            sizes = self.listing().sizes
            chains = [self.chain(file, sizes) for file in files if not file.is_exact]
            self._spool.keep_only(frozenset(member.name for chain in chains for member in chain))

    # --- tools of a prune ----------------------------------------------------------------------

    def check_lock(self) -> None:
        """Require to be the folder's one writer.

        Raises:
            WriteError: another one took it, or the store is closed.
        """
        if self._lock is None:
            raise WriteError(errno.EBUSY, f"{self.name}: is closed; another may write here now")
        self._lock.check()

    def hide(self, file: StepFile) -> None:
        """Take a file from users and keep it as a base."""
        with self._place.publish(file.marker):
            pass

    def remove(self, file: StepFile) -> None:
        """Delete a file, and then its marker."""
        self._place.remove(file.name)
        self._place.remove(file.marker)
        self._facts.pop(file, None)


def mismatched_pairs(folder: Path) -> list[tuple[Path, CorruptionError]]:
    """Find files of a Checkpointer's store that do not belong to the others of their step, with errors.

    These are states of other weights, and residuals of other lossy files. A folder of anything else has none.
    What cannot be read is for `verify_file` to complain of.
    """
    mismatches = []
    with contextlib.closing(StepStore(str(folder))) as store:
        read = store.read_facts(store.listing().sizes)
    known = {file: facts for file, facts in sorted(read.items()) if isinstance(facts, FileFacts)}
    for file, facts in known.items():
        of = StepFile(file.step, file.kind if file.is_exact else "weights")
        said = facts.metadata.get(EXACT_OF_KEY if file.is_exact else WEIGHTS_KEY)
        if of in known and said not in (None, known[of].content_id):  # what it belongs to may be gone
            path, remedy = folder / file.name, "resume from another step"
            remedy = "delete it, and the step restores with loss" if file.is_exact else remedy
            what = "values" if file.is_exact else "weights"
            error = CorruptionError(f"{path}: belongs to other {what} than {of.name} holds; {remedy}")
            mismatches.append((path, error))
    return mismatches


def leftovers(folder: Path) -> tuple[str, ...]:
    """Name the files that a killed writer left; the next writer and `ckptz prune` remove them."""
    with contextlib.closing(StepStore(str(folder))) as store:
        return store.listing().leftovers
