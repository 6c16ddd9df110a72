"""What a caller may choose when saving. Values without behaviour: the writer reads them.

Every configuration is frozen, keyword-only and checked when it is made.
"""

from __future__ import annotations

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
        if self.protect_as not in ("exact", "bf16"):
            raise ConfigError(f"protect_as must be 'exact' or 'bf16', got {self.protect_as!r}")
        if not 0 <= self.sigma <= 1:
            raise ConfigError(f"sigma must be from 0 to 1, got {self.sigma}")


Config: TypeAlias = Lossless | KMeans
LOSSLESS: Final = Lossless()
