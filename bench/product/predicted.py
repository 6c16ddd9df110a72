"""Accuracy of the sizes that dry runs predict, and of files with a target size.

    python -m bench.product.predicted [--jobs N] [--only MODEL]

Four models with three methods: the weights of a sentence encoder in fp32 and in bf16, a training state of a
small GPT (fp32 weights, both moments of Adam), and its bf16 weights as a delta to the previous save. Seconds
are CPU seconds of a dry run with compiled kernels, which other programs affect less than wall time.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.numpy import save_file

from bench.core.measure import (
    CACHE,
    RESULTS,
    Row,
    cpu_seconds,
    machine,
    misses,
    parser_of,
    read_rows,
    save_rows,
    verdict,
)
from bench.core.report import finish
from bench.core.sources import Tensors, as_bf16, model_path, read_tensors, run_pairs
from ckptz import LOSSLESS, Grid, KMeans, compress
from ckptz.codec.method import Method
from ckptz.verbs.compress import CompressReport

METHODS: Final[tuple[Method, ...]] = (LOSSLESS, KMeans(levels=16), Grid())
GRID, KMEANS = Grid.name, KMeans.name
TARGETS: Final = {  # within reach of the method: k-means keeps moments exact and has at least two levels
    "sentence encoder, fp32": {KMEANS: ("10x", "20x"), GRID: ("10x", "20x")},
    "sentence encoder, bf16": {KMEANS: ("6x", "10x"), GRID: ("6x", "10x")},
    "GPT in training, fp32 with moments": {KMEANS: ("1.5x",), GRID: ("20x", "40x")},
    "GPT, bf16, against the save before": {KMEANS: ("6x", "8x"), GRID: ("10x", "20x")},
}
ERROR_TARGET: Final = 5  # percent
SECONDS_TARGET: Final = 5.0  # of a file of 90 MB
SHARE_TARGET: Final = 99.0  # least size of a file, in percent of its target size; 100 at most
STATE_STEPS: Final = 60
TABLES: Final = ("dry_run", "target_size")


@dataclass(frozen=True)
class Model:
    """A file of weights or of a state, and the file of its base if it is stored as a delta."""

    name: str
    path: Path
    base: Path | None = None


def models(folder: Path) -> Iterator[Model]:
    """Write the files of the models and yield each model."""
    yield Model("sentence encoder, fp32", model_path())
    bf16 = folder / "encoder-bf16.safetensors"
    _save(as_bf16(read_tensors(model_path(), "F32")), bf16)
    yield Model("sentence encoder, bf16", bf16)
    yield Model("GPT in training, fp32 with moments", _state())
    _, base, current = next(pair for pair in run_pairs() if pair[0] == "training 0350 to 0420")
    yield Model("GPT, bf16, against the save before", current, base)


def _save(tensors: Tensors, path: Path) -> None:
    import ml_dtypes

    save_file({name: t.flat.view(ml_dtypes.bfloat16).reshape(t.shape) for name, t in tensors.items()}, path)


def _state() -> Path:
    """Train a small GPT, save its weights and moments, and return the path; the file is cached."""
    import torch
    from safetensors.torch import save_file as save_torch

    from bench.core.tiny_gpt import TinyGPT, batches, loss_of, read_corpus

    path = CACHE / f"state-{STATE_STEPS}.safetensors"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, (train, _) = TinyGPT(), read_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    source = batches(train, batch=16, context=128, seed=1)
    for _ in range(STATE_STEPS):
        optimizer.zero_grad()
        loss_of(model, next(source)).backward()
        optimizer.step()
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{name}.{key}"] = optimizer.state[parameter][key]
    save_torch(state, path)
    return path


def _compressed(model: Model, config: Method, jobs: int, base: Path | None, **more: Any) -> CompressReport:
    [report] = compress(model.path, config=config, base=base, jobs=jobs, force=True, **more)
    return report


def dry_rows(model: Model, base: Path | None, folder: Path, jobs: int) -> Iterator[Row]:
    """Predict the size of a file with each method, write the file, and yield a row that compares both."""
    for config in METHODS:
        predict = functools.partial(_compressed, model, config, jobs, base, dry_run=True)
        predict()  # compiles kernels
        predicted, seconds = cpu_seconds(predict)
        written = _compressed(model, config, jobs, base, output=folder / "out.ckptz")
        error = 100 * (predicted.stored_bytes / written.stored_bytes - 1)
        allowed = SECONDS_TARGET * max(model.path.stat().st_size / 90e6, 1)
        yield {
            "model": model.name,
            "method": written.method,
            "MB": f"{model.path.stat().st_size / 1e6:.1f}",
            "written, MB": f"{written.stored_bytes / 1e6:.3f}",
            "predicted, MB": f"{predicted.stored_bytes / 1e6:.3f}",
            "error, %": f"{error:+.2f}",
            "dry run, CPU s": f"{seconds:.2f}",
            "target": f"within {ERROR_TARGET} %, below {SECONDS_TARGET:.0f} s",
            "verdict": verdict(abs(error) <= ERROR_TARGET and seconds < allowed),
        }


def target_rows(model: Model, base: Path | None, folder: Path, jobs: int) -> Iterator[Row]:
    """Write files with target sizes, and yield a row that compares each size with its target."""
    for config in METHODS[1:]:
        for target in TARGETS[model.name][config.name]:
            report = _compressed(model, config, jobs, base, output=folder / "out.ckptz", target_size=target)
            share = 100 * report.stored_bytes * float(target[:-1]) / report.tensor_bytes
            yield {
                "model": model.name,
                "method": report.method,
                "asked for": target,
                "written, MB": f"{report.stored_bytes / 1e6:.3f}",
                "of the target, %": f"{share:.2f}",
                "target": f"from {SHARE_TARGET:.0f} to 100 %",
                "verdict": verdict(SHARE_TARGET <= share <= 100),
            }


def previous_rows(name: str) -> list[Row]:
    """Read the rows of a table, or return no rows if it does not exist."""
    return [*read_rows(name)] if (RESULTS / f"{name}.csv").exists() else []


def main() -> int:
    """Run the command line; return 1 if a target was missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", choices=TARGETS, help="measure one model, and keep the rows of the others")
    options = parser.parse_args()
    jobs, measured = options.jobs, {options.only} if options.only else {*TARGETS}
    dry, sized = ([row for row in previous_rows(name) if row["model"] not in measured] for name in TABLES)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for model in models(folder):
            if model.name not in measured:
                continue
            base = None
            if model.base is not None:
                base = folder / "base.ckptz"
                compress(model.base, base, jobs=jobs)
            for row in dry_rows(model, base, folder, jobs):
                dry.append(row)
                print(row, flush=True)
            for row in target_rows(model, base, folder, jobs):
                sized.append(row)
                print(row, flush=True)
            for name, rows in zip(TABLES, (dry, sized), strict=True):
                save_rows(name, sorted(rows, key=lambda row: [*TARGETS].index(str(row["model"]))))
    finish("predicted", machine(), [*dry, *sized])
    return 1 if misses([*dry, *sized]) else 0


if __name__ == "__main__":
    sys.exit(main())
