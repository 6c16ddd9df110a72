"""First moments by a few outer products against codes of their elements, for levers.py.

What is approximated is Adam's direction u = m / sqrt(v): its largest singular vectors, each in eight bits a
number, times the roots of the second moments that a file restores. The resumed gap has exact weights, the
1-D tensors' moments as well, and second moments in steps of four octaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import levers_bits as bits
import numpy as np
import torch
from levers_states import N_FILES, Checkpoint, Floats, measured, points
from paper_a_chain import exact_probe, resumed_gap
from paper_a_tasks import Task
from paper_a_training import Run, Trainer, probe_on

STEPS: Final = (0.5, 1.0)
RANKS: Final = (1, 2, 4, 8)
LARGEST: Final = 127  # of a number in a vector
SCALE_BITS: Final = 64  # of each pair of vectors
INDEX: Final = N_FILES - 1


def factored(direction: bits.Reals, rank: int) -> tuple[bits.Reals, int]:
    """The matrix [n, m] that some pairs of rounded vectors give, and their bits."""
    left, sizes, right = np.linalg.svd(direction, full_matrices=False)
    pairs = zip((left * np.sqrt(sizes)).T[:rank], (right.T * np.sqrt(sizes)).T[:rank], strict=True)
    total = sum(np.outer(_rounded(a), _rounded(b)) for a, b in pairs)
    return np.asarray(total), rank * (8 * sum(direction.shape) + SCALE_BITS)


def _rounded(vector: bits.Reals) -> bits.Reals:
    scale = np.abs(vector).max() / LARGEST or 1.0
    return np.rint(vector / scale) * scale


def first_moments(point: Checkpoint, step: float, rank: int) -> tuple[dict[str, Floats], dict[str, float]]:
    """Both moments of lossy weights as restored, and bits and energy of the first ones.

    Args:
        point: a checkpoint.
        step: of codes, in roots; with a rank, only that of the roots matters.
        rank: pairs of vectors, or 0 for codes.
    """
    tensors, n_bits, energy, left, n = {}, 0.0, 0.0, 0.0, 0
    for name in point.lossy:
        own = bits.Moments(point, name, step)
        exact = point.moment(name, "exp_avg").astype(np.float64)
        roots = np.sqrt(point.moment(name, "exp_avg_sq").astype(np.float64) + 1e-30)
        restored = own.first.reshape(exact.shape).astype(np.float64)
        if rank:
            direction, used = factored(exact / roots, rank)
            restored = direction * np.sqrt(own.second.reshape(exact.shape))
        else:
            used = bits.adaptive_bits(own.codes, bits.exponents(own.second))
        n_bits, n = n_bits + used, n + exact.size
        energy += float(((exact / roots) ** 2).sum())
        left += float((((exact - restored) / roots) ** 2).sum())
        key = f"optimizer.{name.removeprefix('model.')}"
        tensors[f"{key}.exp_avg"] = restored.astype(np.float32)
        tensors[f"{key}.exp_avg_sq"] = own.second.reshape(exact.shape)
    return tensors, {"bits": n_bits / n, "explained": 1 - left / energy}


def resumed(task: Task, tensors: Mapping[str, Floats]) -> float:
    """Per cent of the loss when training goes on with some tensors replaced."""
    changed = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    losses = probe_on(Trainer(task, {**Run(task).state(INDEX), **changed}))
    return 100 * resumed_gap({"restored": losses, "exact": exact_probe(task, INDEX)})


def first_rows(task: Task) -> list[dict[str, object]]:
    """Codes at two steps, and a few ranks."""
    ways = {f"codes, {step:g} roots": (step, 0) for step in STEPS}
    ways |= {f"outer products: {rank}": (1.0, rank) for rank in RANKS}
    rows = []
    for name, (step, rank) in ways.items():

        def make(step: float = step, rank: int = rank) -> dict[str, Any]:
            tensors, facts = first_moments(points(task)[INDEX], step, rank)
            return {**facts, "resumed": resumed(task, tensors)}

        facts = measured(f"first {name}", make)
        rows.append(
            {
                "first moments": name,
                "bits a parameter": f"{facts['bits']:.3f}",
                "of Adam's direction, %": f"{100 * facts['explained']:.1f}",
                "resumed, %": f"{facts['resumed']:+.3f}",
            }
        )
    return rows
