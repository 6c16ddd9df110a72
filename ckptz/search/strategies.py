"""Which strategies a method's search may use, by what it says of its settings.

Methods with one multiplier have one knob. Those with axes are a cube, whose sizes can be predicted.
"""

from __future__ import annotations

from typing import Literal

from ckptz.errors import ConfigError
from ckptz.methods.method import Method

StrategyName = Literal["auto", "one-knob", "guided", "neighbourhood", "exhaustive"]


def strategies_of(method: Method) -> tuple[StrategyName, ...]:
    """Name the strategies that a method can be searched by; none if it has nothing to turn."""
    if method.is_scalable:
        return ("auto", "one-knob")
    return ("auto", "guided", "neighbourhood", "exhaustive") if method.axes else ()


def check_strategy(strategy: str, template: Method, parent: Method | None) -> None:
    """Refuse what belongs to another method.

    Raises:
        ConfigError: names it.
    """
    known = strategies_of(template)
    if not known:
        raise ConfigError(f"the method {template.name} has no settings that a search can look for")
    if strategy not in known:
        raise ConfigError(
            f"the strategy of {template.name} must be one of {', '.join(known)}, got {strategy!r}"
        )
    if parent is not None and type(parent) is not type(template):
        raise ConfigError(f"a search for {template.name} cannot begin at settings of {parent.name}")
