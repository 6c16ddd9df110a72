"""One trainer publishes its weights after every step; two inference engines follow it.

    python examples/weight_sync.py [FOLDER_OR_URL]

Three processes share nothing but the folder. The trainer publishes the bf16 copy of its fp32 weights. The
engines update their live tensors whenever they like, one often, the other seldom: it skips steps.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time

import torch
from torch import nn

from ckptz.sync import Follower, Publisher

N_STEPS, WIDTH = 12, 256


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def in_bf16(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}


def total(state: dict[str, torch.Tensor]) -> float:
    return sum(tensor.double().abs().sum().item() for tensor in state.values())


def train(folder: str) -> None:
    model, publisher = a_model(), Publisher(folder, full_every=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6, weight_decay=0)
    publisher.publish(in_bf16(model), step=0)
    for step in range(1, N_STEPS + 1):
        actions = torch.distributions.Bernoulli(logits=model(torch.randn(64, WIDTH)))
        sampled = actions.sample()
        loss = -(actions.log_prob(sampled) * (2 * sampled - 1)).mean()  # a reward for ones
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = publisher.publish(in_bf16(model), step)
        size = f"{done.n_bytes / done.tensor_bytes:.4f} of raw"
        print(f"trainer   step {step:2}: {', '.join(done.files)}, {size}", flush=True)
    print(f"trainer   holds {total(in_bf16(model))}", flush=True)


def follow(name: str, folder: str, seconds_between: float) -> None:
    live = in_bf16(a_model().requires_grad_(False))  # what serves requests; it is updated in place
    follower = Follower(folder)
    while follower.step != N_STEPS:
        while follower.poll() is None:
            time.sleep(0.01)
        done = follower.apply_to(live)
        print(f"{name}  step {done.step:2}: {', '.join(done.files)}, {done.n_written} elements", flush=True)
        time.sleep(seconds_between)
    print(f"{name}  holds {total(live)}", flush=True)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="weights-")
    start = multiprocessing.get_context("spawn").Process
    engines = [start(target=follow, args=(f"engine {i}", folder, 0.3 * i)) for i in range(2)]
    for process in engines:
        process.start()
    train(folder)
    for process in engines:
        process.join()
    sys.exit(any(process.exitcode for process in engines))


if __name__ == "__main__":
    main()
