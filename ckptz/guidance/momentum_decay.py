"""The total weight update that a first moment will still cause, by the update rules of torch's optimizers.

If a file loses part of a first moment m at update t, training lacks its updates after a restart. Without
further gradients m would change its weight by

    P = - total * m / (root * sqrt(v) + eps)

where `total` is the sum over future updates k = 1, 2, ... of the learning rate times the remaining share of
m: rate_k * b^k / (1 - b^(t + k)) for Adam. The share of P that training actually follows is measured, see
`ProjectionStats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ckptz.kernels.blas import product

LEFT: Final = 1e-6  # remaining share of a first moment below which updates are ignored
MOST_UPDATES: Final = 1 << 16
NADAM_DECAY: Final = 0.96  # constant of torch's NAdam
PRECISE: Final = 0.1  # standard error up to which a tensor has its own share
TELLING: Final = 0.5  # standard error of the common share above which no share is estimated
# State of a parameter in torch's optimizers whose updates are known. An optimizer with more of it, such as a
# master of the weight, may overwrite a corrected weight at its first update.
STATE_KEYS: Final = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "mu_product"),
        *("momentum_buffer", "square_avg", "grad_avg"),
    )
)

Rates = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumDecay:
    """The updates that a first moment causes while it decays, if gradients are zero.

    Attributes:
        moment: key of the first moment in the state of a parameter.
        second: key of the second moment whose root divides updates, or None.
        decay: factor of the first moment at each update.
        total: sum of the future updates of a first moment of 1 with a root of 1.
        root: factor of the root of the stored second moment.
        eps: constant that is added to the root.
        rate: learning rate of the next update.
        weight_decay: share of the weight that is subtracted at each update, at a learning rate of 1.
        at_once: update by a gradient itself, in addition to that by the first moment, relative to the update
            by a first moment of its size.
        bound: largest magnitude of a first moment at a second moment of 1, or None.
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
        """Return the future updates, float32 [n], of moments [n] with second moments [n]; 0 if not finite."""
        with np.errstate(all="ignore"):
            updates = moments * np.float32(-self.total)
            if squares is not None:
                updates = updates / (np.sqrt(squares) * np.float32(self.root) + np.float32(self.eps))
        updates[~np.isfinite(updates)] = 0
        return updates

    def in_noise(self, n_updates: float, *, from_zero: bool = False) -> float:
        """Return the expectation of <P, D> / <P, P> for random gradients, where D are the last updates.

        Args:
            n_updates: number of updates in D, at least 1.
            from_zero: whether m was zero before them, like the lost part of a first moment after a restart. D
                then lacks updates by earlier gradients, and P their future updates.
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
    """Compute the decay of a parameter's first moment from the settings and state of its optimizer.

    Args:
        group: settings of its parameter group, named as in torch's Adam, AdamW, NAdam, SGD and RMSprop, with
            numbers instead of tensors.
        state: state of the parameter: keys of its tensors, and numbers such as `step`.
        is_adamw: whether the optimizer is AdamW, which older versions of torch do not record in the group.
        before: (learning rate, number of updates since) of an earlier step, for linear extrapolation; None
            for a constant rate.

    Returns:
        The decay, or None for other optimizers, unknown settings or state, and optimizers without momentum.
    """
    if not state.keys() <= STATE_KEYS:
        return None
    if "momentum_decay" in group or "amsgrad" in group:
        return _of_adam(group, state, is_adamw, before)
    is_sgd = "nesterov" in group and "dampening" in group
    is_rmsprop = "alpha" in group and "centered" in group
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
    rate, betas, eps = _number(group.get("lr")), _betas(group), _number(group.get("eps"))
    step, decay = _number(state.get("step")), _number(group.get("weight_decay", 0.0))
    if betas is None or not {"exp_avg", second} <= state.keys():
        return None
    b1, b2 = betas
    if rate is None or eps is None or decay is None or step is None or step < 1:
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


def bound_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | None:
    """Return the bound of a first moment by the names of Adam's settings and state, as in `decay_of`.

    It holds for any optimizer that averages gradients and their squares so; None without these names.
    """
    betas, step = _betas(group), _number(state.get("step"))
    if betas is None or step is None or step < 1 or not {"exp_avg", "exp_avg_sq"} <= state.keys():
        return None
    return _bound(*betas, step)


def _betas(group: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the decay factors of both moments, each between 0 and 1; None if they are not known."""
    betas = group.get("betas")
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        return None
    b1, b2 = map(_number, betas)
    return (b1, b2) if _is_share(b1) and _is_share(b2) else None


def _bound(b1: float, b2: float, step: float) -> float:
    """Return the bound of Adam's first moment after `step` updates, in roots of the second moment.

    Both are sums over the same gradients, of (1 - b1) b1^k g and of (1 - b2) b2^k g^2. By Cauchy-Schwarz the
    square of the first is at most (1 - b1)^2 / (1 - b2) times the sum of (b1^2 / b2)^k times the second.
    If restored moments obey the bound, later ones do as well.
    """
    ratio = b1 * b1 / b2
    terms = step if ratio == 1 else math.expm1(min(step * math.log(ratio), 700.0)) / (ratio - 1)
    return (1 - b1) * math.sqrt(terms / (1 - b2))


def _updates(decay: float) -> Rates:
    """Return the numbers 1, 2, ... of the future updates to which a first moment still contributes [n]."""
    return np.arange(1.0, min(math.ceil(math.log(LEFT) / math.log(decay)), MOST_UPDATES) + 1)


def _rates(rate: float, before: tuple[float, float] | None, k: Rates) -> Rates:
    """Extrapolate learning rates linearly to updates `k` [n], at least 0; `rate` is that of update 1."""
    slope = 0.0 if before is None or before[1] <= 0 else (rate - before[0]) / before[1]
    return np.maximum(rate + slope * (k - 1), 0.0)


def _number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _is_share(value: float | None) -> TypeGuard[float]:
    return value is not None and 0 < value < 1


# --- the share that training follows --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProjectionStats:
    """Inner products of the weight change D by training and the update P of a lost first moment.

    The share of P that training follows is <P, D> / <P, P>, divided by its expectation for random gradients.
    It is smaller where gradients counteract momentum. Those of several tensors can be added.

    Attributes:
        both: <P, D>.
        own: <P, P> times the expectation for random gradients.
        variance: variance of `both`, from the part of D that P does not explain.
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
        """Compute the inner products of P and D [n], sampled from one tensor.

        Args:
            to_come: P, the updates of the lost first moment.
            moved: D, the weight change by training.
            in_noise: expectation of <P, D> / <P, P> for random gradients.
            n_free: number of independent elements; by default n. P and D have low rank, so for a matrix it is
                the number of rows and columns.
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
        """The share that training follows, clipped to 0..1."""
        return min(max(self.both / self.own, 0.0), 1.0) if self.own else 0.0


def shares_of(stats: Mapping[str, ProjectionStats]) -> dict[str, float]:
    """Return the share of each tensor; those with a large standard error get a common share.

    If even the standard error of the common share is too large, these tensors are left out.
    """
    rough = [name for name, tensor_stats in stats.items() if tensor_stats.error > PRECISE]
    pool = total(stats[name] for name in rough)
    if pool.error > PRECISE:
        pool = total(stats.values())
    shares = {name: tensor_stats.share for name, tensor_stats in stats.items() if name not in rough}
    return shares | dict.fromkeys(rough, pool.share) if pool.error <= TELLING else shares


def total(products: Iterable[ProjectionStats]) -> ProjectionStats:
    """Add up the inner products of several tensors, or of parts of one."""
    return sum(products, ProjectionStats(0.0, 0.0, 0.0))
