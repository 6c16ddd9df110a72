"""Ranks that train one model with LoCo hooks; `test_wire_ddp.py` starts them and reads their JSON.

python -m tests.support.ddp_worker RANK N_RANKS STORE OUT
"""

import hashlib
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptz.errors import WireError
from ckptz.wire import LoCo, Tiled, Uniform, loco_hook, shard_with

N_STEPS = 12


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: nn.Module, rank: int, steps: range) -> dict[str, Any]:
    target = torch.randn(128, 128, generator=torch.Generator().manual_seed(99)) / 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in steps:
        x = batch(rank, step)
        loss = ((model(x) - x @ target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    data = b"".join(w.detach().numpy().tobytes() for w in weights)
    return {"losses": losses, "digest": hashlib.sha256(data).hexdigest()}


def scenarios(rank: int) -> dict[str, Any]:
    out = {"stock": train(DistributedDataParallel(make()), rank, range(N_STEPS))}
    for name, codec in (("loco", Uniform(4)), ("tiles", Tiled(3.9375))):
        state, model = LoCo(codec, decay=0.2, reset_every=5), DistributedDataParallel(make())
        model.register_comm_hook(state, loco_hook)
        first, n_bytes = train(model, rank, range(2)), state.sent_bytes()
        remaining = train(model, rank, range(2, N_STEPS))
        losses = first["losses"] + remaining["losses"]
        out[name] = remaining | {
            "losses": losses,
            "bytes": state.sent_bytes() - n_bytes,
            "raw bytes": n_bytes,
        }
    sharded, state = fully_shard(make()), LoCo(decay=0.2, reset_every=5)
    shard_with(sharded, state)
    out["sharded"] = train(sharded, rank, range(N_STEPS)) | {"bytes": state.sent_bytes()}
    out["stock sharded"] = train(fully_shard(make()), rank, range(N_STEPS))
    out["resumed"], out["resumed sharded"] = resumed(rank, False), resumed(rank, True)
    return out


def resumed(rank: int, is_sharded: bool) -> dict[str, Any]:
    """Train half the steps, then the others with a new model, a new hook and the saved states."""
    model: Any = None
    weights, wire, losses = make().state_dict(), None, []
    for steps in (range(N_STEPS // 2), range(N_STEPS // 2, N_STEPS)):
        inner, state = make(), LoCo(decay=0.2, reset_every=5)
        inner.load_state_dict(weights)
        if wire is not None:
            state.load_state_dict(wire)
        if is_sharded:
            model = fully_shard(inner)
            shard_with(model, state)
        else:
            model = DistributedDataParallel(inner)
            model.register_comm_hook(state, loco_hook)
        result = train(model, rank, steps)
        losses += result["losses"]
        full = {name: getattr(w, "full_tensor", lambda w=w: w)() for name, w in inner.state_dict().items()}
        weights, wire = full, state.state_dict()
    return result | {"losses": losses}


def error_of_changed_part(rank: int) -> str:
    """Send a changed part from rank 0, and return the error that rank 1 raises, or "" on other ranks."""
    state = LoCo()
    if rank == 0:
        link = state._to[1]
        send = link.send

        def bad_send(*args: Any) -> Any:
            message, decode = send(*args)
            message[len(message) // 2] ^= 4
            return message, decode

        link.send = bad_send
    parts = [torch.randn(5000, generator=torch.Generator().manual_seed(i)) for i in range(state.n_ranks)]
    try:
        state.sum_of_parts(parts, 3)
    except WireError as error:
        return str(error)
    return ""


def main() -> None:
    rank, n_ranks, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    shared = dist.FileStore(sys.argv[3], n_ranks)
    dist.init_process_group(
        "gloo", store=shared, rank=rank, world_size=n_ranks, timeout=timedelta(seconds=60)
    )
    results = scenarios(rank) | {"lie": error_of_changed_part(rank)}
    (out / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
