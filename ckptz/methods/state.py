"""Optimizer state beside lossy weights: which recipe each of its tensors gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ckptz.errors import ConfigError, own_numbers
from ckptz.format.sources import TensorSource
from ckptz.format.values import KINDS
from ckptz.methods.first_moment import FirstMoment
from ckptz.methods.method import Method, Recipe
from ckptz.methods.second_moment import SecondMoment
from ckptz.methods.small import RelativeRounding
from ckptz.state.roles import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Settings of the optimizer state beside lossy weights.

    Attributes:
        second_step: of exp_avg_sq, in octaves: a restored second moment is within one of it.
        first_step: of exp_avg, in roots of the restored second moment; of momentum and where there is no
            second moment, in root mean squares of the row; where few directions are kept, 1 is usual.
        first_dead_zone: additional share of a step, on both sides of zero, that becomes zero.
    """

    second_step: float = 4.0
    first_step: float = 1.0
    first_dead_zone: float = 0.35

    def __post_init__(self) -> None:
        own_numbers(self)
        for name in ("second_step", "first_step"):
            if not 0 < getattr(self, name) <= 64:
                raise ConfigError(f"{name} must be above 0 and at most 64, got {getattr(self, name)}")
        if not 0 <= self.first_dead_zone <= 4:
            raise ConfigError(f"first_dead_zone must be from 0 to 4, got {self.first_dead_zone}")


MOMENTS: Final = Moments()


def state_recipes(
    tensors: Mapping[str, TensorSource],
    roles: Mapping[str, Role],
    trained: Collection[str],
    moments: Moments,
    weights: Method,
) -> dict[str, Recipe]:
    """Choose recipes for a training state, whose tensors belong to parameters; see `Method.recipes`."""
    trained, second = set(trained), {}  # parameters that have a moment; second moments of each
    for name, source in tensors.items():
        role = roles[name]
        if role.role not in ("weight", "other"):
            trained.add(role.parameter)
        if role.role == "exp_avg_sq" and source.dtype.name in KINDS:
            second[role.parameter, source.shape] = name
    chosen = {}
    for name, source in tensors.items():
        role, shape = roles[name], source.shape
        recipe = weights.recipe(role, source.dtype, shape)
        if source.dtype.name in KINDS:
            # What is not trained stays exact: buffers may be the frequencies of a positional code.
            if role.role == "weight" and not recipe.is_lossy and role.parameter in trained:
                recipe = RelativeRounding()
            recipe = _of_state(role, shape, moments, second) or recipe
        chosen[name] = recipe
    return chosen


def _of_state(
    role: Role, shape: tuple[int, ...], moments: Moments, second: Mapping[tuple[str, tuple[int, ...]], str]
) -> Recipe | None:
    """The recipe of optimizer state; None for other tensors."""
    if role.role == "exp_avg_sq":
        return SecondMoment(moments.second_step)
    if role.role in ("exp_avg", "momentum"):
        # RMSprop's momentum is divided by the root already.
        source = second.get((role.parameter, shape)) if role.role == "exp_avg" else None
        return FirstMoment(moments.first_step, moments.first_dead_zone, source)
    return RelativeRounding() if role.role == "factor" else None
