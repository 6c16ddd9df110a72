"""What budgets call: functions of a state, and those that compare a state with the exact one.

A plain quality is a function of a state. One that compares has a method `against` instead: it sees the
exact state once, and returns what is called with trials. Knows callables; who decodes states is no concern
of this page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ckptz.errors import ConfigError

State: TypeAlias = dict[str, Any]  # name -> CPU torch tensor, the callee's to change
Quality: TypeAlias = Callable[[State], Any]


class Exact(Protocol):
    """The exact state, decoded as often as it is wanted."""

    def state(self) -> State:
        """Decode a fresh copy."""
        ...

    def disturbed(self, share: float, seed: int) -> State:
        """Decode a copy with noise of `share` of their spread on weights of two or more dimensions."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A quality that has seen the exact state."""

    quality: Quality  # called with trials
    exact: Any  # what it would return for the exact state
    noise: float = 0.0  # differences up to this one say nothing
    per_step: float | None = None  # what a step of training lowers it by, if that is known


class Comparing(Protocol):
    """A quality that needs the exact state before it can judge another."""

    def against(self, exact: Exact) -> Prepared:
        """Give what to call with trials, and the result of the exact state."""
        ...


def prepare(quality: Quality | Comparing, exact: Exact) -> Prepared:
    """Show a quality the exact state; what has no `against` is a function, and is called with it."""
    if callable(quality) and not hasattr(quality, "against"):
        return Prepared(quality, quality(exact.state()))
    comparing: Comparing = quality
    return comparing.against(exact)


def number(value: Any, name: str) -> float:
    """Read the result of a function as a number.

    Raises:
        ConfigError: it is none; names the function.
    """
    # An array, or a tensor of several elements, is none.
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if hasattr(value, "__float__") and not isinstance(value, str | bytes | bool):
            return float(value)
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    raise ConfigError(f"{name} returned {shown}, which is not a number")


def name_of(function: Any) -> str:
    """Name a function: by its `metric`, or its own name."""
    return str(getattr(function, "metric", getattr(function, "__name__", "quality")))


def digest_of(function: Any) -> str | None:
    """Ask a function what data it measures on, or None."""
    found = getattr(function, "data_digest", None)
    found = found() if callable(found) else found
    return None if found is None else str(found)
