"""Two levels of compression, switched by the change of the gradient's norm (Accordion, arXiv 2010.16057).

The sender decides; the header says which level a message has, and the receiver knows both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ckptz.errors import ConfigError
from ckptz.wire.codecs import Codec

N_NUMBERS: Final = 4  # of the detector's state


@dataclass(frozen=True, slots=True)
class Adaptive:
    """A mild codec while the gradient changes fast, a strong one while it does not.

    Attributes:
        mild: the codec of the first window and of every critical one.
        strong: the codec of the others.
        threshold: relative change of the gradient's norm, from one window to the next, that is critical.
        window: steps over which the norm is taken.
    """

    mild: Codec
    strong: Codec
    threshold: float = 0.2
    window: int = 50

    def __post_init__(self) -> None:
        if self.threshold <= 0 or self.window < 1:
            raise ConfigError(
                f"threshold {self.threshold} must be above 0 and window {self.window} at least 1"
            )

    def __str__(self) -> str:
        return f"{self.mild}~{self.strong}@{self.threshold:g}/{self.window}"


class Detector:
    """The level of a link, switched by the squared norms of its gradients."""

    def __init__(self, choice: Adaptive) -> None:
        self._choice = choice
        self._window, self._sum, self._last, self._strong = 0, 0.0, math.nan, False

    def observe(self, step: int, squared_norm: float) -> None:
        """Count one gradient; what is not finite is a skipped step."""
        self.is_strong(step)
        if math.isfinite(squared_norm):
            self._sum += squared_norm

    def is_strong(self, step: int) -> bool:
        """Tell whether messages of this step take the strong codec."""
        window = step // self._choice.window
        if window > self._window:
            norm = math.sqrt(self._sum)
            change = abs(norm - self._last)
            self._strong = change < self._choice.threshold * self._last  # False while there is no last one
            self._window, self._sum, self._last = window, 0.0, norm
        return self._strong

    @property
    def was_strong(self) -> bool:
        """The level of the last message, which is that of evaluations."""
        return self._strong

    def restart(self) -> None:
        """Go back to the mild codec, as after a change of the learning rate."""
        self._strong, self._last = False, math.nan

    def numbers(self) -> list[float]:
        """Give the state, for a checkpoint."""
        return [float(self._window), self._sum, self._last, float(self._strong)]

    def set_numbers(self, numbers: list[float]) -> None:
        """Take over what `numbers` gave."""
        self._window, self._strong = int(numbers[0]), bool(numbers[3])
        self._sum, self._last = numbers[1], numbers[2]
