"""Five findings of a paper on compressed pipeline links, measured again with the links of ckptz.

    python -m bench.studies.paper_b [--seeds N] [--only digits|gpt] [--report]

Paper: "Activations and Gradients Compression for Model-Parallel Training" (arXiv 2401.07788). Two tasks with
three cuts each: handwritten digits with a small residual network, and a byte-level GPT that was pretrained on
the standard library's source and is fine-tuned on English documentation. Links are simulated by
`ckptz.wire.simulate`; tests compare it with real messages between processes, including sizes.

Runs are cached in bench/.cache/paper_b, so that an interrupted study can continue. Writes
results/paper_b.csv and paper_b.json. About 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import bench.studies.paper_b.experimental  # noqa: F401 - EF mixed
from bench.core.measure import CACHE, machine, save_rows
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches
from ckptz.wire import RAW, LinkPolicy, TopK, Uniform, simulate
from ckptz.wire.endpoint import Link

VERSION = 1  # in the cache keys: a new version ignores cached runs
N_CUTS = 3
EPOCHS, DIGITS_BATCH = 12, 48
GPT = GPTConfig(n_layers=4, width=64, n_heads=4, context=64)
PRETRAIN_STEPS, TUNE_STEPS, GPT_BATCH = 1500, 150, 8


@dataclass(frozen=True, slots=True)
class Config:
    """Task and link policy of one row of the table."""

    task: str
    name: str
    policy: LinkPolicy
    augment: bool = False

    def key(self, seed: int) -> str:
        """Return the name of the cached run."""
        text = f"{VERSION}|{self.task}|{self.policy.to_json()}|{self.augment}|{seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bits(forward: int, backward: int, scale: Any, **more: Any) -> LinkPolicy:
    codecs = [Uniform(b, scale) if b else RAW for b in (forward, backward)]
    return LinkPolicy(forward=codecs[0], backward=codecs[1], eval="same", **more)


def _top(share: float, *, forward: bool = True, backward: bool = True, **more: Any) -> LinkPolicy:
    codec = TopK(share, values=16)
    return LinkPolicy(
        forward=codec if forward else RAW, backward=codec if backward else RAW, eval="same", **more
    )


def digits_configs() -> list[Config]:
    """Return the configs of the image task."""
    rows: dict[str, LinkPolicy] = {"none": LinkPolicy()}
    for fw, bw in ((8, 8), (4, 8), (8, 4), (4, 4), (2, 8), (8, 2), (2, 2)):
        rows[f"fw{fw}-bw{bw}, whole tensor"] = _bits(fw, bw, "tensor")
    for fw, bw in ((4, 4), (2, 8), (8, 2), (2, 2)):
        rows[f"fw{fw}-bw{bw}, block"] = _bits(fw, bw, "block")
    rows["fw8-bw2, block, stochastic"] = _bits(8, 2, "block", rounding="stochastic")
    for percent in (50, 30, 20, 10, 5, 2):
        rows[f"Top{percent}"] = _top(percent / 100)
    rows["Top10, activations only"] = _top(0.1, backward=False)
    rows["Top10, gradients only"] = _top(0.1, forward=False)
    rows["Top10, index reuse"] = _top(0.1, reuse=True)
    rows["Top10, EF21"] = _top(0.1, feedback="ef21")
    rows["Top10, EF"] = _top(0.1, feedback="ef")
    rows["Top10, EF mixed"] = _top(0.1, feedback="ef-mixed")
    plain = [Config("digits", name, policy) for name, policy in rows.items()]
    shifted = {"none": LinkPolicy(), "Top10": _top(0.1), "Top10, EF21": _top(0.1, feedback="ef21")}
    for percent in (50, 30, 20, 10):
        shifted[f"Top{percent}, AQ-SGD"] = _top(percent / 100, feedback="aqsgd")
    return plain + [Config("digits shifted", name, policy, True) for name, policy in shifted.items()]


def gpt_configs() -> list[Config]:
    """Return the configs of the language task."""
    rows: dict[str, LinkPolicy] = {"none": LinkPolicy(), "Top10": _top(0.1)}
    for percent in (50, 30, 20, 10):
        rows[f"Top{percent}, index reuse"] = _top(percent / 100, reuse=True)
    rows["Top10, EF21"] = _top(0.1, feedback="ef21")
    for fw, bw in ((4, 0), (0, 4), (2, 0), (0, 2)):
        rows[f"fw{fw or 32}-bw{bw or 32}, block"] = _bits(fw, bw, "block")
    rows["fw32-bw2, block, stochastic"] = _bits(0, 2, "block", rounding="stochastic")
    rows["fw4-bw32, whole tensor"] = _bits(4, 0, "tensor")
    rows["fw32-bw4, whole tensor"] = _bits(0, 4, "tensor")
    return [Config("gpt", name, policy) for name, policy in rows.items()]


# --- links and evaluation of both tasks ---------------------------------------------------------


class Cuts:
    """The three links of a model; without effect if `on` is False."""

    def __init__(self, policy: LinkPolicy, seed: int) -> None:
        del seed
        self.links = [simulate(policy, src=i, dst=i + 1) for i in range(N_CUTS)]
        for i, link in enumerate(self.links):
            link.link.link = Link(i, i + 1, policy, same_shape=False)
        self.on, self.is_eval, self.ids = True, False, None

    def __call__(self, i: int, x: Tensor) -> Tensor:
        if not self.on:
            return x
        return self.links[i](x, sample_ids=self.ids, is_eval=self.is_eval)

    def bytes_per_element(self) -> list[float]:
        """Return the bytes sent per fp32 element in training: [forward, backward]."""
        out = []
        for direction in (0, 1):
            sent = sum(link.link.link.sent_bytes[direction] for link in self.links)
            raw = sum(link.link.link.raw_bytes[direction] for link in self.links)
            out.append(4 * sent / raw)
        return out


def evaluate(cuts: Cuts, measure: Callable[[], float]) -> tuple[float, float]:
    """Call `measure` with and without compression at inference, and return both values."""
    cuts.is_eval, cuts.on = True, True
    with_links = measure()
    cuts.on = False
    return with_links, measure()


# --- digits -------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A residual block of two convolutions with batch norm and a projection shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """Four residual stages, cut after the first three."""

    def __init__(self, cuts: Cuts) -> None:
        super().__init__()
        self.cuts = cuts
        widths = ((1, 12, 1), (12, 18, 2), (18, 24, 1), (24, 36, 2))
        self.stages = nn.ModuleList(Residual(*w) for w in widths)
        self.head = nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            x = stage(x)
            x = self.cuts(i, x) if i < N_CUTS else x
        return self.head(x.mean(dim=(2, 3)))


def digits_data() -> tuple[Tensor, Tensor]:
    """Return images [1797, 1, 8, 8], 0 to 1, and labels [1797], in a fixed order."""
    from sklearn.datasets import load_digits  # only this task needs it

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.images[order], dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(data.target[order])


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    dy, dx = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return torch.roll(images, (dy, dx), dims=(2, 3))


def run_digits(config: Config, seed: int) -> dict[str, Any]:
    """Train on 1,200 digits; return the accuracy in percent on 597 others, and the bytes per element."""
    torch.manual_seed(seed)
    images, labels = digits_data()
    cuts = Cuts(config.policy, seed)
    model = DigitsNet(cuts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    n_steps = EPOCHS * (1200 // DIGITS_BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=n_steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for ids in torch.randperm(1200, generator=generator).split(DIGITS_BATCH):
            cuts.ids = ids
            batch = _shifted(images[ids], generator) if config.augment else images[ids]
            optimizer.zero_grad()
            functional.cross_entropy(model(batch), labels[ids]).backward()
            optimizer.step()
            schedule.step()
    sent = cuts.bytes_per_element()
    model.eval()

    def accuracy() -> float:
        with torch.no_grad():
            return 100 * float((model(images[1200:]).argmax(1) == labels[1200:]).float().mean())

    on, off = evaluate(cuts, accuracy)
    return {"on": on, "off": off, "forward": sent[0], "backward": sent[1]}


# --- language -----------------------------------------------------------------------------------


class CutGPT(TinyGPT):
    """The GPT, cut after each block but the last."""

    def __init__(self, cuts: Cuts) -> None:
        super().__init__(GPT)
        self.cuts = cuts

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = self.cuts(i, x) if i < N_CUTS else x
        return self.head(self.norm(x))


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Return code for pretraining, and documentation for fine-tuning and for validation, uint8 [n]."""
    root = Path(sysconfig.get_paths()["stdlib"])
    code = b"".join(p.read_bytes() for p in sorted(root.glob("*.py")))
    tree = ast.parse((root / "pydoc_data" / "topics.py").read_text())
    words = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    prose = "\n".join(sorted(words, key=len)).encode()
    parts = (code, prose[: len(prose) * 9 // 10], prose[len(prose) * 9 // 10 :])
    return tuple(torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in parts)  # type: ignore[return-value]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _train(model: nn.Module, data: Tensor, n_steps: int, batch: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = batches(data, batch=batch, context=GPT.context, seed=seed)
    for _ in range(n_steps):
        optimizer.zero_grad()
        _loss(model, next(source)).backward()
        optimizer.step()


def pretrained(code: Tensor) -> dict[str, Tensor]:
    """Return the weights after training on code, which are cached."""
    path = CACHE / "paper_b" / f"pretrained-{VERSION}-{PRETRAIN_STEPS}.pt"
    if not path.exists():
        torch.manual_seed(0)
        cuts = Cuts(LinkPolicy(), 0)
        cuts.on = False
        model = CutGPT(cuts)
        _train(model, code, PRETRAIN_STEPS, 16, 1)
        torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


def run_gpt(config: Config, seed: int) -> dict[str, Any]:
    """Fine-tune on documentation; return the validation loss in nats, and the bytes per element."""
    code, prose, held_out = texts()
    cuts = Cuts(config.policy, seed)
    model = CutGPT(cuts)
    model.load_state_dict(pretrained(code))
    torch.manual_seed(seed)
    _train(model, prose, TUNE_STEPS, GPT_BATCH, 100 + seed)
    sent = cuts.bytes_per_element()

    def loss() -> float:
        source = batches(held_out, batch=GPT_BATCH, context=GPT.context, seed=7)
        with torch.no_grad():
            return float(np.mean([_loss(model, next(source)).item() for _ in range(16)]))

    on, off = evaluate(cuts, loss)
    return {"on": on, "off": off, "forward": sent[0], "backward": sent[1]}


# --- all runs -----------------------------------------------------------------------------------


def cached_run(config: Config, seed: int, *, may_run: bool) -> dict[str, Any] | None:
    """Return the result of a run, trained if it is not cached; None if it is not cached and not `may_run`."""
    path = CACHE / "paper_b" / f"{config.key(seed)}.json"
    if path.exists():
        return json.loads(path.read_text())
    if not may_run:
        return None
    begin = time.perf_counter()
    result = (run_gpt if config.task == "gpt" else run_digits)(config, seed)
    result["seconds"] = time.perf_counter() - begin
    path.write_text(json.dumps(result))
    print(f"{config.task:15} {config.name:40} seed {seed} {result}", flush=True)
    return result


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def summary(config: Config, runs: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Build the row of a config: mean and standard deviation over seeds."""
    digits = 3 if config.task.startswith("gpt") else 2
    row: dict[str, object] = {"task": config.task, "config": config.name, "seeds": len(runs)}
    for key in ("on", "off"):
        values = [run[key] for run in runs]
        row[key] = f"{statistics.mean(values):.{digits}f}"
        row[f"{key} +-"] = f"{_spread(values):.{digits}f}"
    for key in ("forward", "backward"):
        row[f"{key} B/elt"] = f"{statistics.mean(run[key] for run in runs):.3f}"
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("digits", "gpt"))
    parser.add_argument("--report", action="store_true", help="measure nothing, write the cached results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (CACHE / "paper_b").mkdir(parents=True, exist_ok=True)
    configs = [
        c for c in digits_configs() + gpt_configs() if not options.only or c.task.startswith(options.only)
    ]
    results: dict[Config, list[dict[str, Any]]] = {config: [] for config in configs}
    for seed in range(options.seeds):
        for config in configs:
            run = cached_run(config, seed, may_run=not options.report)
            results[config] += [run] if run is not None else []
    rows = [summary(config, runs) for config, runs in results.items() if runs]
    save_rows("paper_b", rows)
    seconds = sum(run["seconds"] for runs in results.values() for run in runs)
    finish("paper_b", machine(), seconds=round(seconds))


if __name__ == "__main__":
    main()
