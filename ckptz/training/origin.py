"""Pretrained weights of a run: a file outside the run, which may be the base of its full files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckptz.errors import ConfigError
from ckptz.format.suffixes import PLAIN_SUFFIX, SUFFIX
from ckptz.state.torch import torch_dtype
from ckptz.store.resolve import Path_, open_checkpoint
from ckptz.training.snapshot import MODEL


def origin_of(base: Path_, model: Mapping[str, Any]) -> Path:
    """Return the path of the file with the pretrained weights.

    Args:
        base: the file, or a folder with one file of weights.
        model: the model's state by name.

    Raises:
        ConfigError: not one full checkpoint file, or one without a matrix of the model's dtype and shape.
        FileNotFoundError: no such file.
        FormatError: the file is damaged.
    """
    path = Path(os.fspath(base))
    if path.is_dir():
        files = [file for suffix in (PLAIN_SUFFIX, SUFFIX) for file in sorted(path.glob(f"*{suffix}"))]
        if len(files) != 1:
            raise ConfigError(
                f"{path}: a base is one file, and this folder has {len(files)}; name one, or compress the "
                f"folder and name its {SUFFIX} file"
            )
        path = files[0]
    with contextlib.closing(open_checkpoint(path)) as opened:
        if opened.depth:
            raise ConfigError(
                f"{path}: is a delta, and base= needs a full checkpoint; restore it to a "
                f"{PLAIN_SUFFIX} file and name that"
            )
        stored = {(n, torch_dtype(s.dtype), tuple(s.shape)) for n, s in opened.tensors.items()}
    tensors = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.dim() > 1} or tensors
    wanted = {(f"{p}{n}", t.dtype, tuple(t.shape)) for n, t in tensors.items() for p in ("", f"{MODEL}.")}
    if stored.isdisjoint(wanted):
        such = next((f", such as {n!r} as {t.dtype} {list(t.shape)}" for n, t in tensors.items()), "")
        raise ConfigError(
            f"{path}: has none of the model's tensors{such}; name the weights that training began from"
        )
    return path
