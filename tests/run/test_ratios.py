"""Ratios of runs, compared with an independent count: bytes on disk and bytes of the restored steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open as plain_open
from safetensors.torch import save_file as save_plain_file
from torch import nn

import ckptz
from ckptz import Checkpointer, Grid, KeepPolicy, KeepRules, KMeans
from ckptz.integrations.linked import Chain, ChainOptions, job_of
from ckptz.sync import Publisher
from ckptz.torch import save_file
from ckptz.words import format_reduction
from tests.support.cli_support import ckptz as program

LOSSY = Grid(min_elements=1)
Runs = Callable[[Path], list[Path]]


def trained(folder: Path, n_steps: int = 4, **options: Any) -> list[Path]:
    """Train with a Checkpointer and return the files that a user can restore."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8))
    if options.get("trainable_only"):
        model[0].requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    if "base" in options:
        save, options["base"] = options["base"], folder.parent / "base.safetensors"
        save(model.state_dict(), options["base"])
    with Checkpointer(folder, model, optimizer, jobs=1, background=False, **options) as checkpointer:
        for step in range(1, n_steps + 1):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            checkpointer.save(step)
        weights = [folder / f"step-{step:08}.ckptz" for step in checkpointer.weights_steps()]
        states = [folder / f"step-{step:08}.state.ckptz" for step in checkpointer.steps()]
    return [*weights, *states]


def plain_chain(folder: Path, **options: Any) -> list[Path]:
    """Return the chain that `compress` writes from plain files."""
    sources, state = [], torch.randn(64, 64)
    for step in (1, 2, 3):
        state = state + 0.01 * torch.randn(64, 64)
        path = folder.parent / f"{folder.name}-step-{step}.safetensors"
        save_plain_file({"w": state, "b": torch.ones(64)}, path)
        sources.append(path)
    return [Path(report.output) for report in ckptz.compress(sources, folder, chain=True, **options)]


def rebased(folder: Path) -> list[Path]:
    files = plain_chain(folder)
    ckptz.rebase(files[-1])
    return files


def linked(folder: Path) -> list[Path]:
    """Write a chain as the adapters of frameworks do, deleting older folders; return the remaining files."""
    chain, state = Chain(ChainOptions(config=LOSSY, jobs=1)), torch.randn(64, 64)
    files = [folder / f"checkpoint-{step}" / "model.ckptz" for step in (1, 2, 3, 4)]
    for i, path in enumerate(files):
        state = state + 0.01 * torch.randn(64, 64)
        chain.write(path, job_of({"weight": state, "epoch": i}))
        if i > 1:
            chain.remove(files[i - 2])
    return files[-2:]


NONE_EXACT = KeepPolicy(last=None, exact=0)
WEIGHTS_LONGER = KeepPolicy(last=1, weights=KeepRules(last=3))


def published(folder: Path) -> list[Path]:
    """Publish weights and return a file per step; some steps have a delta and a full file."""
    publisher, state = Publisher(folder, full_every=2, keep_full=9, jobs=1), torch.randn(64, 64)
    for step in range(1, 6):
        state = state + 0.01 * torch.randn(64, 64)
        publisher.publish({"weight": state}, step)
    return [min(folder.glob(f"step-{step:06}*.ckptz")) for step in range(1, 6)]


RUNS: dict[str, Runs] = {
    "all kept, lossless": lambda folder: trained(folder, keep=KeepPolicy(last=None)),
    "two kept, on a grid": lambda folder: trained(folder, 6, config=LOSSY, keep=KeepPolicy(last=2)),
    "weights kept longer": lambda folder: trained(folder, 6, config=LOSSY, keep=WEIGHTS_LONGER),
    "two exact": lambda folder: trained(folder, config=LOSSY, keep=KeepPolicy(last=None, exact=2)),
    "k-means, none exact": lambda folder: trained(folder, config=KMeans(min_elements=1), keep=NONE_EXACT),
    "a fine-tune": lambda folder: trained(folder, base=save_plain_file),
    "a fine-tune of what is packed": lambda folder: trained(folder, base=save_file),
    "an adapter": lambda folder: trained(folder, trainable_only=True, config=LOSSY),
    "a chain on a grid": lambda folder: plain_chain(folder, config=LOSSY),
    "a file that stands alone": rebased,
    "linked files": linked,
    "published weights": published,
}


@pytest.mark.parametrize("name", RUNS)
def test_log_and_report_say_what_a_count_from_outside_says(
    name: str, tmp_path: Path, deltas_at_any_cost: None
) -> None:
    folder = tmp_path / "run"
    files = RUNS[name](folder)
    raw = 0
    for i, file in enumerate(files):
        ckptz.restore(file, tmp_path / f"{i}.safetensors", to="safetensors")
        with plain_open(tmp_path / f"{i}.safetensors", "pt") as restored:
            raw += sum(restored.get_tensor(key).nbytes for key in list(restored.keys()))
    sizes = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*.ckptz")}
    stored = sum(sizes.values())
    report = ckptz.log(folder)
    assert (report.tensor_bytes, report.stored_bytes) == (raw, stored)
    assert report.ratio == raw / stored
    printed = json.loads(program("log", folder, "--json").stdout)
    assert (printed["tensor_bytes"], printed["stored_bytes"]) == (raw, stored)
    assert f"{stored / raw:.4f} of raw" in program("log", folder).stdout.splitlines()[-1]
    assert f"How much smaller {format_reduction(raw, stored)}" in words_of(ckptz.report(folder).html)


def words_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", html))
