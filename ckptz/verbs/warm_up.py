"""`ckptz warm-up`: compile all kernels ahead of time, for example in a container image."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ckptz.codec.effort import EffortName
from ckptz.codec.lossless import Lossless
from ckptz.codec.method import Method
from ckptz.codec.registry import METHODS
from ckptz.format.dtypes import dtype_of
from ckptz.format.frequency import use_compiled
from ckptz.format.sources import PATTERN_TYPES, ArraySource, TensorSource
from ckptz.kernels import cache_folder, compiled, silence_notice
from ckptz.parallel import Workers, jobs_of
from ckptz.store.resolve import Checkpoint, base_ref, open_checkpoint
from ckptz.words import Report
from ckptz.write.job import WriteJob
from ckptz.write.writer import write

DTYPES: Final = ("F32", "BF16", "F16", "F64", "U8")
SHAPE: Final = (144, 128)  # large enough for all lanes of the coder, and for kernels that make tables first
CONFIGS: Final[Mapping[str, Method]] = {name: method() for name, method in METHODS.items()} | {
    "sparse": Lossless(sparse=True)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpReport(Report):
    """The methods whose kernels are compiled, and the folder of the cache."""

    methods: tuple[str, ...]  # methods whose kernels are compiled
    folder: str | None  # folder of the kernel cache; None if no folder is writable
    seconds: float  # time taken


def warm_up(*, jobs: int | None = None) -> WarmUpReport:
    """Compile the kernels that writing and reading need, and cache them for later processes.

    Small checkpoints are written and read with every method. The cache is only valid for this version of
    numba and this type of processor.

    Args:
        jobs: number of processes that compile, by default one for each core; 1 compiles in this process.

    Example:
        >>> import ckptz
        >>> ckptz.warm_up(jobs=1).methods
        ('lossless', 'kmeans', 'grid', 'sparse')
    """
    start = time.perf_counter()
    n_jobs = min(jobs_of(jobs), len(CONFIGS))
    if n_jobs == 1:
        for name in CONFIGS:
            _write_and_read(name)
    else:
        # The process pool runs in a worker thread: a Ctrl-C within its locks could leave them locked.
        with Workers(2) as workers:
            list(workers.map(_in_processes, [n_jobs]))
    return WarmUpReport(methods=tuple(CONFIGS), folder=cache_folder(), seconds=time.perf_counter() - start)


def _in_processes(n_jobs: int) -> None:
    # A process compiles one kernel at a time. Forked processes may deadlock on locks of missing threads.
    with ProcessPoolExecutor(n_jobs, multiprocessing.get_context("spawn")) as pool:
        first, *remaining = CONFIGS
        pool.submit(_write_and_read, first).result()  # most of its kernels serve every method
        list(pool.map(_write_and_read, remaining))


def _write_and_read(method: str) -> None:
    """Write and read a full file and a delta with a method: of weights, and of whole training states."""
    compiled()
    use_compiled()
    silence_notice()
    config = CONFIGS[method]
    efforts: tuple[tuple[bool, EffortName], ...] = (False, "fast"), (True, "small")
    for with_optimizer, effort in efforts:
        old, new = (
            {name: s for name, s in _state(step) if with_optimizer or "model" in name} for step in (0, 1)
        )
        with tempfile.TemporaryDirectory(prefix="ckptz-") as folder, contextlib.ExitStack() as stack:
            job = WriteJob(tensors=old, config=config, effort=effort)
            base = stack.enter_context(_written(Path(folder, "full.ckptz"), job))
            job = replace(job, tensors=new, base=base_ref(base), bases=base.tensors)
            delta = stack.enter_context(_written(Path(folder, "delta.ckptz"), job))
            for source in delta.tensors.values():
                source.patterns(0, source.n_patterns)


def _written(path: Path, job: WriteJob) -> contextlib.closing[Checkpoint]:
    with path.open("w+b") as sink, Workers(1) as workers:
        write(sink, job, workers)
    return contextlib.closing(open_checkpoint(path))


def _state(step: int) -> Iterator[tuple[str, TensorSource]]:
    """Yield weights and Adam moments of each dtype; values change slightly from step to step."""
    for dtype in map(dtype_of, DTYPES):
        for name in ("model.{}", "model.{}.bias", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"):
            rng, shape = np.random.default_rng(len(name)), SHAPE[: 1 if "bias" in name else 2]
            values = rng.standard_normal(shape) + step * 0.01 * rng.standard_normal(shape)
            exact = np.float64 if dtype.pattern_bytes == 8 else np.float32
            f32_patterns = (values**2 if "sq" in name else values).astype(exact).view(f"u{exact().itemsize}")
            patterns = (
                f32_patterns
                >> f32_patterns.dtype.type(8 * max(f32_patterns.itemsize - dtype.pattern_bytes, 0))
            ).ravel()
            typed_patterns = patterns.astype(PATTERN_TYPES[dtype.pattern_bytes])
            yield name.format(dtype.name.lower()), ArraySource(dtype, shape, typed_patterns)
