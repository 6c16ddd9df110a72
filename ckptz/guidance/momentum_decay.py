"""How far a first moment will still move its weight, as the update rules of torch's optimizers say.

What a file loses of a first moment m at update t is movement that a restart does not make. Without gradients
m would move its weight by

    P = - total * m / (root * sqrt(v) + eps)

where `total` is the sum over the updates to come, k = 1, 2 and so on, of the rate and of what is left of m
by then: rate_k * b^k / (1 - b^(t + k)) for Adam. Which share of P training follows is measured, not assumed:
see `ProjectionStats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.blas import product

LEFT: Final = 1e-6  # of a first moment, that no update to come is counted for
MOST_UPDATES: Final = 1 << 16
NADAM_DECAY: Final = 0.96  # of torch's NAdam
PRECISE: Final = 0.1  # standard error of a share that a tensor may have by itself
TELLING: Final = 0.5  # the same of all tensors together, above which it tells nothing

Rates = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumDecay:
    """Updates that a first moment still causes while it decays, if gradients are zero.

    Attributes:
        moment: key of the first moment in the state of a parameter.
        second: key of the second moment that moves are divided by the root of, or None.
        decay: what an update leaves of the first moment.
        total: sum of the moves to come of a first moment of 1 and a root of 1.
        root: what the root of the stored second moment is multiplied by.
        eps: what is added to it.
        rate: of the next update.
        weight_decay: what an update takes of the weight, beside the gradients, at a rate of 1.
        at_once: what a gradient moves beside its part of the first moment, as a share of what a first moment
            of its size moves.
        bound: largest magnitude of a first moment beside a second moment of 1; None where there is none.
    """

    moment: str
    second: str | None = None
    decay: float
    total: float
    root: float = 1.0
    eps: float = 0.0
    rate: float
    weight_decay: float = 0.0
    at_once: float = 0.0
    bound: float | None = None

    def moves(self, moments: NDArray[np.float32], squares: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Compute the moves to come, float32 [n], of moments [n] with second moments [n]; 0 if not finite."""
        with np.errstate(all="ignore"):
            found = moments * np.float32(-self.total)
            if squares is not None:
                found = found / (np.sqrt(squares) * np.float32(self.root) + np.float32(self.eps))
        found[~np.isfinite(found)] = 0
        return found

    def in_noise(self, n_updates: float, *, from_zero: bool = False) -> float:
        """Return <P, D> / <P, P> for gradients that are noise, D being the last `n_updates` updates.

        Each of those moved by what m still holds of it.

        Args:
            n_updates: at least 1.
            from_zero: whether m was zero before them, as what a file has lost of it is. D then lacks what
                earlier gradients would have moved, and P what they would still move.
        """
        left = self.decay**n_updates
        if from_zero:
            gradients = (1 + self.decay) / (self.decay * (1 + left))
            return gradients * (1 + self.at_once) - 1
        return (1 - left) / self.decay * (1 + self.at_once * (1 + self.decay))


def decay_of(
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    is_adamw: bool = False,
    before: tuple[float, float] | None = None,
) -> MomentumDecay | None:
    """Compute how a parameter's first moment decays, from the settings and state of its optimizer.

    Args:
        group: settings of its parameter group, as torch's Adam, AdamW, NAdam, SGD and RMSprop name them;
            numbers, no tensors.
        state: of the parameter: keys of its tensors, and its numbers, `step` among them.
        is_adamw: whether the optimizer is an AdamW, which older versions of torch do not tell from Adam.
        before: (rate, number of updates since), from which rates go on in a line; None where they stay.

    Returns:
        None for other optimizers, for what is not known, and where there is no momentum.
    """
    if "momentum_decay" in group or "amsgrad" in group:
        return _of_adam(group, state, is_adamw, before)
    is_sgd, is_rmsprop = (
        "nesterov" in group and "dampening" in group,
        "alpha" in group and "centered" in group,
    )
    if not (is_sgd or is_rmsprop) or "momentum_buffer" not in state:
        return None
    rate, decay = _number(group.get("lr")), _number(group.get("momentum"))
    if rate is None or not _is_share(decay):
        return None
    is_nesterov = bool(group.get("nesterov"))
    k = _updates(decay)
    left = decay ** (k + is_nesterov)
    return MomentumDecay(
        moment="momentum_buffer",
        decay=decay,
        total=float(product(_rates(rate, before, k), left)),
        rate=rate,
        at_once=(1 - decay) / decay if is_nesterov else 0.0,
    )


def _of_adam(
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    is_adamw: bool,
    before: tuple[float, float] | None,
) -> MomentumDecay | None:
    second = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
    rate, betas, eps = _number(group.get("lr")), group.get("betas"), _number(group.get("eps"))
    step, decay = _number(state.get("step")), _number(group.get("weight_decay", 0.0))
    if not {"exp_avg", second} <= state.keys() or not isinstance(betas, list | tuple) or len(betas) != 2:
        return None
    b1, b2 = map(_number, betas)
    if rate is None or eps is None or decay is None or step is None or step < 1:
        return None
    if not (_is_share(b1) and _is_share(b2)):
        return None
    k = _updates(b1)
    rates = _rates(rate, before, k)
    at_once = 0.0
    if "momentum_decay" in group:
        slowing, mu_product = _number(group["momentum_decay"]), _number(state.get("mu_product"))
        if slowing is None or mu_product is None:
            return None
        shares = b1 * (1 - 0.5 * NADAM_DECAY ** ((step + np.arange(1, len(k) + 2)) * slowing))
        left = b1**k * shares[1:] / (1 - mu_product * np.cumprod(shares)[1:])
        at_once = float((1 - shares[0]) / shares[1])
    else:
        left = b1**k / (1 - b1 ** (step + k))
    return MomentumDecay(
        moment="exp_avg",
        second=second,
        decay=b1,
        total=float(product(rates, left)),
        root=1 / math.sqrt(1 - b2**step),
        eps=eps,
        rate=rate,
        weight_decay=decay if group.get("decoupled_weight_decay", is_adamw) else 0.0,
        at_once=at_once,
        bound=_bound(b1, b2, step),
    )


def _bound(b1: float, b2: float, step: float) -> float:
    """Return how many roots of the second moment Adam's first moment has at most after `step` updates.

    Both are sums over the same gradients, of (1 - b1) b1^k g and of (1 - b2) b2^k g^2. By Cauchy-Schwarz the
    square of the first is at most (1 - b1)^2 / (1 - b2) times the sum of (b1^2 / b2)^k times the second.
    A restart from moments that obey the bound leaves later ones within it.
    """
    ratio = b1 * b1 / b2
    terms = step if ratio == 1 else math.expm1(min(step * math.log(ratio), 700.0)) / (ratio - 1)
    return (1 - b1) * math.sqrt(terms / (1 - b2))


def _updates(decay: float) -> Rates:
    """Number the updates to come that a first moment still counts in, from 1 on."""
    return np.arange(1.0, min(math.ceil(math.log(LEFT) / math.log(decay)), MOST_UPDATES) + 1)


def _rates(rate: float, before: tuple[float, float] | None, k: Rates) -> Rates:
    """Draw on the line that rates were on, never below zero; `rate` is that of update 1."""
    slope = 0.0 if before is None or before[1] <= 0 else (rate - before[0]) / before[1]
    return np.maximum(rate + slope * (k - 1), 0.0)


def _number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _is_share(value: float | None) -> TypeGuard[float]:
    return value is not None and 0 < value < 1


# --- which share of them training follows ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProjectionStats:
    """Inner products of the update of training, D, with that of a lost first moment, P; tensors add up.

    The share of P that training follows is <P, D> / <P, P>, divided by what that is in noise. Where gradients
    undo what momentum does, D has less of P in it.

    Attributes:
        both: <P, D>.
        own: <P, P> times what the share is in noise.
        variance: of `both`, by what P does not explain of D.
    """

    both: float
    own: float
    variance: float

    @classmethod
    def of(
        cls,
        to_come: NDArray[np.float32],
        moved: NDArray[np.float32],
        in_noise: float,
        n_free: int | None = None,
    ) -> Self:
        """Measure P and D [n] on a sample of one tensor.

        P and D are of low rank, so that elements of a matrix tell no more than its rows and columns: `n_free`
        of them, by default n.
        """
        p, d = to_come.astype(np.float64), moved.astype(np.float64)
        both, own, power = (float((a * b).sum()) for a, b in ((p, d), (p, p), (d, d)))
        rest = max(power - both * both / own, 0.0) if own else power
        return cls(both, own * in_noise, own * rest / max(n_free or len(p), 1))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.both + other.both, self.own + other.own, self.variance + other.variance)

    @property
    def error(self) -> float:
        """The standard error of the share."""
        return math.sqrt(self.variance) / self.own if self.own else math.inf

    @property
    def share(self) -> float:
        """The share, 0 to 1."""
        return min(max(self.both / self.own, 0.0), 1.0) if self.own else 0.0


def shares_of(found: Mapping[str, ProjectionStats]) -> dict[str, float]:
    """Return the share of each tensor; tensors that are too small get a common one.

    They are left out where even all tensors together do not tell.
    """
    rough = [name for name, one in found.items() if one.error > PRECISE]
    pool = total(found[name] for name in rough)
    if pool.error > PRECISE:
        pool = total(found.values())
    shares = {name: one.share for name, one in found.items() if name not in rough}
    return shares | dict.fromkeys(rough, pool.share) if pool.error <= TELLING else shares


def total(products: Iterable[ProjectionStats]) -> ProjectionStats:
    """Add up products of several tensors, or of parts of one."""
    return sum(products, ProjectionStats(0.0, 0.0, 0.0))
