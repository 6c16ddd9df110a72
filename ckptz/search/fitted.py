"""The finest file of at most a given size: settings are found from predicted sizes, and nothing is evaluated.

A sample says how the size follows from the settings. The first file that is written says by how much the
sample is wrong, which is nearly the same for settings nearby, so that the next file is close to the limit.
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

LEAST: Final = 0.99  # of the limit: closer, another file is not worth its time
AIM: Final = 0.996
UNSURE: Final = 1.05  # of the limit: up to there a lossless file is tried
MAX_WRITES: Final = 6
CLOSE: Final = 1e-3  # of a predicted size
MAX_PREDICTIONS: Final = 30


def write_to_size(target: Path, job: WriteJob, limit: int, run: SearchRun) -> tuple[Written, SearchReport]:
    """Write the finest file of at most `limit` bytes, by the method of the job; lossless if that fits.

    Raises:
        ConfigError: no settings of the method make so small a file, or the method has no search space.
    """
    start = time.perf_counter()
    config_at, lowest, highest = space_of(job.config).scale(job.config)
    with contextlib.ExitStack() as held, prepared(job) as ready:
        sampler = Sampler(ready, SAMPLE >> 2)

        @functools.cache
        def predicted(x: float) -> float:
            return sampler.written(config_at(x), run.workers)[0].stored_bytes

        def written(config: Method) -> Trial:
            return write_trial(target, FilePlan.of(replace(ready, config=config)), run, held)

        trial, x = None, None
        if sampler.written(LOSSLESS, run.workers)[0].stored_bytes <= UNSURE * limit:
            trial = written(LOSSLESS)
        if trial is None or trial.written.stored_bytes > limit:
            if (smallest := predicted(lowest)) > UNSURE * limit:
                what = f"{job.config.name} makes no file of {limit:,} bytes"
                raise ConfigError(
                    f"{what}: the smallest has about {smallest:,.0f}; give a larger target size"
                )
            trial, x = _finest(lambda x: written(config_at(x)), predicted, limit, (lowest, highest))
        run.check()
        trial.publication.commit()
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
    """Write files until one is close below the limit; returns the largest that fits, and its number.

    Raises:
        ConfigError: none of those that were written fits.
    """
    error, best = 1.0, None
    for _ in range(MAX_WRITES):
        x = _crossing(predicted, AIM * limit / error, *bounds)
        trial = write(x)
        n_bytes = trial.written.stored_bytes
        error = n_bytes / predicted(x)
        if n_bytes <= limit and (best is None or n_bytes > best[0].written.stored_bytes):
            best = trial, x
        if best is not None and (best[0].written.stored_bytes >= LEAST * limit or x == bounds[1]):
            break
    if best is None:
        raise ConfigError(f"{MAX_WRITES} files were written, and none has at most {limit:,} bytes")
    return best


def _crossing(size: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return a number at which a growing size is about what is wanted, or an end of the range."""
    if size(low) >= wanted:
        return low
    if size(high) <= wanted:
        return high
    below, above = math.log(size(low) / wanted), math.log(size(high) / wanted)
    for i in range(MAX_PREDICTIONS):
        # The line through both ends; every third time the middle, as sizes may bend.
        x = (low + high) / 2 if i % 3 == 2 else low + (high - low) * below / (below - above)
        found = math.log(size(x) / wanted)
        if abs(found) < CLOSE:
            return x
        if found < 0:
            low, below = x, found
        else:
            high, above = x, found
    return low


def _changes(template: Method, config: Method) -> str:
    """List the settings that differ from those of a template."""
    before = asdict(template)
    found = ((name, value) for name, value in asdict(config).items() if value != before[name])
    return ", ".join(f"{name} {value:.3g}" for name, value in found if isinstance(value, int | float))
