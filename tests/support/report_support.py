"""Runs to report on, and a parser of the pages of a report."""

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
    """Return weights and second moments of a few layers, which change a little from step to step."""
    rng, changes = np.random.default_rng(0), np.random.default_rng(step)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(n_layers):
        for kind, shape in KINDS.items():
            name = f"model.layers.{layer}.{kind}"
            drift = 1e-3 * step * changes.normal(size=shape)
            tensors[name] = (rng.normal(0, 0.02, shape) + 0.02 * drift).astype(np.float32)
            tensors[f"{name}.exp_avg_sq"] = rng.random(shape).astype(np.float32) * 1e-6
    tensors["model.embed.weight"] = rng.normal(0, 1, (32, 16)).astype(np.float32)
    return tensors


def error_of(tensors: dict[str, Any]) -> float:
    """Return a quality: 1 for the exact tensors, plus the sum of their square errors."""
    exact = state(200)
    return 1 + sum(float(((tensors[n].numpy() - exact[n]) ** 2).sum()) for n in tensors if n in exact)


BUDGET = ckptz.Budget(error_of, max_drop=0.5)


def a_run(folder: Path) -> Path:
    """Write a full file that a keep rule hides, a delta, and a lossy delta within a budget."""
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
    """The elements of a page with their attributes, the scripts, and the text outside of them."""

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
        """The JSON that the page contains."""
        ((attributes, text),) = [s for s in self.scripts if s[0].get("id") == "numbers"]
        is_packed = attributes.get("data-packed") == "zlib+base64"
        return json.loads(zlib.decompress(base64.b64decode(text)) if is_packed else text)
