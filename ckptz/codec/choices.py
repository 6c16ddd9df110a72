"""What a configuration means for each tensor of a file: which become lossy, and by what."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptz.codec.units import UnitSource
from ckptz.codec.values import KINDS
from ckptz.config import Config, Grid, KMeans, Lossless, Moments
from ckptz.dtypes import DType
from ckptz.quant.grid import UniformGrid
from ckptz.quant.moments import FirstMoment, Rounding, SecondMoment
from ckptz.quant.partitions import Partitions
from ckptz.roles import Role

LossyMethod: TypeAlias = Partitions | UniformGrid | SecondMoment | FirstMoment | Rounding


@dataclass(frozen=True, slots=True)
class Choice:
    """What a configuration means for one tensor.

    Attributes:
        role: what the tensor is.
        method: how it becomes lossy, or None.
        is_sparse: prefer changed positions over the smallest bytes.
    """

    role: Role
    method: LossyMethod | None = None
    is_sparse: bool = False

    @property
    def companion(self) -> str | None:
        """Name of the tensor whose restored values the method looks at, or None."""
        return self.method.source if isinstance(self.method, FirstMoment) else None


def choose_all(
    config: Config,
    tensors: Mapping[str, UnitSource],
    roles: Mapping[str, Role],
    trained: Collection[str] = (),
) -> dict[str, Choice]:
    """The choice for every tensor of a file, by name.

    Args:
        config: what the user asked for.
        tensors: the file's.
        roles: what each of them is.
        trained: parameters whose moments stand in another file.
    """
    moments = config.moments if isinstance(config, Grid) else None
    if moments is None:
        return {
            name: choose(config, roles[name], source.dtype, tuple(source.shape))
            for name, source in tensors.items()
        }
    state = _State.of(tensors, roles, trained)
    return {name: state.choose(config, moments, name) for name in tensors}


@dataclass(frozen=True, slots=True)
class _State:
    """A training state: which tensors belong to which parameter.

    Attributes:
        tensors: of the file.
        roles: what each of them is.
        trained: parameters that have a moment, in the file or beside it.
        second: name of the second moments by parameter and shape.
    """

    tensors: Mapping[str, UnitSource]
    roles: Mapping[str, Role]
    trained: frozenset[str]
    second: Mapping[tuple[str, tuple[int, ...]], str]

    @classmethod
    def of(
        cls, tensors: Mapping[str, UnitSource], roles: Mapping[str, Role], elsewhere: Collection[str]
    ) -> _State:
        trained, second = set(elsewhere), {}
        for name, source in tensors.items():
            role = roles[name]
            if role.role not in ("weight", "other"):
                trained.add(role.parameter)
            if role.role == "exp_avg_sq" and source.dtype.name in KINDS:
                second[role.parameter, tuple(source.shape)] = name
        return cls(tensors, roles, frozenset(trained), second)

    def choose(self, config: Config, moments: Moments, name: str) -> Choice:
        role, source = self.roles[name], self.tensors[name]
        shape, dtype = tuple(source.shape), source.dtype
        if dtype.name not in KINDS:
            return Choice(role)
        if role.role == "exp_avg_sq":
            return Choice(role, SecondMoment(moments.second_step))
        if role.role in ("exp_avg", "momentum"):
            # RMSprop's momentum is divided by the root already.
            second = self.second.get((role.parameter, shape)) if role.role == "exp_avg" else None
            return Choice(role, FirstMoment(moments.first_step, moments.first_dead_zone, second))
        if role.role == "factor":
            return Choice(role, Rounding())
        chosen = choose(config, role, dtype, shape)
        # What is not trained stays exact: buffers may be the frequencies of a positional code.
        is_rounded = role.role == "weight" and chosen.method is None and role.parameter in self.trained
        return Choice(role, Rounding()) if is_rounded else chosen


def choose(config: Config, role: Role, dtype: DType, shape: tuple[int, ...]) -> Choice:
    """Which tensors a configuration makes lossy: weights with two or more dimensions, not too small."""
    if isinstance(config, Lossless) and config.sparse:
        return Choice(role, is_sparse=True)
    if isinstance(config, Lossless) or role.role != "weight" or dtype.name not in KINDS:
        return Choice(role)
    if len(shape) < 2 or dtype.n_units(shape) < config.min_elements:
        return Choice(role)
    if isinstance(config, Grid):
        return Choice(role, UniformGrid(config.step, config.dead_zone))
    return Choice(role, _partitions(config, role))


def _partitions(config: KMeans, role: Role) -> Partitions:
    """Levels and shares of one tensor."""
    levels = config.levels
    if role.layer_type == "embedding" and config.embedding_levels is not None:
        levels = config.embedding_levels
    prune = dict(config.layer_prune).get(role.layer_type, config.prune)
    as_bf16 = config.protect_as == "bf16"
    shares = Partitions(levels, prune, config.protect, as_bf16, config.sigma)
    return replace(shares, prune_by=config.prune_by, protect_by=config.protect_by)
