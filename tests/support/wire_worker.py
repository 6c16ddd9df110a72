"""One rank of a two-process pipeline; `test_wire_pipeline.py` starts it and reads its JSON.

    python -m tests.support.wire_worker TASK RANK STORE OUT

Every scenario trains a small model over gloo links; the last rank also trains the same model in one process
with `simulate`.
"""

import dataclasses
import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from ckptz.wire import LinkPolicy, TopK, Uniform, simulate
from ckptz.wire.link import DistributedLink, TensorLink
from ckptz.wire.stage import CompressedPipelineStage

WIDTH, BATCH, N_MICRO, N_STEPS = 256, 64, 4, 3
Q4, Q8, TOP = Uniform(4), Uniform(8), TopK(0.1)

POLICIES: dict[str, LinkPolicy] = {
    "raw": LinkPolicy(),
    "q4-q8": LinkPolicy(forward=Q4, backward=Q8),
    "q8-q2-random": LinkPolicy(forward=Q8, backward=Uniform(2), rounding="stochastic"),
    "q3-sample": LinkPolicy(forward=Uniform(3, "sample"), backward=Uniform(6, "tensor")),
    "q2-rans": LinkPolicy(forward=Uniform(2, rans=True), backward=Uniform(4, rans=True)),
    "top10": LinkPolicy(forward=TOP, backward=TopK(0.1, values=16)),
    "top2-rice": LinkPolicy(forward=TopK(0.02), backward=TopK(0.02)),
    "top10-reuse": LinkPolicy(forward=TOP, backward=TOP, reuse=True),
    "ef21": LinkPolicy(forward=TOP, backward=TOP, feedback="ef21", warmup_steps=1),
    "ef": LinkPolicy(forward=TOP, backward=TOP, feedback=(None, "ef")),
    "aqsgd": LinkPolicy(forward=Uniform(2), backward=Q8, feedback="aqsgd"),
}


def layer(seed: int, outputs: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, outputs), nn.Tanh())


class TwoOutputs(nn.Module):
    """A stage with two outputs, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layer(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), torch.arange(x.shape[0])


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layer(1)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.body(x) + index[:, None]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def digest(modules: list[nn.Module]) -> str:
    values = [p.detach().numpy().tobytes() for m in modules for p in m.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


class Run:
    """The stages of this rank, trained by a schedule."""

    def __init__(self, policy: LinkPolicy | None, schedule: str, rank: int, modules: list[nn.Module]) -> None:
        self.rank, n_stages = rank, len(modules)
        mine = {2: [rank], 4: [rank, 3 - rank] if schedule == "zbv" else [rank, rank + 2]}[n_stages]
        self.modules = [modules[i] for i in mine]
        make: Any = PipelineStage if policy is None else CompressedPipelineStage
        options = {} if policy is None else {"policy": policy}
        pairs = zip(self.modules, mine, strict=True)
        self.stages = [make(m, i, n_stages, torch.device("cpu"), **options) for m, i in pairs]
        kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
        kinds |= {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}
        stages = self.stages if n_stages == 4 else self.stages[0]
        self.schedule = kinds[schedule](stages, N_MICRO, loss_fn=loss_of, scale_grads=True)
        self.optimizer = torch.optim.SGD([p for m in self.modules for p in m.parameters()], lr=0.1)
        self.has_last = n_stages - 1 in mine
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        x, target = batch(number)
        for stage in self.stages:
            if isinstance(stage, CompressedPipelineStage):
                stage.set_batch_ids(torch.arange(BATCH) + BATCH * (number % 2), N_MICRO)
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (x,) if self.stages[0].is_first else ()
        if self.has_last:
            self.schedule.step(*inputs, target=target, losses=losses)
        else:
            self.schedule.step(*inputs)
        self.losses += [loss.item() for loss in losses]
        self.optimizer.step()

    def evaluate(self) -> list[float]:
        x, target = batch(99)
        inputs = (x,) if self.stages[0].is_first else ()
        losses: list[Tensor] = []
        if self.has_last:
            self.schedule.eval(*inputs, target=target, losses=losses)
        else:
            self.schedule.eval(*inputs)
        return [loss.item() for loss in losses]


def simulated(policy: LinkPolicy, modules: list[nn.Module], n_steps: int, use_torch: bool) -> Any:
    """Train the same model in one process, and return (losses, digest of each module)."""
    link = simulate(policy, n_microbatches=N_MICRO, use_torch=use_torch)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    losses = []
    for number in range(n_steps):
        x, target = batch(number)
        optimizer.zero_grad()
        micro = zip(x.tensor_split(N_MICRO), target.tensor_split(N_MICRO), range(N_MICRO), strict=True)
        graph = []
        for part, expected, i in micro:
            ids = torch.arange(BATCH).tensor_split(N_MICRO)[i] + BATCH * (number % 2)
            graph.append(loss_of(modules[1](link(modules[0](part), sample_ids=ids)), expected))
        for loss in graph:
            loss.backward()
        for module in modules:
            for p in module.parameters():
                p.grad.div_(N_MICRO)
        losses += [loss.item() for loss in graph]
        optimizer.step()
    return losses, [digest([m]) for m in modules]


def train(policy: LinkPolicy | None, schedule: str, rank: int, n_stages: int = 2) -> dict[str, Any]:
    run = Run(policy, schedule, rank, [layer(i) for i in range(n_stages)])
    for number in range(N_STEPS):
        run.step(number)
    out: dict[str, Any] = {"losses": run.losses, "digest": digest(run.modules)}
    if schedule != "zbv":  # torch 2.13 cannot evaluate V schedules
        out["eval"] = run.evaluate()
    if policy is not None:
        out["bytes"], out["notes"] = run.stages[0].wire_bytes(), run.stages[0].wire_notes()
    return out


def scenarios(rank: int, out: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"stock": train(None, "1f1b", rank)}
    small = dataclasses.replace(POLICIES["q4-q8"], min_elements=2 * BATCH // N_MICRO * WIDTH)
    results["small"] = train(small, "1f1b", rank)
    for name, policy in POLICIES.items():
        results[f"{name} gpipe"] = train(policy, "gpipe", rank)
        results[f"{name} 1f1b"] = train(policy, "1f1b", rank)
    results["stock interleaved"] = train(None, "interleaved", rank, 4)
    results["raw interleaved"] = train(POLICIES["raw"], "interleaved", rank, 4)
    results["q4-q8 interleaved"] = train(POLICIES["q4-q8"], "interleaved", rank, 4)
    results["stock zbv"] = train(None, "zbv", rank, 4)
    results["raw zbv"] = train(POLICIES["raw"], "zbv", rank, 4)
    results["q4-q8 zbv"] = train(POLICIES["q4-q8"], "zbv", rank, 4)
    modules = [TwoOutputs(), TwoInputs()]
    run = Run(POLICIES["q4-q8"], "1f1b", rank, modules)
    for number in range(N_STEPS):
        run.step(number)
    results["two tensors"] = {"losses": run.losses, "digest": digest(run.modules)}
    if rank == 1:
        for i, (name, policy) in enumerate(POLICIES.items()):
            losses, digests = simulated(policy, [layer(0), layer(1)], N_STEPS, use_torch=i % 2 == 1)
            results[f"{name} simulated"] = {"losses": losses, "digests": digests}
    results["pair"] = plain_pair(rank)
    results["straight"] = resume(rank, out, save=True)
    return results


def plain_pair(rank: int) -> bool:
    """Use `send` and `recv` without a schedule, for messages of variable and fixed length."""
    equal = True
    for fixed in (False, True):
        link = DistributedLink(0, 1, LinkPolicy(forward=TopK(0.01)), 1 - rank, fixed=fixed)
        twin = TensorLink(0, 1, LinkPolicy(forward=TopK(0.01)), fixed=fixed)
        for step in range(3):
            x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            if rank == 0:
                link.send(x)
            else:
                received = link.recv((8, 1024), torch.bfloat16)
                from_twin = twin.simulate(*expected_of(x, step))
                equal = equal and torch.equal(received, from_twin)
    return equal


def expected_of(x: Tensor, step: int) -> Any:
    from ckptz.wire.header import Direction
    from ckptz.wire.state import MessageKey

    return Direction.FORWARD, x, MessageKey(step)


def resume(rank: int, out: Path, *, save: bool) -> dict[str, Any]:
    """Train four steps, with or without a checkpoint after two, or the last two from a checkpoint."""
    results = {}
    for name in ("ef21", "aqsgd"):
        run = Run(POLICIES[name], "1f1b", rank, [layer(0), layer(1)])
        path = out / f"{name}-{rank}.npz"
        weights = out / f"{name}-{rank}.pt"
        if not save:
            run.modules[0].load_state_dict(torch.load(weights, weights_only=True))
            with np.load(path) as state:
                run.stages[0].load_wire_state_dict(dict(state))
        for number in (0, 1) if save else (2, 3):
            run.step(number)
        if save:
            torch.save(run.modules[0].state_dict(), weights)
            np.savez(path, **run.stages[0].wire_state_dict())
            for number in (2, 3):
                run.step(number)
        results[name] = {"losses": run.losses[-2 * N_MICRO :], "digest": digest(run.modules)}
    return results


def damage(rank: int, kind: str) -> None:
    """Train until rank 0 sends a wrong message in its second step; the process must end with an error."""
    run = Run(POLICIES["ef21"], "1f1b", rank, [layer(0), layer(1)])
    run.step(0)
    if rank == 0:
        link = run.stages[0].outgoing
        send, last = link.send, []

        def bad_send(direction: Any, tensor: Tensor, place: Any) -> Any:
            message, received = send(direction, tensor, place)
            last.append(message)
            if kind == "die":
                sys.exit(17)
            if kind == "flip":
                message = message.clone()
                message[len(message) // 2] ^= 4
            if kind == "repeat":
                message = last[0]
            return message, received

        link.send = bad_send
    run.step(1)


def main() -> None:
    task, rank, store, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    shared = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    tasks: dict[str, Callable[[], Any]] = {
        "scenarios": lambda: scenarios(rank, out),
        "load": lambda: resume(rank, out, save=False),
    }
    if task in tasks:
        (out / f"{task}-{rank}.json").write_text(json.dumps(tasks[task]()))
        dist.destroy_process_group()
    else:
        damage(rank, task)


if __name__ == "__main__":
    main()
