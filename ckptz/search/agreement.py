"""Agreement of a model with the exact one, from the logits of both on the same inputs.

    kl      mean over positions of sum(p * (log p - log q)), in nats; p of the exact tensors
    top1    share of positions where both rank the same entry first

Both see what a loss averages away: a model can be as good on average and yet answer otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ConfigError
from ckptz.kernels.floats import Reals
from ckptz.search.measures import Exact, Prepared, State, digest_of, name_of

Logits: TypeAlias = NDArray[np.float32]

KL, TOP1 = "kl", "top1"
CHUNK_ENTRIES: Final = 1 << 18  # of a softmax in double precision at once: a few arrays of 2 MiB


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measures "kl" and "top1" of a budget; one instance for both calls `logits` once a trial.

    The exact logits are kept in float32 while a search runs: 4 bytes times positions times entries.

    Attributes:
        logits: called with a state, returns logits [..., entries] of the same inputs in the same order each
            time, as a torch tensor or an array. It builds its own model.

    Example:
        >>> from ckptz import Agreement, Budget
        >>> agreement = Agreement(lambda state: state["weight"])
        >>> budgets = (
        ...     Budget(agreement, 5e-3, relative=False, metric="kl"),
        ...     Budget(agreement, 0.01, relative=False, metric="top1"),
        ... )
    """

    logits: Callable[[State], Any]

    @property
    def metric(self) -> str:
        """The metric's name in messages."""
        return name_of(self.logits)

    @property
    def data_digest(self) -> str | None:
        """A digest of the data, as `logits` gives it."""
        return digest_of(self.logits)

    def against(self, exact: Exact) -> Prepared:
        """Keep the logits of the exact state, for trials to be compared with."""
        kept = _rows_of(self.logits(exact.state()), self.metric).copy()  # theirs may be a buffer
        if not kept.size:
            raise ConfigError(f"{self.metric} returned no logits: shape {list(kept.shape)}")
        if not np.isfinite(kept.max(axis=1)).all():
            raise ConfigError(f"{self.metric}: logits of the exact tensors hold NaN or infinity")
        return Prepared(_Compared(self.logits, kept), {KL: 0.0, TOP1: 1.0})


@dataclass(frozen=True, slots=True)
class _Compared:
    """Compares logits with those that are kept; can be sent to another process."""

    logits: Callable[[State], Any]
    kept: Logits

    @property
    def metric(self) -> str:
        return name_of(self.logits)

    def __call__(self, state: State) -> dict[str, float]:
        """Give divergence and agreement; not finite where the logits are not."""
        found = _rows_of(self.logits(state), self.metric)
        if found.shape != self.kept.shape:
            n_found, n_kept = (" x ".join(map(str, logits.shape)) for logits in (found, self.kept))
            raise ConfigError(
                f"{self.metric} returned {n_found} logits for a trial and {n_kept} for the exact tensors; "
                "evaluate the same inputs each time"
            )
        return agreement_of(self.kept, found)


def agreement_of(exact: Logits, found: Logits) -> dict[str, float]:
    """Compare logits, float32 [positions, entries]: "kl" in nats, and "top1", the share of equal first ranks.

    Both are NaN if `found` has rows without a largest finite logit.
    """
    if not np.isfinite(found.max(axis=1)).all():
        return {KL: float("nan"), TOP1: float("nan")}
    divergence, n_equal = 0.0, 0
    n_rows = max(CHUNK_ENTRIES // exact.shape[1], 1)
    for begin in range(0, len(exact), n_rows):
        own, other = exact[begin : begin + n_rows], found[begin : begin + n_rows]
        divergence += _divergence(_log_shares(own), _log_shares(other))
        n_equal += int((own.argmax(axis=1) == other.argmax(axis=1)).sum())
    return {KL: max(divergence, 0.0) / len(exact), TOP1: n_equal / len(exact)}


def _log_shares(logits: Logits) -> Reals:
    """Logarithms of softmax shares, in double precision."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def _divergence(exact: Reals, found: Reals) -> float:
    """Sum over positions; entries that the exact model excludes count nothing."""
    shares = np.exp(exact)
    apart = np.subtract(exact, found, out=np.zeros_like(exact), where=shares > 0)
    return float(np.vdot(shares, apart))


def _rows_of(logits: Any, name: str) -> Logits:
    """Logits [positions, entries] from a tensor or an array."""
    if hasattr(logits, "detach"):
        logits = logits.detach().cpu().float()  # numpy has no bfloat16
    try:
        found: Logits = np.asarray(logits, np.float32)
    except (TypeError, ValueError):
        found = np.zeros((), np.float32)
    if not found.ndim:
        raise ConfigError(f"{name} returned no logits [..., entries] but {type(logits).__name__}")
    return found.reshape(-1, found.shape[-1]) if found.size else found.reshape(0, 1)
