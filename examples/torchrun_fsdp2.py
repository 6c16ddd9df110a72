"""A model sharded by FSDP2; each rank saves its shards, and any number of ranks goes on.

    torchrun --nproc-per-node 2 examples/torchrun_fsdp2.py [FOLDER [STEPS]]
    torchrun --nproc-per-node 4 examples/torchrun_fsdp2.py FOLDER [STEPS]      goes on from there

On a machine without GPUs it runs on gloo.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptz.integrations.dcp import ChainOptions, CkptzStorageReader, CkptzStorageWriter, latest

WIDTH, BATCH, EVERY = 64, 16, 5


def a_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
    model = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


class Training(Stateful):
    """Model and optimizer, by names that do not depend on the number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "sharded-run"
    n_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    model = a_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] = {"training": Training(model, optimizer), "step": 0}
    if (newest := latest(folder)) is not None:
        dcp.load(state, checkpoint_id=newest, storage_reader=CkptzStorageReader())
    first, saving = state["step"], None
    writer = CkptzStorageWriter(options=ChainOptions(full_every=8), keep_last=3)
    group = dist.new_group(backend="gloo")  # for saves beside training
    for step in range(first + 1, first + n_steps + 1):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(BATCH, WIDTH, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            if saving is not None:
                saving.result()
            state["step"], place = step, f"{folder}/step-{step}"
            saving = dcp.async_save(state, checkpoint_id=place, storage_writer=writer, process_group=group)
    if saving is not None:
        saving.result()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, from step {first} to {step}, loss {loss.item():.4f}")
        print(f"kept: {sorted(os.listdir(folder))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
