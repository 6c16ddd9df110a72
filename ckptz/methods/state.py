"""Optimizer state beside lossy weights: which recipe each of its tensors gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ckptz.codec.values import KINDS
from ckptz.errors import ConfigError
from ckptz.methods.first_moment import FirstMoment
from ckptz.methods.method import Choice, Method, TensorSet
from ckptz.methods.second_moment import SecondMoment
from ckptz.methods.small import Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """How optimizer state becomes lossy beside lossy weights.

    Attributes:
        second_step: of exp_avg_sq, in octaves: a restored second moment is within one of it.
        first_step: of exp_avg, in roots of the restored second moment; of momentum and where there is no
            second moment, in root mean squares of the row.
        first_dead_zone: additional share of a step, on both sides of zero, that becomes zero.
    """

    second_step: float = 4.0
    first_step: float = 1.0
    first_dead_zone: float = 0.35

    def __post_init__(self) -> None:
        for name in ("second_step", "first_step"):
            if not 0 < getattr(self, name) <= 64:
                raise ConfigError(f"{name} must be above 0 and at most 64, got {getattr(self, name)}")
        if not 0 <= self.first_dead_zone <= 4:
            raise ConfigError(f"first_dead_zone must be from 0 to 4, got {self.first_dead_zone}")


MOMENTS: Final = Moments()


@dataclass(frozen=True, slots=True)
class StateChooser:
    """Chooses recipes for a training state, whose tensors belong to parameters.

    Attributes:
        file: its tensors.
        moments: how optimizer state becomes lossy.
        weights: the method of weights.
        trained: parameters that have a moment, in the file or beside it.
        second: name of the second moments by parameter and shape.
    """

    file: TensorSet
    moments: Moments
    weights: Method
    trained: frozenset[str]
    second: Mapping[tuple[str, tuple[int, ...]], str]

    @classmethod
    def of(cls, file: TensorSet, moments: Moments, weights: Method) -> StateChooser:
        """Look through a file for what belongs together."""
        trained, second = set(file.trained), {}
        for name, source in file.tensors.items():
            role = file.roles[name]
            if role.role not in ("weight", "other"):
                trained.add(role.parameter)
            if role.role == "exp_avg_sq" and source.dtype.name in KINDS:
                second[role.parameter, tuple(source.shape)] = name
        return cls(file, moments, weights, frozenset(trained), second)

    def choose(self, name: str) -> Choice:
        """Say what becomes of a tensor."""
        role, source, moments = self.file.roles[name], self.file.tensors[name], self.moments
        shape = tuple(source.shape)
        by_itself = Choice(role, self.weights.recipe(role, source.dtype, shape))
        if source.dtype.name not in KINDS:
            return by_itself
        if role.role == "exp_avg_sq":
            return Choice(role, SecondMoment(moments.second_step))
        if role.role in ("exp_avg", "momentum"):
            # RMSprop's momentum is divided by the root already.
            second = self.second.get((role.parameter, shape)) if role.role == "exp_avg" else None
            return Choice(role, FirstMoment(moments.first_step, moments.first_dead_zone, second))
        if role.role == "factor":
            return Choice(role, Rounding())
        # What is not trained stays exact: buffers may be the frequencies of a positional code.
        is_rounded = role.role == "weight" and not by_itself.is_lossy and role.parameter in self.trained
        return Choice(role, Rounding()) if is_rounded else by_itself
