"""A byte-level GPT that trains in two minutes on two cores, and its data.

The text is the source code of the Python standard library, so nothing is downloaded. Files are assigned to
training or validation by the hash of their name, so the split is the same on every machine.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VALIDATION_SHARE = 16  # one file in sixteen


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of the model; the defaults are those of the demo (3.3 M parameters)."""

    n_layers: int = 4
    width: int = 256
    n_heads: int = 8
    context: int = 128
    vocabulary: int = 256


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, time, 3, self.n_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    """Byte-level language model; `forward` returns logits [batch, time, vocabulary]."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config or GPTConfig()
        self.token = nn.Embedding(self.config.vocabulary, self.config.width)
        self.position = nn.Embedding(self.config.context, self.config.width)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.n_layers))
        self.norm = nn.LayerNorm(self.config.width)
        self.head = nn.Linear(self.config.width, self.config.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss_of(model: nn.Module, batch: Tensor, reduction: str = "mean") -> Tensor:
    """Return the next-byte cross entropy in nats of `batch` [n, context + 1].

    Args:
        model: returns logits [n, context, vocabulary].
        batch: bytes as integers, [n, context + 1].
        reduction: "mean", or "none" for the loss of each byte, [n * context].
    """
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction)


def read_corpus() -> tuple[Tensor, Tensor]:
    """Return (training bytes, validation bytes) of the standard library's modules, both uint8 [n]."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if skipped & set(name.split("/")):
            continue
        digest = hashlib.sha256(name.encode()).digest()
        parts[digest[0] % VALIDATION_SHARE == 0].append(path.read_bytes())
    train, validation = (np.frombuffer(b"".join(p), np.uint8).copy() for p in parts)
    return torch.from_numpy(train), torch.from_numpy(validation)


def batches(data: Tensor, *, batch: int, context: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Yield batches [batch, context + 1] forever; batch i depends only on (seed, i), so runs can resume."""
    step = start
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        offsets = torch.randint(len(data) - context - 1, (batch,), generator=generator)
        yield torch.stack([data[i : i + context + 1] for i in offsets.tolist()]).long()
        step += 1


@torch.no_grad()
def token_losses(model: nn.Module, data: Tensor, *, n_batches: int = 16, batch: int = 32) -> Tensor:
    """Return the loss of each byte in nats [n], over a fixed set of validation batches."""
    model.eval()
    source = batches(data, batch=batch, context=128, seed=7)
    losses = [loss_of(model, next(source), reduction="none") for _ in range(n_batches)]
    model.train()
    return torch.cat(losses)
