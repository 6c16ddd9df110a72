"""How a search goes: strategies propose configurations, somebody tries them, the best that fits is kept.

A strategy is a function of what was tried so far and keeps nothing of its own, so a search can be stopped,
replayed and tested without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ckptz.methods.method import Method

FULL: Final = 1.0  # share of the budget that may be used


@dataclass(frozen=True, slots=True)
class Outcome:
    """The size and the quality of one configuration that was tried."""

    config: Method  # what was tried
    used: float  # share of the budget that is used; infinite if it could not be measured
    n_bytes: int  # size of the file

    @property
    def is_feasible(self) -> bool:
        """Whether the budget is kept."""
        return self.used <= FULL


History = Sequence[Outcome]
Predict = Callable[[Method], float]
Try = Callable[[Sequence[Method], str], list[Outcome]]


class Strategy(Protocol):
    """Decides what to try next; `name` is reported with each trial."""

    @property
    def name(self) -> str: ...

    def propose(self, history: History, n: int) -> Sequence[Method]:
        """Propose at most `n` configurations to try side by side; none if nothing is left to learn.

        `history` is what was tried, in order, by other strategies too.
        """
        ...


def best_of(history: History) -> Outcome | None:
    """Find the smallest outcome that keeps the budget."""
    return min((o for o in history if o.is_feasible), key=lambda o: o.n_bytes, default=None)


def run_stages(
    stages: Sequence[Strategy], try_all: Try, n_side_by_side: int = 1, most: int | None = None
) -> Iterator[Outcome]:
    """Search with one strategy after another until one of them leaves something that keeps the budget.

    Args:
        stages: strategies, the cheapest first.
        try_all: tries configurations side by side; is told the strategy's name.
        n_side_by_side: most configurations in one round.
        most: trials in all.

    Yields:
        Outcomes as they come.
    """
    history: list[Outcome] = []
    for stage in stages:
        while True:
            room = n_side_by_side if most is None else min(n_side_by_side, most - len(history))
            configs = stage.propose(history, room)
            if not configs:
                break
            found = try_all(configs, stage.name)
            history += found
            yield from found
        if best_of(history) is not None:
            return
