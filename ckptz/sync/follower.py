"""Weight sync in the inference engine: applies published files to tensors in place."""

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

ATTEMPTS: Final = 5  # to choose a route; the publisher may remove a file of it in the meantime

Live = Mapping[str, LiveTensor]


@dataclass(frozen=True, slots=True)
class Update:
    """The result of `Follower.apply_to`.

    Attributes:
        step: the step of the tensors now.
        previous: their step before, or None if it was unknown.
        files: names of the applied files, in order; empty if there was nothing new.
        n_bytes: total size of these files.
        n_written: number of elements written.
        seconds: time taken.
    """

    step: int
    previous: int | None
    files: tuple[str, ...]
    n_bytes: int
    n_written: int
    seconds: float


class Follower:
    """Updates tensors in place to the newest step of a `Publisher`.

    Any number of followers may read one folder; they never write to it. A follower that missed steps applies
    deltas or a full file, whichever has fewer bytes. A new follower identifies the step of its tensors by
    their values, or else starts from a full file.

    Args:
        folder_or_url: the folder of the publisher.
        check: "base" verifies the checksums of all tensors at every update; "stored" assumes that only this
            follower writes to them, and reads and writes only changed values.
        jobs: number of threads, by default all cores.

    Attributes:
        step: the step of the tensors, or None if it is unknown.

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
        self._folder = folder_at(folder_or_url)
        self._check: Check = check
        self._jobs = jobs_of(jobs)
        self.step: int | None = None
        self._content_id: str | None = None

    def poll(self) -> int | None:
        """Return the newest published step if it is newer than the tensors; else None."""
        newest = newest_step(versions_in(self._folder.sizes()))
        return newest if newest is not None and (self.step is None or newest > self.step) else None

    def reset(self) -> None:
        """Forget the step of the tensors, after other code wrote to them; `apply_to` identifies it again."""
        self.step = self._content_id = None

    def apply_to(self, state_dict: State, step: int | None = None) -> Update:
        """Update tensors to the newest step, or to `step`.

        Each file is applied completely or not at all. After an error the tensors have the step in the
        attribute `step`. If a write was interrupted it is None, and the next call identifies the step by
        published checksums.

        Args:
            state_dict: tensors by name, on any device, the same ones in every call. Tensors that are not
                published stay unchanged.
            step: the step to update to, by default the newest.

        Raises:
            MissingBaseError: nothing is published, a file of the route is missing, or other code changed the
                tensors (then call `reset`).
            ConfigError: the tensors are not those of the published model.
            FormatError: a file is damaged.
        """
        start, live = time.perf_counter(), live_tensors(state_dict)
        if self.step is None:
            self._identify_step(live)
        previous, applied, n_written = self.step, list[Version](), 0
        for n_left in reversed(range(ATTEMPTS)):
            try:
                for version in self._route(step):
                    n_written += self._apply(version, live).n_written
                    applied.append(version)
                break
            except FileNotFoundError:  # the publisher removed a file of the route
                if not n_left:
                    raise
        if self.step is None:
            raise MissingBaseError(
                f"{self._folder.name}: nothing is published here yet; wait, or check the path"
            )
        return Update(
            step=self.step,
            previous=previous,
            files=tuple(version.name for version in applied),
            n_bytes=sum(version.n_bytes for version in applied),
            n_written=n_written,
            seconds=time.perf_counter() - start,
        )

    def _route(self, step: int | None) -> Sequence[Version]:
        versions = versions_in(self._folder.sizes())
        target = newest_step(versions) if step is None else checked_step(step)
        if target is None or target == self.step:
            return ()
        if step is None and self.step is not None and target < self.step:
            raise MissingBaseError(
                f"{self._folder.name}: the newest step is {target}, but the tensors have step {self.step}; "
                "if this is another run, call reset()"
            )
        return route(versions, self.step, target, self._folder.name)

    def _apply(self, version: Version, live: Live) -> Patched:
        with self._open(version) as container, Workers(self._jobs) as workers:
            base = container.index.base
            if base is not None and self._content_id not in (None, base.content_id):
                raise MissingBaseError(
                    f"{container.name}: its base {base.title} is not the step {self.step} of these tensors; "
                    "if this is another run, call reset()"
                )
            # `before_write` clears the step: after an interrupt the delta must not be applied twice.
            patched = patch(container, live, check=self._check, workers=workers, before_write=self.reset)
        self.step, self._content_id = version.step, patched.content_id
        return patched

    @contextlib.contextmanager
    def _open(self, version: Version) -> Iterator[Container]:
        with contextlib.closing(open_file(self._folder.open(version.name))) as file:
            if not isinstance(file, Container):
                raise FormatError(f"{file.name}: not a .ckptz file")
            if file.index.step != version.step:
                raise CorruptionError(f"{file.name}: holds step {file.index.step}; it was renamed")
            yield file

    def _identify_step(self, live: Live) -> None:
        """Set the step whose content id matches the tensors, among deltas since the newest full file."""
        versions = versions_in(self._folder.sizes())
        full_files = full_files_of(versions)
        deltas = [v for v in versions if full_files and v.base is not None and v.step >= full_files[-1].step]
        live_id = ""
        for version in reversed(deltas):
            # A file that cannot be read raises later, if it is needed.
            with contextlib.suppress(CkptzError, OSError, KeyError), self._open(version) as container:
                index, base = container.index, container.index.base
                live_id = live_id or content_id_of({name: live[name] for name in container.tensors})
                if live_id == index.content_id:
                    self.step, self._content_id = version.step, live_id
                    return
                if base is not None and live_id == base.content_id:
                    self.step, self._content_id = version.base, live_id
                    return
