"""Tiles (after TAH-Quant) against uniform levels, AQ-SGD and TopK at equal bytes, on both tasks of the study.

    python -m bench.studies.paper_b.tiles [--seeds N] [--report]

Only activations are compressed, but with TopK, whose gradients take its positions. The GPT is tuned on a
fixed set of 400 windows, three times over, so that AQ-SGD meets each sample again. Runs are kept in
bench/.cache/paper_b. Writes results/paper_b_tiles.csv, paper_b_tiles.json and paper_b_tiles.png; about
ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import functional

from bench.core.measure import CACHE, RESULTS, machine, read_rows, save_rows, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import batches
from bench.studies.paper_b import __main__ as study
from bench.studies.paper_b.__main__ import Config, CutGPT, Cuts
from ckptz.wire import RAW, LinkPolicy, Tiled, TopK, Uniform

N_WINDOWS, EPOCHS, BATCH = 400, 3, 8
WITHIN, SEEDS = 0.01, 3


def policies(bits: int) -> dict[str, LinkPolicy]:
    """Ways to send about bits + 1/8 bits an element; in TopK 8-bit values and a bitmap."""
    tiled, share = bits - 1 / 16, (bits - 7 / 8) / (8 + 1 / 8)
    codecs: dict[str, Any] = {f"uniform, {bits} bits": Uniform(bits)}
    codecs[f"tiles, {bits} bits"] = Tiled(tiled, 64)
    codecs[f"tiles, {bits} bits, not rotated"] = Tiled(tiled, 64, rotate=False)
    rows = {name: LinkPolicy(forward=codec, eval="same") for name, codec in codecs.items()}
    rows[f"AQ-SGD, {bits} bits"] = LinkPolicy(forward=Uniform(bits), feedback="aqsgd")
    top = TopK(round(share, 3), index="bitmap")
    rows[f"TopK, bytes of {bits} bits"] = LinkPolicy(forward=top, backward=top, reuse=True, eval="same")
    return rows


def configs() -> list[Config]:
    """All rows of both tasks."""
    rows = {"none": LinkPolicy(forward=RAW)} | policies(4) | policies(3)
    return [Config(task, name, policy) for task in ("gpt windows", "digits") for name, policy in rows.items()]


def run_gpt(config: Config, seed: int) -> dict[str, Any]:
    """Fine-tune on windows that come again; validation loss in nats."""
    code, prose, held_out = study.texts()
    cuts = Cuts(config.policy, seed)
    model = CutGPT(cuts)
    model.load_state_dict(study.pretrained(code))
    torch.manual_seed(seed)
    windows = next(batches(prose, batch=N_WINDOWS, context=study.GPT.context, seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for ids in torch.randperm(N_WINDOWS).split(BATCH):
            cuts.ids = ids
            optimizer.zero_grad()
            loss_of(model, windows[ids]).backward()
            optimizer.step()
    sent = cuts.bytes_per_element()
    source = batches(held_out, batch=64, context=study.GPT.context, seed=7)
    validation = [next(source) for _ in range(4)]

    def loss() -> float:
        with torch.no_grad():
            return sum(loss_of(model, batch).item() for batch in validation) / len(validation)

    on, off = study.evaluate(cuts, loss)
    return {"on": on, "off": off, "forward": sent[0], "backward": sent[1]}


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """Mean next-byte cross entropy of windows [n, context + 1]."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def cached_run(config: Config, seed: int, *, may_run: bool) -> dict[str, Any] | None:
    """One run, from the cache where it is there."""
    path = CACHE / "paper_b" / f"tiles-{config.key(seed)}.json"
    if not path.exists() and may_run:
        run = run_gpt if config.task == "gpt windows" else study.run_digits
        path.write_text(json.dumps(run(config, seed)))
        print(config.task, config.name, seed, path.read_text(), flush=True)
    return json.loads(path.read_text()) if path.exists() else None


def judged(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Two targets of the GPT: 4-bit tiles near no compression, and below uniform levels."""
    value = {row["config"]: float(str(row["on"])) for row in rows if row["task"] == "gpt windows"}
    for row in rows:
        row |= {"target": "", "verdict": ""}
        if (row["task"], row["config"]) == ("gpt windows", "tiles, 4 bits"):
            mine = value["tiles, 4 bits"]
            holds = mine <= (1 + WITHIN) * value["none"] and mine < value["uniform, 4 bits"]
            row |= {"target": "within 1 % of none, below uniform", "verdict": verdict(holds)}
    return rows


def write_picture() -> None:
    """results/paper_b_tiles.png: loss of the GPT and accuracy on digits, by codec."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
    for axis, task, label in zip(
        axes, ("gpt windows", "digits"), ("validation loss, nats", "accuracy, %"), strict=True
    ):
        rows = [row for row in read_rows("paper_b_tiles") if row["task"] == task]
        values, spread = ([float(row[name]) for row in rows] for name in ("on", "on +-"))
        axis.barh([row["config"] for row in rows], values, xerr=spread)
        axis.set(xlabel=label, title=task, xlim=(0.99 * min(values), 1.005 * max(values)))
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(RESULTS / "paper_b_tiles.png", dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--report", action="store_true", help="only from runs in the cache")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (CACHE / "paper_b").mkdir(parents=True, exist_ok=True)
    results: dict[Config, list[dict[str, Any]]] = {config: [] for config in configs()}
    for seed in range(args.seeds):
        for config, runs in results.items():
            run = cached_run(config, seed, may_run=not args.report)
            runs += [run] if run is not None else []
    rows = [study.summary(config, runs, 4) for config, runs in results.items() if runs]
    save_rows("paper_b_tiles", judged(rows))
    write_picture()
    finish("paper_b_tiles", machine())


if __name__ == "__main__":
    main()
