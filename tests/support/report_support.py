"""Stores to report on, and what a page says when it is read as a browser would."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import ckptz

KINDS = {"attn.qkv.weight": (192, 64), "mlp.up.weight": (256, 64), "norm.weight": (64,)}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"


def state(step: int, n_layers: int = 3) -> dict[str, np.ndarray]:
    """Weights and second moments of a few layers, which move a little from step to step."""
    rng, moves = np.random.default_rng(0), np.random.default_rng(step)
    made: dict[str, np.ndarray] = {}
    for layer in range(n_layers):
        for kind, shape in KINDS.items():
            name = f"model.layers.{layer}.{kind}"
            drift = 1e-3 * step * moves.normal(size=shape)
            made[name] = (rng.normal(0, 0.02, shape) + 0.02 * drift).astype(np.float32)
            made[f"{name}.exp_avg_sq"] = rng.random(shape).astype(np.float32) * 1e-6
    made["model.embed.weight"] = rng.normal(0, 1, (32, 16)).astype(np.float32)
    return made


def error_of(tensors: dict[str, Any]) -> float:
    """A quality that is near 1 for the exact tensors, and falls with their error."""
    exact = state(200)
    return 1 + sum(float(((tensors[n].numpy() - exact[n]) ** 2).sum()) for n in tensors if n in exact)


BUDGET = ckptz.Budget(error_of, max_drop=0.5)


def a_run(folder: Path) -> Path:
    """A full file, a delta, and a lossy delta that keeps a budget; the full file is hidden by a keep rule."""
    folder.mkdir(parents=True, exist_ok=True)
    base = None
    for step in (0, 100, 200):
        plain, packed = folder / f"{step}.safetensors", folder / f"step-{step:08d}.ckptz"
        save_file(state(step), plain)
        lossy = ckptz.SearchOptions(budgets=(BUDGET,), template=ckptz.KMeans(), max_evaluations=4)
        search = lossy if step == 200 else None
        ckptz.compress(plain, packed, base=base, step=step, jobs=1, search=search)
        plain.unlink()
        base = packed
    (folder / ".step-00000000.ckptz.hidden").touch()
    return folder


@dataclass
class Page(HTMLParser):
    """Elements of a page: how many of each, their attributes, the text of scripts and of everything else."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[tuple[dict[str, str | None], str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, html: str) -> Page:
        page = cls()
        page.feed(html)
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if self.cdata_elem == "script":
            self.scripts.append((attributes, data))
        elif tag != "style":
            self.text += f"{data} "

    @property
    def numbers(self) -> Any:
        """The JSON within."""
        ((attributes, text),) = [s for s in self.scripts if s[0].get("id") == "numbers"]
        is_packed = attributes.get("data-packed") == "zlib+base64"
        return json.loads(zlib.decompress(base64.b64decode(text)) if is_packed else text)
