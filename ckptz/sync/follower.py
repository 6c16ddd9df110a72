"""The inference engine's side of weight sync."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptz.api.apply import CHECKS, Check, LiveTensor, Patched, State, live_tensors, patch
from ckptz.errors import CkptzError, ConfigError, CorruptionError, FormatError, MissingBaseError
from ckptz.format.index import content_id_of
from ckptz.format.reader import Container
from ckptz.parallel import Workers, jobs_of
from ckptz.run.step_files import checked_step
from ckptz.run.versions import Version, full_files_of, newest_step, route, versions_in
from ckptz.store.resolve import open_file
from ckptz.store.storage import folder_at

ATTEMPTS: Final = 5  # a file that the publisher retires while we choose our way; each time it is newer

Live = Mapping[str, LiveTensor]


@dataclass(frozen=True, slots=True)
class Update:
    """Step and counts of one call of a `Follower`.

    Attributes:
        step: the step that the tensors hold now.
        previous: the step that they held before, or None if that was not known.
        files: what was applied, in order; empty if there was nothing new.
        n_bytes: their sizes together.
        n_written: patterns written to tensors.
        seconds: time taken.
    """

    step: int
    previous: int | None
    files: tuple[str, ...]
    n_bytes: int
    n_written: int
    seconds: float


class Follower:
    """Brings tensors to what a `Publisher` published last, in place.

    Any number may follow one folder; none of them writes to it. A follower that missed steps catches up
    over the deltas or from a full file, whichever are fewer bytes. A new one finds out which step the
    tensors hold, or else starts from a full file.

    Args:
        folder_or_url: what the publisher was given.
        check: "base" holds all tensors against checksums at every update; "stored" trusts that nobody
            else wrote to them since, and reads and writes only what changes.
        jobs: threads, all cores by default.

    Attributes:
        step: the step that the tensors hold, or None if it is not known.

    Example:
        >>> import torch
        >>> from ckptz.sync import Follower, Publisher
        >>> published = Publisher("weights").publish({"weight": torch.ones(2)}, step=1)
        >>> follower, live = Follower("weights"), {"weight": torch.zeros(2)}
        >>> follower.poll(), follower.apply_to(live).step, follower.poll()
        (1, 1, None)
        >>> live
        {'weight': tensor([1., 1.])}
    """

    def __init__(
        self, folder_or_url: str | os.PathLike[str], *, check: Check = "base", jobs: int | None = None
    ) -> None:
        if check not in CHECKS:
            raise ConfigError(f"check must be one of {CHECKS}, got {check!r}")
        self._place = folder_at(folder_or_url)
        self._check: Check = check
        self._jobs = jobs_of(jobs)
        self.step: int | None = None
        self._content_id: str | None = None

    def poll(self) -> int | None:
        """Return the newest published step if it is newer than the tensors; else None."""
        newest = newest_step(versions_in(self._place.sizes()))
        return newest if newest is not None and (self.step is None or newest > self.step) else None

    def reset(self) -> None:
        """Forget what the tensors hold, after something else wrote to them: `apply_to` looks afresh."""
        self.step = self._content_id = None

    def apply_to(self, state_dict: State, step: int | None = None) -> Update:
        """Update tensors to the newest step, or to `step`.

        Each file is applied whole or not at all. After an error the tensors hold the step that `step`
        says, the one before or one on the way; where writing was interrupted, `step` is None and the next
        call compares the tensors with the published checksums.

        Args:
            state_dict: tensors by name, on any device, always the same ones; others in it are left alone.
            step: where to go; by default, to the newest.

        Raises:
            MissingBaseError: nothing is published, a file on the way is missing, or the tensors were
                changed by somebody else (then `reset`).
            ConfigError: the tensors are not those of the published model.
            FormatError: a file is damaged.
        """
        start, live = time.perf_counter(), live_tensors(state_dict)
        if self.step is None:
            self._recognise(live)
        previous, applied, n_written = self.step, list[Version](), 0
        for version, patched in self._patches(live, step):
            applied.append(version)
            n_written += patched.n_written
        if self.step is None:
            raise MissingBaseError(
                f"{self._place.name}: nothing is published here yet; wait, or check the path"
            )
        return Update(
            step=self.step,
            previous=previous,
            files=tuple(version.name for version in applied),
            n_bytes=sum(version.n_bytes for version in applied),
            n_written=n_written,
            seconds=time.perf_counter() - start,
        )

    def _patches(self, live: Live, wanted: int | None) -> Iterator[tuple[Version, Patched]]:
        """Apply one file after another until the step is reached; the way is found anew if one is gone."""
        n_left = ATTEMPTS
        while True:
            try:
                for version in self._route(wanted):
                    yield version, self._apply(version, live)
                return
            except FileNotFoundError:
                n_left -= 1
                if not n_left:
                    raise

    def _route(self, wanted: int | None) -> Sequence[Version]:
        versions = versions_in(self._place.sizes())
        target = newest_step(versions) if wanted is None else checked_step(wanted)
        if target is None or target == self.step:
            return ()
        if wanted is None and self.step is not None and target < self.step:
            raise MissingBaseError(
                f"{self._place.name}: its newest step is {target}, and the tensors hold {self.step}; "
                "is it another run? reset() starts afresh"
            )
        return route(versions, self.step, target, self._place.name)

    def _apply(self, version: Version, live: Live) -> Patched:
        with self._opened(version) as container, Workers(self._jobs) as workers:
            base = container.index.base
            if base is not None and self._content_id not in (None, base.content_id):
                raise MissingBaseError(
                    f"{container.name}: leads on from other values than step {self.step} has here, "
                    f"{base.title}; is it another run? reset() starts afresh"
                )
            # An interrupt after the write must not leave the old step here: the delta would be applied twice.
            patched = patch(container, live, check=self._check, workers=workers, before_write=self.reset)
        self.step, self._content_id = version.step, patched.content_id
        return patched

    @contextlib.contextmanager
    def _opened(self, version: Version) -> Iterator[Container]:
        with contextlib.closing(open_file(self._place.open(version.name))) as file:
            if not isinstance(file, Container):
                raise FormatError(f"{file.name}: not a .ckptz file")
            if file.index.step != version.step:
                raise CorruptionError(f"{file.name}: holds step {file.index.step}; it was renamed")
            yield file

    def _recognise(self, live: Live) -> None:
        """Find the tensors' values among the steps since the newest full file, by what the deltas say."""
        versions = versions_in(self._place.sizes())
        full_files = full_files_of(versions)
        deltas = [v for v in versions if full_files and v.base is not None and v.step >= full_files[-1].step]
        live_id = ""
        for version in reversed(deltas):
            # What cannot be read now may be read, or complained of, when it is needed.
            with contextlib.suppress(CkptzError, OSError, KeyError), self._opened(version) as container:
                index, base = container.index, container.index.base
                live_id = live_id or content_id_of({name: live[name] for name in container.tensors})
                if live_id == index.content_id:
                    self.step, self._content_id = version.step, live_id
                    return
                if base is not None and live_id == base.content_id:
                    self.step, self._content_id = version.base, live_id
                    return
