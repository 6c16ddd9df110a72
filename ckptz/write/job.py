"""The description of a file to write, and the preparation of roles and side information of its tensors.

The command line, `save_file`, the Checkpointer, adapters, weight sync and searches all create a `WriteJob`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptz.codec.effort import EffortName, effort_of
from ckptz.codec.eight_bit import recipes_of_codes
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method, Recipe, checked
from ckptz.codec.tensor import SideInformation
from ckptz.format.index import BaseRef, QualityRecord, Sharding
from ckptz.format.sources import TensorSource
from ckptz.guidance.momentum import Momentum, bounds_of
from ckptz.guidance.optimizer_layout import ParamState, known_roles, param_states_in
from ckptz.guidance.parameter_names import NO_NAMES, ParameterNames
from ckptz.guidance.side_information import NO_FILES, SideInformationFiles, guides_of
from ckptz.state.roles import Role, Rule, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """One file to write: tensors, method, metadata, base, and known facts about the tensors."""

    tensors: Mapping[str, TensorSource]  # by name, in stored order
    config: Method = LOSSLESS
    effort: EffortName = "default"

    # Recorded in the file.
    metadata: Mapping[str, str] | None = None  # the user's metadata, stored unchanged
    step: int | None = None  # training step, if known
    sharding: Sharding | None = None  # how the source folder was split
    tree: dict[str, Any] | None = None  # JSON skeleton of a nested checkpoint
    quality: Sequence[QualityRecord] = ()  # budgets that were measured on exactly these tensors
    base: BaseRef | None = None  # the base, or None for a full file
    # Tensors of the base by name; tensors without one of their dtype and shape are stored without base.
    bases: Mapping[str, TensorSource] = field(default_factory=dict)
    # Tensors of the newest file of a run by name, if that is not the base.
    newest: Mapping[str, TensorSource] = field(default_factory=dict)
    # Whether training is known to have restored the run, with loss, since the newest file was written.
    was_restored: bool = False
    base_metadata: int | None = None  # checksum of the metadata of a base that is not a .ckptz file

    # Facts about the tensors.
    # Roles that the caller knows; None to derive them from names, also of numbered optimizer state.
    roles: Mapping[str, Role] | None = None
    role_rules: Sequence[Rule] = ()  # the user's additions to the table of roles
    optimizer_names: Collection[str] = ()  # names of tensors from a file of optimizer state
    parameter_names: ParameterNames = NO_NAMES  # source of the names of numbered parameters
    # Parameters whose moments are in another file; their small weights are rounded as if they were in this
    # one.
    trained: Collection[str] = ()
    # Weights with optimizer state in this file, by parameter; None to find them by `tree`.
    param_states: Mapping[str, ParamState] | None = None
    guide_files: SideInformationFiles = NO_FILES  # files with side information
    guides: Mapping[str, SideInformation] | None = None  # side information by name; None to find it
    # Tensors of another file that side information comes from: optimizer state for a file of weights.
    beside: Mapping[str, TensorSource] = field(default_factory=dict)
    momentum: Momentum | None = None  # momentum correction, if this or another file loses momentum
    notes: tuple[str, ...] = ()  # notes for the user

    def __post_init__(self) -> None:
        effort_of(self.effort)

    def recipes(self) -> dict[str, Recipe]:
        """Return the recipe of each tensor by name; lossy methods need `roles`."""
        recipes = self.config.recipes(self.tensors, self.roles or {}, self.trained)
        return recipes | recipes_of_codes(self.tensors, recipes)


@contextlib.contextmanager
def prepared(job: WriteJob) -> Iterator[WriteJob]:
    """Open a context with the roles and side information of all tensors of a job.

    Files with side information stay open within the context.

    Yields:
        The job with roles and side information, which can be used with any settings of its method.

    Raises:
        ConfigError: `config` is not a configuration, or a file does not belong to these tensors.
        CalibrationError: a calibration or sensitivity file does not belong to these tensors.
        FileNotFoundError: a file is missing.
    """
    method = checked(job.config)
    roles, notes = _roles_of(job) if method.is_lossy else ({}, [])
    everything = {**job.tensors, **job.beside}
    with contextlib.ExitStack() as stack:
        guides, momentum = job.guides, job.momentum
        if guides is None:
            guides, more = guides_of(
                everything, roles, method, job.guide_files, stack, tree=job.tree, rules=job.role_rules
            )
            notes = [*notes, *more]
        if momentum is not None:
            momentum = momentum.known(job.tensors, job.tree, roles)
            guides = {**guides, **momentum.guides()}
        elif method.loses_state:
            states = job.param_states
            states = param_states_in(job.tensors, job.tree, roles) if states is None else states
            guides = {**bounds_of(states), **guides}
        yield replace(job, roles=roles, guides=guides, momentum=momentum, notes=(*job.notes, *notes))


def _roles_of(job: WriteJob) -> tuple[dict[str, Role], list[str]]:
    """Determine the roles of the tensors of a job; also returns notes for the user."""
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
