"""What a caller may choose when saving. Values without behaviour: the writer reads them.

Every configuration is frozen, keyword-only and checked when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptz.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless:
    """Every bit comes back, NaN payloads and negative zeros included. The default.

    Attributes:
        sparse: store a delta by the positions that changed, where few did: it is applied several times
            faster, and about 40 % larger than the smallest. What `ckptz.sync` publishes.

    Example:
        >>> from ckptz.config import LOSSLESS, Lossless
        >>> Lossless() == LOSSLESS
        True
    """

    sparse: bool = False


KMEANS_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "protect_as": ("exact", "bf16"),
    "prune_by": ("magnitude", "sensitivity"),
    "protect_by": ("magnitude", "sensitivity", "either"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KMeans:
    """Weights as k-means codes: protect, quantize, prune (Inshrinkerator, arXiv 2306.11800).

    Only floating-point weights of two or more dimensions and `min_elements` elements become lossy;
    everything else stays lossless. A fixed configuration promises nothing: the file records the errors
    that were measured.

    Attributes:
        levels: values that a tensor's elements may take, 2 to 255.
        embedding_levels: the same for embeddings; by default `levels`.
        prune: share of each tensor, smallest magnitudes first, that becomes zero; 0 to below 1.
        protect: share of each tensor, largest magnitudes first, that is kept; 0 to below 1. Without it a few
            outliers take most levels: on a sentence encoder, 16 levels keep a cosine of 0.70 to the exact
            embeddings with 0, of 0.95 with 0.005 (14x and 8.9x smaller).
        protect_as: how protected elements are kept, "exact" or "bf16" (rounded to nearest).
        prune_by: what "smallest" means, "magnitude" or "sensitivity": |g*w| with an average of gradients.
            Tensors without one are ranked by magnitude.
        protect_by: what "largest" means, likewise; "either" keeps the share `protect` by each of them.
        layer_prune: other prune shares by layer type, for example (("head", 0.0),).
        sigma: weight of frequency against magnitude in the fit, section 4 of the paper.
        min_elements: smaller tensors stay lossless.

    Example:
        >>> from ckptz.config import KMeans
        >>> KMeans(levels=16, prune=0.1).levels
        16
    """

    levels: int = 16
    embedding_levels: int | None = None
    prune: float = 0.0
    protect: float = 0.005
    protect_as: str = "exact"
    prune_by: str = "magnitude"
    protect_by: str = "magnitude"
    layer_prune: tuple[tuple[str, float], ...] = ()
    sigma: float = 0.2
    min_elements: int = 4096

    def __post_init__(self) -> None:
        for levels in (self.levels, self.embedding_levels):
            if levels is not None and not 2 <= levels <= 255:
                raise ConfigError(f"levels must be 2..255, got {levels}")
        for name, share in (("prune", self.prune), ("protect", self.protect), *self.layer_prune):
            if not 0 <= share < 1:
                raise ConfigError(f"{name} must be a share from 0 to below 1, got {share}")
            if name != "protect" and share + self.protect >= 1:
                raise ConfigError(f"prune {share} and protect {self.protect} leave nothing to quantize")
        if not 0 <= self.sigma <= 1:
            raise ConfigError(f"sigma must be from 0 to 1, got {self.sigma}")
        self._check_words()

    def _check_words(self) -> None:
        for name, known in KMEANS_WORDS.items():
            if getattr(self, name) not in known:
                words = ", ".join(map(repr, known))
                raise ConfigError(f"{name} must be one of {words}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """How optimizer state becomes lossy beside weights on a grid.

    Attributes:
        second_step: of exp_avg_sq, in octaves: a restored second moment is within half of it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Weights on a uniform grid whose step follows sensitivity, moments beside them.

    A fixed step promises nothing: the file records the errors that were measured.

    Attributes:
        step: multiple of the reference step, above 0. An equal multiple means about an equal loss change for
            any model: its square is proportional to the expected change, see `ckptz.quant.grid.row_steps`.
        dead_zone: additional share of a step, on both sides of zero, that becomes zero; by default what
            measured best, a tenth.
        moments: how optimizer state becomes lossy; None keeps it exactly.
        min_elements: smaller weights, and those of one dimension, are kept to a relative 2^-10 if there
            are moments, exactly if not.

    Example:
        >>> from ckptz.config import Grid
        >>> Grid(step=1.5).step
        1.5
    """

    step: float = 1.0
    dead_zone: float | None = None
    moments: Moments | None = Moments()
    min_elements: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.step <= 1024:
            raise ConfigError(f"step must be above 0 and at most 1024, got {self.step}")
        if self.dead_zone is not None and not 0 <= self.dead_zone <= 4:
            raise ConfigError(f"dead_zone must be from 0 to 4, got {self.dead_zone}")


Config: TypeAlias = Lossless | KMeans | Grid
LOSSLESS: Final = Lossless()
