"""LoCo's 4-bit gradients against the communication hooks of torch: loss and bytes at equal steps.

    python -m bench.studies.loco [--steps N] [--seeds N] [--ranks 2 4] [--report]

A byte-level GPT of 0.2 M parameters is trained on the standard library's source with DistributedDataParallel
over gloo, with real messages. Bytes are those that each rank sends in a step. LoCo counts them; for torch's
hooks they are computed from the sizes of the collectives, with all-reduce and all-gather as rings. Runs are
cached in bench/.cache/loco. Writes results/loco.csv and loco.json; about half an hour on one core. The
quantizing hooks of torch (`quantization_hooks`) are left out, because those of torch 2.13 fail over gloo.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.core.measure import CACHE, machine, save_rows, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, loss_of, read_corpus
from ckptz.wire import LoCo, Tiled, loco_hook

VERSION = 1  # in the cache keys: a new version ignores cached runs
SHAPE = GPTConfig(n_layers=4, width=64, n_heads=4, context=64)
BATCH, RATE = 4, 2e-3  # sequences of each rank in a step, learning rate
WITHIN, FEWER = 0.005, 7.0
FP32, OURS = "fp32 all-reduce", "LoCo hook, 4 bits"

Hook = tuple[Any, Callable[..., Any]]


def _power(rank: int) -> Hook:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=10)
    return state, powerSGD_hook.powerSGD_hook


HOOKS: dict[str, Callable[[], Hook]] = {
    FP32: lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "PowerSGD, rank 1": lambda: _power(1),
    "PowerSGD, rank 4": lambda: _power(4),
    OURS: lambda: (LoCo(), loco_hook),
    "the same, error averaged at 0.2": lambda: (LoCo(decay=0.2), loco_hook),
    "the same, in rotated tiles": lambda: (LoCo(Tiled(4, 256)), loco_hook),
}


class Counter:
    """Counts the bytes that a rank sends through collectives, computed as for ring algorithms."""

    def __init__(self, n_ranks: int) -> None:
        self._share, self.n_bytes = (n_ranks - 1) / n_ranks, 0.0
        self._n_ranks, self._real = n_ranks, (dist.all_reduce, dist.all_gather)

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Count and call `dist.all_reduce`."""
        self.n_bytes += 2 * self._share * tensor.nbytes
        return self._real[0](tensor, *args, **kwargs)

    def all_gather(self, out: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Count and call `dist.all_gather`."""
        self.n_bytes += (self._n_ranks - 1) * tensor.nbytes
        return self._real[1](out, tensor, *args, **kwargs)


def train(name: str, n_steps: int, seed: int, rank: int, n_ranks: int) -> dict[str, Any]:
    """Train as one rank; return the held-out loss, the bytes that this rank sent per step, and all losses."""
    code, held_out = read_corpus()
    torch.manual_seed(seed)
    model = TinyGPT(SHAPE)
    parallel = DistributedDataParallel(model)
    state, hook = HOOKS[name]()
    parallel.register_comm_hook(state, hook)
    counter, losses = Counter(n_ranks), []
    with ExitStack() as stack:
        if not isinstance(state, LoCo):
            for collective in ("all_reduce", "all_gather"):
                stack.enter_context(mock.patch.object(dist, collective, getattr(counter, collective)))
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=RATE)
        source = batches(code, batch=BATCH, context=SHAPE.context, seed=100 + rank + 1000 * seed)
        for _ in range(n_steps):
            optimizer.zero_grad()
            loss = loss_of(parallel, next(source))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    n_bytes = state.sent_bytes() if isinstance(state, LoCo) else counter.n_bytes
    validation = batches(held_out, batch=64, context=SHAPE.context, seed=7)
    with torch.no_grad():
        end = float(np.mean([loss_of(model, next(validation)).item() for _ in range(4)]))
    return {"loss": end, "bytes": n_bytes / n_steps, "losses": losses}


def path_of(name: str, n_steps: int, n_ranks: int, seed: int) -> Path:
    """Return the path of a cached run."""
    digest = hashlib.sha256(f"{VERSION}|{name}|{n_steps}|{n_ranks}|{seed}".encode()).hexdigest()[:16]
    return CACHE / "loco" / f"{digest}.json"


def work(rank: int, n_ranks: int, n_steps: int, n_seeds: int, store: str) -> None:
    """Run all training runs that are not cached, as one rank."""
    torch.set_num_threads(1)
    shared = dist.FileStore(store, n_ranks)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=n_ranks)
    cases = [(name, seed) for seed in range(n_seeds) for name in HOOKS]
    missing = [case for case in cases if not path_of(case[0], n_steps, n_ranks, case[1]).exists()]
    dist.barrier()
    for name, seed in missing:
        result = train(name, n_steps, seed, rank, n_ranks)
        if rank == 0:
            path_of(name, n_steps, n_ranks, seed).write_text(json.dumps(result))
            print(n_ranks, name, seed, result["loss"], result["bytes"], flush=True)
    dist.destroy_process_group()


def rows_of(n_steps: int, n_ranks: int, n_seeds: int) -> list[dict[str, object]]:
    """Build the rows for a number of ranks: means over the seeds that are cached for all hooks."""
    paths = [{name: path_of(name, n_steps, n_ranks, seed) for name in HOOKS} for seed in range(n_seeds)]
    seeds = [
        {name: json.loads(path.read_text()) for name, path in by_hook.items()}
        for by_hook in paths
        if all(path.exists() for path in by_hook.values())
    ]
    rows: list[dict[str, object]] = []
    for name in HOOKS if seeds else ():
        losses = [runs[name]["loss"] for runs in seeds]
        gaps = [runs[name]["loss"] / runs[FP32]["loss"] - 1 for runs in seeds]
        n_bytes = float(np.mean([runs[name]["bytes"] for runs in seeds]))
        gap, fewer = float(np.mean(gaps)), float(np.mean([runs[FP32]["bytes"] for runs in seeds])) / n_bytes
        row: dict[str, object] = {"ranks": n_ranks, "hook": name, "seeds": len(seeds)}
        row |= {"loss": f"{np.mean(losses):.4f}", "over fp32": f"{gap:+.2%}", "+-": f"{np.std(gaps):.2%}"}
        row |= {"bytes a step": round(n_bytes), "fewer": f"{fewer:.2f}", "target": "", "verdict": ""}
        if name == OURS:
            row["target"] = "within 0.5 % of fp32, 7x fewer"
            row["verdict"] = verdict(gap <= WITHIN and fewer >= FEWER)
        rows.append(row)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--report", action="store_true", help="measure nothing, write the cached results")
    options = parser.parse_args()
    (CACHE / "loco").mkdir(parents=True, exist_ok=True)
    rows = []
    for n_ranks in options.ranks:
        if not options.report:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(work, (n_ranks, options.steps, options.seeds, f"{folder}/store"), n_ranks)
        rows += rows_of(options.steps, n_ranks, options.seeds)
    save_rows("loco", rows)
    finish("loco", machine(), steps=options.steps)


if __name__ == "__main__":
    main()
