"""What tests of tensors on a device share: tensors, runs of files, and what is in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptz.torch
from ckptz import LOSSLESS, KeepPolicy
from ckptz.codec.plan import Plan
from ckptz.torch import save_file

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_CHUNK = 512
KEPT = KeepPolicy(last=3)


def moved(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def back(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()


def cut_chunks(n_units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptz.") and hasattr(module, "CHUNK_UNITS"):
            monkeypatch.setattr(module, "CHUNK_UNITS", n_units)


def not_asked(index: int, units: Any) -> None:
    pytest.fail(f"chunk {index} was decoded on the host")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2 * SMALL_CHUNK + 37, generator=generator) * 0.02
    rare = torch.where(weights.abs() > 0.05, (1e5 * weights).to(torch.int64) % 256, 0)
    return {
        "bf16": weights.bfloat16(),
        "f32": weights[: SMALL_CHUNK + 8],
        "few values": torch.arange(700, dtype=torch.float32) % 3,  # zstd
        "nearly zero": torch.nn.functional.pad(weights[:4].half(), (0, 900)),  # sparse and constant
        "integers": torch.arange(900, dtype=torch.int64),
        "bytes": torch.arange(800, dtype=torch.uint8) % 7,
        "rare": rare.to(torch.uint8),  # sparse, where zstd is not tried
        "one": torch.ones(1, dtype=torch.bfloat16),
        "none": torch.ones(0),
    }


def by_class() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and what they become: steps that follow from the magnitude, so that classes pay."""
    generator = torch.Generator().manual_seed(3)
    magnitude, mantissa, low = (torch.randint(n, (700,), generator=generator) for n in (16, 60, 2))
    units = (112 + magnitude) * 128 + mantissa
    steps = torch.randperm(16, generator=generator)[magnitude] * 4 + low
    first, second = (each.to(torch.int16).view(torch.bfloat16) for each in (units, units + steps))
    return first, second


def three_steps() -> list[dict[str, torch.Tensor]]:
    """States one after another: many values change, few, and again all of them."""
    generator = torch.Generator().manual_seed(11)
    first = {name: tensors()[name] for name in ("bf16", "f32", "few values", "bytes", "none")}
    first["f64"] = first["f32"][:260].double()
    first["by class"], then = by_class()
    second = {name: tensor.clone() for name, tensor in first.items()}
    for name in ("bf16", "f32", "f64"):
        second[name] *= 1 + 0.01 * torch.randn(second[name].shape, generator=generator)
    second["bytes"][::3] += 1
    second["by class"] = then
    third = {name: tensor.clone() for name, tensor in second.items()}
    third["bf16"][5::97] += 1
    third["f32"] += 0.001 * torch.randn(third["f32"].shape, generator=generator)
    return [first, second, third]


def chain(folder: Path, config: Any = LOSSLESS) -> list[Path]:
    """The files of the three steps, each against the one before, written from host memory."""
    paths = [folder / f"{i}.ckptz" for i in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckptz.torch, "lives_elsewhere", lambda tensor: False)
        for i, state in enumerate(three_steps()):
            save_file(state, paths[i], base=paths[i - 1] if i else None, config=config)
    return paths


def kinds_of(plan: Plan) -> set[str]:
    """Name what a device has code of its own for in a lossy frame."""
    if plan.quant_map is None:
        return set()
    found = {plan.predictor.name, *(type(rule).__name__ for rule in plan.rules)}
    return found | ({"escape"} if plan.quant_map.escape_code is not None else set())


def moved_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().to(DEVICE) for name, tensor in state.items()}


def holds(live: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(live[name].cpu(), tensor) for name, tensor in state.items())
