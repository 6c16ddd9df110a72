"""The settings that training_state measures, by the name of the table that they are for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bench.studies.rivals import ExCP, Int8Blocks, LCCheckpoint
from bench.studies.training_state.ways import WEIGHTS, WHOLE, FileWay, NNCodecWay, RivalWay, Way
from ckptz.methods.grid import Grid
from ckptz.methods.kmeans import KMeans
from ckptz.methods.lossless import LOSSLESS
from ckptz.methods.state import Moments


@dataclass(frozen=True, slots=True)
class Case:
    """A way, and whether the resumed loss is measured: not where only sizes and divergence are compared."""

    way: Way
    probes: bool = True


def grid_weights(step: float, *, is_chain: bool = True) -> FileWay:
    """Weights on a calibrated grid."""
    return FileWay(name=f"grid {step:g}", config=Grid(step=step, moments=None), is_chain=is_chain)


def kmeans_weights(levels: int, *, is_chain: bool = True) -> FileWay:
    """The published map with a fixed number of levels."""
    config = KMeans(levels=levels, prune=0.1, protect=0.005)
    return FileWay(name=f"kmeans {levels}", config=config, is_chain=is_chain, is_calibrated=False)


def whole(step: float, second: float = 4.0, first: float = 0.5) -> FileWay:
    """A whole state on grids; deltas without a dead zone of their own, anchors with the default one."""
    moments = Moments(second_step=second, first_step=first)
    return FileWay(
        name=f"grid {step:g}, octaves {second:g}, roots {first:g}",
        config=Grid(step=step, dead_zone=0.0, moments=moments),
        anchor=Grid(step=step, moments=moments),
        scope=WHOLE,
    )


LOSSLESS_WEIGHTS: Final = FileWay(name="lossless", config=LOSSLESS, is_calibrated=False)
LOSSLESS_WHOLE: Final = FileWay(name="lossless", config=LOSSLESS, scope=WHOLE, is_calibrated=False)

SNAPSHOTS: Final = (
    *(Case(grid_weights(step, is_chain=False)) for step in (0.5, 1.0)),
    *(Case(kmeans_weights(levels, is_chain=False)) for levels in (32, 16, 8)),
    *(Case(grid_weights(step, is_chain=False), probes=False) for step in (1.5, 3.0)),
    *(Case(NNCodecWay(qp, is_chain=False), probes=False) for qp in (-30, -26, -22, -18)),
)

CHAINS: Final = (
    *(Case(grid_weights(step)) for step in (0.25, 0.4, 0.5, 1.0)),
    *(Case(kmeans_weights(levels)) for levels in (32, 16)),
    *(Case(grid_weights(step), probes=False) for step in (2.0, 4.0, 6.0)),
    *(Case(NNCodecWay(qp), probes=False) for qp in (-34, -30, -26, -24, -22)),
    Case(RivalWay(LCCheckpoint(), WEIGHTS), probes=False),
    Case(LOSSLESS_WEIGHTS, probes=False),
)

WHOLES: Final = (
    Case(whole(0.5, 6, 1)),
    Case(whole(1.0, 8, 2)),
    Case(RivalWay(ExCP(), WHOLE)),
    Case(RivalWay(Int8Blocks(), WHOLE)),
    Case(LOSSLESS_WHOLE, probes=False),
)

CASES: Final = {"snapshots": SNAPSHOTS, "chains": CHAINS, "whole": WHOLES}

QUICK: Final = {
    "snapshots": (
        Case(grid_weights(1.0, is_chain=False)),
        Case(grid_weights(2.0, is_chain=False)),
        Case(kmeans_weights(8, is_chain=False)),
        Case(kmeans_weights(16, is_chain=False)),
        Case(NNCodecWay(-26, is_chain=False), probes=False),
    ),
    "chains": (
        Case(grid_weights(1.0)),
        Case(grid_weights(0.5)),
        Case(kmeans_weights(16)),
        Case(NNCodecWay(-26)),
        Case(RivalWay(LCCheckpoint(), WEIGHTS)),
        Case(LOSSLESS_WEIGHTS, probes=False),
    ),
    "whole": (
        Case(whole(0.5)),
        Case(RivalWay(Int8Blocks(), WHOLE)),
        Case(LOSSLESS_WHOLE, probes=False),
    ),
}


def selected(cases: Iterable[Case], words: Iterable[str]) -> list[Case]:
    """Cases whose names have one of the words; all if there are none."""
    wanted = list(words)
    return [case for case in cases if not wanted or any(word in case.way.name for word in wanted)]
