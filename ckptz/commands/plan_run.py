"""`ckptz plan-run`: what the checkpoints of a training job will cost, from measured ratios and speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ckptz.errors import ConfigError, real
from ckptz.pages.shown import Shown

DAY: Final = 86_400.0  # seconds
MAX_BYTES: Final = 1 << 62  # of a state


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs of a way to save, for a whole state in fp32: weights and both of Adam's moments."""

    ratio: float = 1.0  # raw bytes by stored ones, average of a run's chain
    encode: float = math.inf  # raw bytes that a core encodes a second
    decode: float = math.inf  # raw bytes that a core restores a second
    blocks: bool = False  # training waits until the file is written, not for a copy in memory alone


# From bench/results: ratios of demo.csv, speeds of lossless_speeds.csv (files of fp32) and of whole_state.csv
# (deltas, a CPU second). A test holds these to those.
LOSSLESS: Final = Measured(1.275, 1042e6, 1948e6)
LOSSLESS_BF16: Final = Measured(1.508, 799e6, 1261e6)  # the same of bf16 weights, with lossless_sizes.csv
GRID: Final = Measured(48.0, 222e6, 600e6)
MODES: Final[Mapping[str, tuple[Measured, ...]]] = {  # the files that a save writes
    "plain, training waits": (Measured(blocks=True),),
    "plain, in the background": (Measured(),),
    "lossless": (LOSSLESS,),
    "grid, newest step exact": (GRID, LOSSLESS),
    "grid": (GRID,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModePlan:
    """The costs of one way to save.

    Attributes:
        mode: its name.
        ratio: raw bytes by bytes on disk, of what is kept.
        bytes_a_save: written by a save.
        bytes_a_day: written in a day.
        bytes_kept: on disk, once as many steps are there as are kept.
        stall_seconds: a save keeps training waiting.
        safe_seconds: from the start of a save until its last byte is stored.
        core_hours_a_day: spent on encoding, all nodes together.
        restore_seconds: from the store into the memory of all nodes.
        lost_seconds: of training, by a failure: half an interval, the save under way, restore and restart.
        overhead: share of the time that stalls and failures take, at the interval given.
        best_interval: seconds between saves at which that is least.
        best_overhead: the same share then.
    """

    mode: str
    ratio: float
    bytes_a_save: float
    bytes_a_day: float
    bytes_kept: float
    stall_seconds: float
    safe_seconds: float
    core_hours_a_day: float
    restore_seconds: float
    lost_seconds: float
    overhead: float
    best_interval: float
    best_overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Shown):
    """Costs of the checkpoints of a training job, by the way they are saved.

    Attributes:
        state_bytes: raw bytes of a checkpoint.
        modes: the costs, from plain files to the smallest.
    """

    state_bytes: float
    modes: tuple[ModePlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The arguments of `plan_run`, in bytes and seconds."""

    state: float  # of a checkpoint
    bf16: float  # share of these bytes that bf16 weights are
    interval: float
    nodes: int
    cores: int
    bandwidth: float
    copy: float
    between_failures: float
    restart: float
    keep: int

    def plan(self, mode: str) -> ModePlan:
        """Cost a way to save."""
        files = [_mixed(self.bf16) if file is LOSSLESS else file for file in MODES[mode]]
        sizes = [self.state / file.ratio for file in files]
        core_seconds = sum(self.state / file.encode for file in files)
        per_save, n_cores = sum(sizes), self.nodes * self.cores
        safe = max(core_seconds / n_cores, per_save / self.bandwidth)
        stall = safe if files[0].blocks else self.state / self.nodes / self.copy
        decode = sum(self.state / file.decode for file in files)
        restore = max(decode / n_cores, per_save / self.bandwidth)
        after = safe + restore + self.restart
        best = max(best_interval(stall, self.between_failures), safe)
        kept = sizes[0] * self.keep + sum(sizes[1:])
        return ModePlan(
            mode=mode,
            ratio=self.state * self.keep / kept,
            bytes_a_save=per_save,
            bytes_a_day=per_save * DAY / self.interval,
            bytes_kept=kept,
            stall_seconds=stall,
            safe_seconds=safe,
            core_hours_a_day=core_seconds * DAY / self.interval / 3600,
            restore_seconds=restore,
            lost_seconds=self.interval / 2 + after,
            overhead=self._overhead(self.interval, stall, after),
            best_interval=best,
            best_overhead=self._overhead(best, stall, after),
        )

    def _overhead(self, interval: float, stall: float, after: float) -> float:
        return stall / interval + (interval / 2 + after) / self.between_failures


def _mixed(share: float) -> Measured:
    """Cost lossless files of fp32 and a share of bf16."""
    pairs = (
        (getattr(LOSSLESS, name), getattr(LOSSLESS_BF16, name)) for name in ("ratio", "encode", "decode")
    )
    return Measured(*(1 / ((1 - share) / fp32 + share / bf16) for fp32, bf16 in pairs))


def best_interval(cost: float, between_failures: float) -> float:
    """Give the seconds between saves that lose least time (Daly, 2006, which refines Young, 1974).

    `cost` is for how long a save keeps training waiting, `between_failures` an average, both in seconds.
    """
    if cost >= 2 * between_failures:
        return between_failures
    share = cost / (2 * between_failures)
    return math.sqrt(2 * cost * between_failures) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def plan_run(
    parameters: float,
    *,
    bytes_per_parameter: float = 12.0,
    interval: float = 1800.0,
    nodes: int = 1,
    cores: int = 8,
    bandwidth: float = 1e9,
    copy: float = 10e9,
    between_failures: float = DAY,
    restart: float = 300.0,
    keep: int = 5,
) -> RunPlan:
    """Predict what the checkpoints of a training job will cost: disk, stalls, cores, lost work.

    Ratios and speeds were measured on small models with Adam (docs/scale.md): expect the order of size.

    Args:
        parameters: of the model.
        bytes_per_parameter: of a checkpoint: 12 for fp32 weights with both of Adam's moments, 14 with bf16
            weights beside them, 2 for bf16 weights alone, of which the modes without a grid say something.
            Two bytes beyond a multiple of four are taken for bf16 weights, everything else for fp32.
        interval: seconds between saves.
        nodes: machines, each with its share of the state.
        cores: of each node, that encode.
        bandwidth: bytes a second into the store and out of it, for all nodes together.
        copy: bytes a second from the device, or within memory, of each node.
        between_failures: seconds between failures of the job, on average.
        restart: seconds until a job that failed begins to restore.
        keep: steps that stay.

    Raises:
        ConfigError: a number makes no sense.

    Example:
        >>> import ckptz
        >>> plan = ckptz.plan_run(7e9, nodes=8, bandwidth=2e9)
        >>> [mode.mode for mode in plan.modes][-1], round(plan.state_bytes / 1e9)
        ('grid', 84)
    """
    bytes_per_parameter = real("bytes per parameter", bytes_per_parameter)
    state = real("parameters", parameters) * bytes_per_parameter
    job = _Job(
        state=state,
        bf16=2 / bytes_per_parameter if bytes_per_parameter % 4 == 2 else 0.0,
        interval=interval,
        nodes=nodes,
        cores=cores,
        bandwidth=bandwidth,
        copy=copy,
        between_failures=between_failures,
        restart=restart,
        keep=keep,
    )
    for name in _Job.__slots__:
        value = real(name.replace("_", " "), getattr(job, name))
        least = 0 if name in ("restart", "bf16") else 1e-9
        if not least <= value <= MAX_BYTES:
            raise ConfigError(f"{name.replace('_', ' ')} must be a finite number above 0, got {value}")
    return RunPlan(state_bytes=state, modes=tuple(job.plan(mode) for mode in MODES))
