"""Describes a file to write, and finds roles and side information of its tensors.

The command line, `save_file`, the Checkpointer, adapters, weight sync and searches all hand in a `WriteJob`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptz.codec.effort import EffortName, effort_of
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method, Recipe, checked
from ckptz.codec.tensor import SideInformation
from ckptz.format.index import BaseRef, QualityRecord, Sharding
from ckptz.format.sources import TensorSource
from ckptz.guidance.momentum import Momentum, bounds_of
from ckptz.guidance.optimizer_layout import known_roles, param_states_in
from ckptz.guidance.parameter_names import NO_NAMES, ParameterNames
from ckptz.guidance.side_information import NO_FILES, SideInformationFiles, guides_of
from ckptz.state.roles import Role, Rule, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """One file to write: what the caller wants, and all that is known of the tensors."""

    tensors: Mapping[str, TensorSource]  # by name; their order is kept
    config: Method = LOSSLESS  # lossless, or how tensors become lossy
    effort: EffortName = "default"  # how much time goes into a smaller file

    # What the file records beside its tensors.
    metadata: Mapping[str, str] | None = None  # the user's own, kept unchanged
    step: int | None = None  # training step, if known
    sharding: Sharding | None = None  # how the source folder was split
    tree: dict[str, Any] | None = None  # JSON skeleton of a nested checkpoint
    quality: Sequence[QualityRecord] = ()  # budgets that were measured on the very tensors of this file
    base: BaseRef | None = None  # the checkpoint that the tensors are stored against
    # tensors of the base by name; a tensor without a base of its dtype and shape is self-contained
    bases: Mapping[str, TensorSource] = field(default_factory=dict)
    base_metadata: int | None = None  # checksum of the metadata of a base that is a plain file

    # What is known of the tensors.
    # where the caller knows better than names; None to find the owners of numbered optimizer state
    roles: Mapping[str, Role] | None = None
    role_rules: Sequence[Rule] = ()  # the user's rows of the table of roles
    optimizer_names: Collection[str] = ()  # names of tensors that come from a file of optimizer state
    parameter_names: ParameterNames = NO_NAMES  # where the names of numbered parameters may come from
    # parameters whose moments are in another file, so that their one-dimensional weights are as exact as if
    # the moments were in this file
    trained: Collection[str] = ()
    guide_files: SideInformationFiles = NO_FILES  # files that side information is read from
    guides: Mapping[str, SideInformation] | None = None  # side information by name; None to find it
    # tensors of another file that side information comes from: optimizer state for a file of weights
    beside: Mapping[str, TensorSource] = field(default_factory=dict)
    momentum: Momentum | None = None  # momentum correction, where the file or another one loses momentum
    notes: tuple[str, ...] = ()  # for the user, on what was found

    def __post_init__(self) -> None:
        effort_of(self.effort)

    def recipes(self) -> dict[str, Recipe]:
        """Return the recipe of each tensor, by name; a lossy method needs the roles of all."""
        return self.config.recipes(self.tensors, self.roles or {}, self.trained)


@contextlib.contextmanager
def prepared(job: WriteJob) -> Iterator[WriteJob]:
    """Find roles and side information, and keep the files open that side information is read from.

    Returns:
        The job with the roles and side information of all tensors, for any settings of its method.

    Raises:
        ConfigError: a configuration of no method, or a file that does not belong to these tensors.
        CalibrationError: the same, of a calibration or sensitivity file.
        FileNotFoundError: a file is missing.
    """
    method = checked(job.config)
    roles, notes = _roles_of(job) if method.is_lossy else ({}, [])
    everything = {**job.tensors, **job.beside}
    with contextlib.ExitStack() as held:
        guides, momentum = job.guides, job.momentum
        if guides is None:
            guides, more = guides_of(
                everything, roles, method, job.guide_files, held, tree=job.tree, rules=job.role_rules
            )
            notes = [*notes, *more]
        if momentum is not None:
            momentum = momentum.known(job.tensors, job.tree, roles)
            guides = {**guides, **momentum.guides()}
        elif method.loses_state:
            guides = {**bounds_of(param_states_in(job.tensors, job.tree, roles)), **guides}
        yield replace(job, roles=roles, guides=guides, momentum=momentum, notes=(*job.notes, *notes))


def _roles_of(job: WriteJob) -> tuple[dict[str, Role], list[str]]:
    """Find the roles of the tensors of a job, and notes for the user."""
    known, notes = job.roles, list[str]()
    if known is None:
        known, notes = known_roles(
            job.tensors, job.tree, job.role_rules, job.optimizer_names, names=job.parameter_names
        )
    return {
        name: known.get(name) or role_of(name, tuple(s.shape), s.dtype.is_float, job.role_rules)
        for name, s in {**job.tensors, **job.beside}.items()
    }, notes


def mark_restored(job: WriteJob) -> None:
    """Record the restored weights as the reference for the next save's momentum correction."""
    if job.momentum is not None:
        job.momentum.known(job.tensors, job.tree, _roles_of(job)[0]).snapshot(is_restored=True)
