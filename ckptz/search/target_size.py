"""Writes the finest file of at most a given size. Nothing is evaluated.

The size for a setting is predicted from a sample of the tensors. The first written file shows the error of
the prediction, which is nearly the same for similar settings, so the next file is close to the limit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method
from ckptz.errors import ConfigError
from ckptz.format.written import Written
from ckptz.search.budget import SearchReport
from ckptz.search.run import SearchRun, Trial, write_trial
from ckptz.search.sampled import SAMPLE, Sampler
from ckptz.search.spaces import space_of
from ckptz.write.frame_writer import FilePlan
from ckptz.write.job import WriteJob, prepared

MIN_FILL: Final = 0.99  # of the limit: a larger file is not worth another write
AIM: Final = 0.996  # of the limit
PREDICTION_MARGIN: Final = 1.05  # predictions may be this much too large
MAX_WRITES: Final = 6
TOLERANCE: Final = 1e-3  # of a predicted size
MAX_PREDICTIONS: Final = 30


def write_to_size(target: Path, job: WriteJob, limit: int, run: SearchRun) -> tuple[Written, SearchReport]:
    """Write the finest file of at most `limit` bytes: lossless if that fits, else by the method of the job.

    Args:
        target: path of the file.
        job: its tensors, method and base.
        limit: largest file size in bytes.
        run: threads, folders and checks.

    Raises:
        ConfigError: the method cannot write a file this small, or has no search space.
    """
    start = time.perf_counter()
    config_at, lowest, highest = space_of(job.config).scale(job.config)
    with contextlib.ExitStack() as stack, prepared(job) as ready:
        sampler = Sampler(ready, SAMPLE >> 2)

        @functools.cache
        def predicted(x: float) -> float:
            return sampler.written(config_at(x), run.workers)[0].stored_bytes

        def written(config: Method) -> Trial:
            return write_trial(target, FilePlan.of(replace(ready, config=config)), run, stack)

        trial, x = None, None
        if sampler.written(LOSSLESS, run.workers)[0].stored_bytes <= PREDICTION_MARGIN * limit:
            trial = written(LOSSLESS)
        if trial is None or trial.written.stored_bytes > limit:
            if (smallest := predicted(lowest)) > PREDICTION_MARGIN * limit:
                raise ConfigError(
                    f"{job.config.name} cannot write a file of {limit:,} bytes: the smallest has about "
                    f"{smallest:,.0f}; use a larger target size"
                )
            trial, x = _finest(lambda x: written(config_at(x)), predicted, limit, (lowest, highest))
        trial.publish(run, is_dry_run=False)
        config = None if x is None else config_at(x)
        what = "lossless" if config is None else _changes(job.config, config)
        note = f"target of {limit:,} bytes: {what}"
        report = SearchReport(
            method=job.config.name,
            strategy="size",
            config=None if config is None else asdict(config),
            n_predicted=predicted.cache_info().currsize,
            seconds=time.perf_counter() - start,
        )
        return replace(trial.written, notes=(*trial.written.notes, note)), report


def _finest(
    write: Callable[[float], Trial],
    predicted: Callable[[float], float],
    limit: int,
    bounds: tuple[float, float],
) -> tuple[Trial, float]:
    """Write files until one is close below the limit.

    Args:
        write: writes a file with the settings at a position on the scale.
        predicted: its predicted size in bytes; grows with the position.
        limit: largest file size in bytes.
        bounds: lowest and highest position.

    Returns:
        The largest file that fits, and its position.

    Raises:
        ConfigError: no written file fits.
    """
    error, best = 1.0, None
    for _ in range(MAX_WRITES):
        x = _crossing(predicted, AIM * limit / error, *bounds)
        trial = write(x)
        n_bytes = trial.written.stored_bytes
        error = n_bytes / predicted(x)
        if n_bytes <= limit and (best is None or n_bytes > best[0].written.stored_bytes):
            best = trial, x
        if best is not None and (best[0].written.stored_bytes >= MIN_FILL * limit or x == bounds[1]):
            break
    if best is None:
        raise ConfigError(f"none of {MAX_WRITES} written files has at most {limit:,} bytes")
    return best


def _crossing(size: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return the position at which an increasing size is about `target`, or the nearer end of the range."""
    if size(low) >= target:
        return low
    if size(high) <= target:
        return high
    log_low, log_high = math.log(size(low) / target), math.log(size(high) / target)
    for i in range(MAX_PREDICTIONS):
        # Regula falsi; every third step bisects, because sizes are not linear.
        x = (low + high) / 2 if i % 3 == 2 else low + (high - low) * log_low / (log_low - log_high)
        log_x = math.log(size(x) / target)
        if abs(log_x) < TOLERANCE:
            return x
        if log_x < 0:
            low, log_low = x, log_x
        else:
            high, log_high = x, log_x
    return low


def _changes(template: Method, config: Method) -> str:
    """List the numeric settings that differ from a template, such as "step 1.5"."""
    before = asdict(template)
    changed = ((name, value) for name, value in asdict(config).items() if value != before[name])
    return ", ".join(f"{name} {value:.3g}" for name, value in changed if isinstance(value, int | float))
