"""The one way to write a file: tensors and what is known of them go in, a file and one report come out.

Roles, guidance and choices are found here and nowhere else. The command line, `save_file`, the
Checkpointer, adapters, weight sync and searches all hand in a `Job`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from ckptz.codec.effort import EffortName, effort_of
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method, Recipe, checked
from ckptz.codec.tensor import SideInformation
from ckptz.format.sources import TensorSource
from ckptz.format.written import Written
from ckptz.guidance.optimizer_layout import NO_NAMES, ParameterNames, known_roles
from ckptz.guidance.side_information import NO_FILES, SideInformationFiles, guides_of
from ckptz.guidance.trail import Momentum, Trained, bounds_of, trained_in
from ckptz.parallel import Workers
from ckptz.state.roles import Role, Rule, role_of
from ckptz.write.frame_writer import Earlier, FilePlan, FileRecord, Progress
from ckptz.write.writer import write_container


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(FileRecord):
    """One file to write: tensors, a configuration, and all that is known of them."""

    tensors: Mapping[str, TensorSource]  # by name; their order is kept
    config: Method = LOSSLESS  # lossless, or how tensors become lossy
    role_rules: Sequence[Rule] = ()  # the user's rows of the table of roles
    # what tensors are, where the caller knows better than their names; None to find the owners of numbered
    # optimizer state
    roles: Mapping[str, Role] | None = None
    optimizer_names: Collection[str] = ()  # names of tensors that come from a file of optimizer state
    parameter_names: ParameterNames = NO_NAMES  # where the names of numbered parameters may come from
    # parameters whose moments stand in another file, so that their one-dimensional weights are as exact as
    # they would be beside them
    trained: Collection[str] = ()
    guide_files: SideInformationFiles = NO_FILES  # where more is known of the tensors
    guides: Mapping[str, SideInformation] | None = None  # what is known of them, by name; None to find it
    # tensors of another file that tell of these: optimizer state beside weights
    beside: Mapping[str, TensorSource] = field(default_factory=dict)
    effort: EffortName = "default"  # how much time goes into a smaller file
    momentum: Momentum | None = None  # by which weights are moved, where the file or another loses momentum

    def __post_init__(self) -> None:
        effort_of(self.effort)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job of which all is known that its files need, whatever their configuration."""

    job: Job  # what to write
    roles: Mapping[str, Role]  # what its tensors are, where that changes anything
    guides: Mapping[str, SideInformation]  # what is known of them, by name
    trained: Mapping[str, Trained]  # weights that are moved, by parameter
    notes: tuple[str, ...]  # for the user

    def lossy(self, config: Method) -> list[str]:
        """Name the tensors of the file that may come back changed under a configuration."""
        return [name for name, recipe in self._recipes(config).items() if recipe.is_lossy]

    def plan(self, config: Method, earlier: Earlier | None = None, draw: int = 0) -> FilePlan:
        """Choose what becomes of each tensor under a configuration; frames are copied from `earlier`.

        Args:
            config: the configuration.
            earlier: a file of the same job.
            draw: of random rounding.
        """
        moves = None if self.job.momentum is None else self.job.momentum.moves(self.trained)
        tensors, recipes = dict(self.job.tensors), self._recipes(config)
        effort = effort_of(self.job.effort)
        return FilePlan(tensors, self.job, recipes, self.roles, self.guides, earlier, moves, draw, effort)

    def _recipes(self, config: Method) -> dict[str, Recipe]:
        return config.recipes(self.job.tensors, self.roles, self.job.trained)


@contextlib.contextmanager
def prepared(job: Job) -> Iterator[Prepared]:
    """Find roles and guidance, and keep the files open that guides read from.

    Raises:
        ConfigError: a configuration of no method, or a file that does not belong to these tensors.
        CalibrationError: the same, of a calibration or sensitivity file.
        FileNotFoundError: a file is missing.
    """
    method = checked(job.config)
    roles, notes = _roles_of(job) if method.is_lossy else ({}, [])
    everything = {**job.tensors, **job.beside}
    with contextlib.ExitStack() as held:
        guides = job.guides
        if guides is None:
            guides, more = guides_of(
                everything, roles, method, job.guide_files, held, tree=job.tree, rules=job.role_rules
            )
            notes = [*notes, *more]
        trained: Mapping[str, Trained] = {}
        if job.momentum is not None:
            trained = job.momentum.trained_in(job.tensors, job.tree, roles)
            guides = {**guides, **job.momentum.guides(trained)}
        elif method.loses_state:
            guides = {**bounds_of(trained_in(job.tensors, job.tree, roles)), **guides}
        yield Prepared(job, roles, guides, trained, tuple(notes))


def _roles_of(job: Job) -> tuple[dict[str, Role], list[str]]:
    """Find what the tensors of a job are, and notes for the user on it."""
    known, notes = job.roles, list[str]()
    if known is None:
        known, notes = known_roles(
            job.tensors, job.tree, job.role_rules, job.optimizer_names, names=job.parameter_names
        )
    return {
        name: known.get(name) or role_of(name, tuple(s.shape), s.dtype.is_float, job.role_rules)
        for name, s in {**job.tensors, **job.beside}.items()
    }, notes


def mark_restored(job: Job) -> None:
    """Record the restored weights as the reference for the next save's momentum correction."""
    if job.momentum is not None:
        trained = job.momentum.trained_in(job.tensors, job.tree, _roles_of(job)[0])
        job.momentum.trail.mark(trained, job.momentum.step, is_restored=True)


def write(sink: BinaryIO, job: Job, workers: Workers, progress: Progress | None = None) -> Written:
    """Write one file into `sink`, which is empty and must seek; `progress` is told the bytes of each chunk.

    Raises:
        ConfigError: what is asked for is impossible; see `prepared`.
    """
    with prepared(job) as ready:
        written = write_container(sink, ready.plan(job.config), workers, progress)
        if job.momentum is not None:
            job.momentum.trail.mark(ready.trained, job.momentum.step, is_restored=False)
        return replace(written, notes=(*written.notes, *ready.notes))
