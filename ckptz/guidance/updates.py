"""How optimizers move weights by their first moments, read from the settings of their parameter groups.

Known by the settings that torch's optimizers keep: Adam, AdamW and NAdam; SGD and RMSprop with momentum. Lion
and Muon are not linear in their momentum. What is not known gives no update; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptz.codec.units import TensorSource
from ckptz.encoding.fold import Fold, Update
from ckptz.encoding.guide import NO_GUIDE, Guide
from ckptz.roles import Role


def update_of(group: Mapping[str, Any], step: float | None) -> Update | None:
    """Describe the update of a parameter; None if it is not linear in a first moment, or not known.

    Args:
        group: settings of its parameter group, as torch's optimizers name them.
        step: updates that the parameter has had; Adam's bias corrections follow from it.
    """
    rate = _number(group.get("lr"))
    if rate is None or group.get("amsgrad"):
        return None
    if "amsgrad" in group or "momentum_decay" in group:
        return _adam(group, rate, step)
    is_sgd, is_rmsprop = "dampening" in group, "centered" in group
    momentum = _number(group.get("momentum"))
    if not (is_sgd or is_rmsprop) or momentum is None or not 0 < momentum < 1:
        return None
    lead = momentum if group.get("nesterov") else 1.0
    return Update(rate * lead * momentum / (1 - momentum))


def _adam(group: Mapping[str, Any], rate: float, step: float | None) -> Update | None:
    betas, eps = group.get("betas"), _number(group.get("eps"))
    if not isinstance(betas, list | tuple) or len(betas) != 2 or eps is None or not step or step < 1:
        return None
    first, second = (_number(beta) for beta in betas)
    if first is None or second is None or not (0 < first < 1 and 0 < second < 1):
        return None
    rate *= first / (1 - first)
    decay = _number(group.get("momentum_decay"))
    # NAdam weighs its first moment by a momentum that grows, whose bias is gone after a few steps.
    rate *= 1 / (1 - first**step) if decay is None else first * (1 - 0.5 * 0.96 ** (step * decay))
    return Update(rate, 1 / math.sqrt(1 - second**step), eps)


def _number(value: Any) -> float | None:
    """Give a finite number as a float; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def with_folds(
    guides: Mapping[str, Guide],
    tensors: Mapping[str, TensorSource],
    roles: Mapping[str, Role],
    restored: Mapping[str, TensorSource],
    updates: Mapping[str, Update],
) -> Mapping[str, Guide]:
    """Add to the guides of weights what a file loses of their moments.

    Args:
        guides: by name of the weight.
        tensors: the exact ones, moments included.
        roles: of each of them.
        restored: what readers get of moments, by name.
        updates: by parameter; weights without one are left as they are.
    """
    if not restored or not updates:
        return guides
    moments = {(roles[name].parameter, roles[name].role): name for name in restored if name in roles}
    found = dict(guides)
    for name, source in tensors.items():
        role = roles[name]
        update = updates.get(role.parameter) if role.role == "weight" else None
        if update is None:
            continue
        first = moments.get((role.parameter, "momentum" if update.root_scale is None else "exp_avg"))
        second = moments.get((role.parameter, "exp_avg_sq"))
        if first is None or tuple(tensors[first].shape) != tuple(source.shape):
            continue
        if update.root_scale is not None and second is None:
            continue
        fold = Fold(update, tensors[first], restored[first], None if second is None else restored[second])
        found[name] = replace(found.get(name, NO_GUIDE), fold=fold)
    return found
