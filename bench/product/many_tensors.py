"""A state of many small tensors, as mixtures of experts have: whole files, written on all cores.

    python -m bench.product.many_tensors [--tensors N] [--rounds N]

40,000 bf16 tensors of 32 KiB each, 1.2 GiB: normal values of spread 0.02, and the same after a step of
spread 2e-5. They are written to a file, alone and against the first as its base.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from bench.core.measure import Row, interleave, machine, parser_of, save_rows, timed, verdict
from bench.core.report import finish
from bench.core.sources import Tensors
from ckptz.codec.units import ArraySource
from ckptz.container.index import BaseRef
from ckptz.dtypes import dtype_of
from ckptz.parallel import Workers, default_jobs
from ckptz.pipeline import Job, write

SHAPE: Final = (128, 128)
TARGETS: Final = {"lossless": 250, "delta": 150}  # MB/s


def states(n_tensors: int) -> tuple[Tensors, Tensors]:
    """The weights of two steps."""
    rng, n = np.random.default_rng(0), n_tensors * SHAPE[0] * SHAPE[1]
    values = rng.standard_normal(n, np.float32) * np.float32(0.02)
    old = _named(values)
    values += rng.standard_normal(n, np.float32) * np.float32(2e-5)
    return old, _named(values)


def _named(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Tensors:
    units = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(-1, SHAPE[0] * SHAPE[1])
    return {
        f"model.layers.{i // 256}.mlp.experts.{i % 256}.down_proj.weight": ArraySource(
            dtype_of("BF16"), SHAPE, row
        )
        for i, row in enumerate(units)
    }


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tensors", type=int, default=40_000, help="tensors (default 40,000)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    options = parser.parse_args()
    old, new = states(options.tensors)
    base = BaseRef(content_id="0" * 64, file="base.ckptz", depth=1)
    jobs = {"lossless": Job(tensors=old), "delta": Job(tensors=new, base=base, bases=old)}
    n_bytes = sum(tensor.n_bytes for tensor in old.values())
    with tempfile.TemporaryDirectory(prefix="ckptz-many-") as folder, Workers() as workers:
        sizes: dict[str, int] = {}

        def save(way: str) -> None:
            with Path(folder, way).open("w+b") as sink:
                sizes[way] = write(sink, jobs[way], workers).stored_bytes

        timings = interleave({way: lambda way=way: timed(lambda: save(way)) for way in jobs}, options.rounds)
    rows: list[Row] = [
        {
            "way": way,
            "tensors": options.tensors,
            "threads": default_jobs(),
            "median MB/s": f"{n_bytes / timing.median / 1e6:.0f}",
            "us a tensor": f"{timing.median / options.tensors * 1e6:.0f}",
            "of raw": f"{sizes[way] / n_bytes:.4f}",
            "target": f">= {TARGETS[way]} MB/s",
            "verdict": verdict(n_bytes / timing.median / 1e6 >= TARGETS[way]),
        }
        for way, timing in timings.items()
    ]
    save_rows("many_tensors", rows)
    finish("many_tensors", machine(), rows)


if __name__ == "__main__":
    main()
