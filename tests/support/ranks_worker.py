"""Ranks of a distributed run; `test_ranks.py` starts them and reads the JSON that each scenario returns.

    python -m tests.support.ranks_worker PLAY FOLDER

Scenarios of two ranks run on ranks 0 and 1 of four, in process groups of two.
"""

import json
import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptz import Grid, KMeans, inspect
from ckptz.format.sources import SourceOf
from ckptz.integrations import dcp_write
from ckptz.integrations.dcp import ChainOptions, CkptzStorageReader, CkptzStorageWriter, latest

WAIT = timedelta(minutes=5)  # for a machine that is busy with other work
TIMEOUT = timedelta(seconds=120)
SHORT = timedelta(seconds=30)
KMEANS = ChainOptions(config=KMeans(levels=16), jobs=1)
LOSSLESS = ChainOptions(jobs=1)
MOVING = ChainOptions(config=Grid(step=2**-6), jobs=1, exact=0)
GRID = ChainOptions(config=Grid(step=0.5, min_elements=1), jobs=1)
N_INTERRUPTS = 12
SIZES = {"wide": (70, 96), "narrow": (96, 50), "odd": (7, 640), "small": (9, 5), "line": (333,)}


def all_tensors(step: int = 0) -> dict[str, torch.Tensor]:
    """Return the unsharded tensors of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SIZES.items()}
    return {name: tensor + 1e-3 * step * tensor.roll(1) for name, tensor in state.items()}


def sharded(state: dict[str, torch.Tensor], n_ranks: int) -> dict[str, Any]:
    """Return the state as DTensors, sharded by rows or columns, some unevenly."""
    mesh = init_device_mesh("cpu", (n_ranks,))
    placements = {"narrow": Shard(1)}
    return {name: distribute_tensor(t, mesh, [placements.get(name, Shard(0))]) for name, t in state.items()}


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[n], t) for n, t in expected.items())


# --- scenarios ----------------------------------------------------------------------------------------


def save_states(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Save two steps with each method; the second is a delta."""
    for name, options in (("lossless", LOSSLESS), ("kmeans", KMEANS), ("grid", GRID)):
        for step in (0, 1):
            base = folder / f"{name}-{n_ranks}-0" if step else None
            writer = CkptzStorageWriter(
                folder / f"{name}-{n_ranks}-{step}", options=options, base=base, timeout=TIMEOUT
            )
            dcp.save({**sharded(all_tensors(step), n_ranks), "step": step}, storage_writer=writer)
    return {}


def load_states(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Compare what the other number of ranks saved with what one process made of the unsharded state."""
    is_same: dict[str, Any] = {}
    for name in ("lossless", "kmeans"):
        for step in (0, 1):
            empty = {key: torch.zeros_like(tensor) for key, tensor in all_tensors().items()}
            state = {**sharded(empty, n_ranks), "step": -1}
            reader = CkptzStorageReader(folder / f"{name}-{6 - n_ranks}-{step}", jobs=1)
            dcp.load(state, storage_reader=reader)
            is_same[f"{name} {step}"] = state.pop("step") == step and same(
                full(state), torch.load(folder / f"{name}-{step}.pt")
            )
    return is_same


def load_grids(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Load what the other number of ranks saved on grids, whose steps differ between shards, and keep it."""
    for step in (0, 1):
        state = sharded({key: torch.zeros_like(tensor) for key, tensor in all_tensors().items()}, n_ranks)
        dcp.load(state, storage_reader=CkptzStorageReader(folder / f"grid-{6 - n_ranks}-{step}", jobs=1))
        joined = full(state)
        if rank == 0:
            torch.save(joined, folder / f"grid-{6 - n_ranks}-{step}.pt")
    return {}


def a_model(n_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48))
    mesh = init_device_mesh("cpu", (n_ranks,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(4, 48, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return full(dict(model.state_dict()))


class Training(Stateful):
    """A model and its optimizer, by names that do not depend on the number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def fsdp_saves(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Train with FSDP2 and save every step in the background; keep the last weights and moments."""
    model, optimizer = a_model(n_ranks)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    writer = CkptzStorageWriter(options=LOSSLESS, keep_last=2, group=group)
    saving: Any = None
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
        if saving is not None:
            saving.result()
        saving = dcp.async_save(
            {"training": Training(model, optimizer), "scheduler": scheduler, "step": step},
            checkpoint_id=folder / "fsdp" / f"step-{step}",
            storage_writer=writer,
            process_group=group,
        )
    saving.result()
    saved, state = weights(model), optimizer.state_dict()["state"]
    moments = {str(i): full(dict(tensors)) for i, tensors in state.items()}
    if rank == 0:
        torch.save((saved, moments), folder / "fsdp.pt")
    return {
        "steps": names_in(folder / "fsdp"),
        "deltas": len(list((folder / "fsdp" / "step-3").glob("base-*"))),
    }


def fsdp_resumes(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Resume on another number of ranks, and save a step, which is a full file because the layout differs."""
    model, optimizer = a_model(n_ranks)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state: dict[str, Any] = {"training": Training(model, optimizer), "scheduler": scheduler, "step": -1}
    dcp.load(state, checkpoint_id=latest(folder / "fsdp"), storage_reader=CkptzStorageReader(jobs=1))
    saved, moments = torch.load(folder / "fsdp.pt")
    restored = optimizer.state_dict()["state"]
    is_same = same(weights(model), saved) and all(
        same(full(dict(restored[int(i)])), tensors) for i, tensors in moments.items()
    )
    train(model, optimizer, range(4, 5))
    writer = CkptzStorageWriter(options=LOSSLESS, keep_last=2, timeout=TIMEOUT)
    dcp.save(state, checkpoint_id=folder / "fsdp" / "step-4", storage_writer=writer)
    return {
        "step": state["step"],
        "same": is_same,
        "scheduler": scheduler.last_epoch,
        "bases": len(list((folder / "fsdp" / "step-4").glob("base-*"))),
        "steps": names_in(folder / "fsdp"),
    }


def moved_shards(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Train on noise; rank 1's weight is set back near its value at the first save before the second save.

    The save of step 31 follows a restart at once, that of step 46 follows training.
    """
    torch.manual_seed(4)
    mesh = init_device_mesh("cpu", (n_ranks,))
    model = fully_shard(nn.Sequential(nn.Linear(128, 128)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0)
    generator = torch.Generator().manual_seed(rank)
    [weight, _] = model.parameters()
    writer, moved_by_step = CkptzStorageWriter(options=MOVING, timeout=TIMEOUT), {}

    def save(step: int) -> None:
        state = {"training": Training(model, optimizer), "step": step}
        dcp.save(state, checkpoint_id=folder / f"moved/step-{step}", storage_writer=writer)
        [path] = (folder / f"moved/step-{step}").glob(f"shard-{rank:05d}-*.ckptz")
        lossy = {tensor.name: tensor.lossy for tensor in inspect(path).tensors}
        moved_by_step[step] = {n: r.settings.get("moved") if r else "exact" for n, r in lossy.items()}

    def train_on_noise() -> None:
        for _ in range(15):
            for parameter in model.parameters():
                signs = torch.randint(2, parameter.to_local().shape, generator=generator) * 2 - 1
                parameter.grad = DTensor.from_local(signs * 0.01, mesh, [Shard(0)])
            optimizer.step()

    train_on_noise()
    save(15)
    first_weight = weight.detach().to_local().clone()
    train_on_noise()
    if rank == 1:
        weight.detach().to_local().copy_(
            first_weight + 0.01 * torch.randn(first_weight.shape, generator=generator)
        )
    save(30)
    writer = CkptzStorageWriter(options=MOVING, timeout=TIMEOUT)
    state = {"training": Training(model, optimizer), "step": -1}
    reader = CkptzStorageReader(jobs=1, writer=writer)
    dcp.load(state, checkpoint_id=folder / "moved/step-30", storage_reader=reader)
    save(31)
    train_on_noise()
    save(46)
    return moved_by_step


def disagreements(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Save states that differ between ranks in a dtype and in a name, and return the errors."""
    errors: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (n_ranks,))
    other = torch.bfloat16 if rank == 1 else torch.float32
    tensors = {
        "dtypes": {"weight": DTensor.from_local(torch.ones(3, 4, dtype=other), mesh, [Shard(0)])},
        "names": {f"weight{rank}": DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])},
    }
    for name, state in tensors.items():
        try:
            dcp.save(state, storage_writer=CkptzStorageWriter(folder / name, options=LOSSLESS))
        except CheckpointException as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def a_failing_rank(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Save while rank 1 cannot read a tensor, and return each rank's error and the seconds until then."""
    state, errors = sharded(all_tensors(), n_ranks), dict[str, Any]()
    if rank == 1:
        dcp_write.Gathered = _Failing
    try:
        for name, options in (("kmeans", KMEANS), ("grid", GRID)):
            writer = CkptzStorageWriter(folder / "failing" / name, options=options, timeout=TIMEOUT)
            start = time.monotonic()
            try:
                dcp.save(state, storage_writer=writer)
            except CheckpointException as error:
                errors[name] = {"error": str(error), "seconds": time.monotonic() - start}
    finally:
        dcp_write.Gathered = _Gathered
    return errors


_Gathered = dcp_write.Gathered


class _Failing(_Gathered):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tensors["odd"] = _Unreadable(self.tensors["odd"])
        self.pieces["odd"] = [self.tensors["odd"]]


class _Unreadable(SourceOf):
    def patterns(self, begin: int, end: int) -> Any:
        raise OSError(5, "Input/output error")


def interrupted_saves(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Interrupt the last rank at random times of its part of a save, and save again without an interrupt."""
    results, generator = dict[str, Any](), random.Random(0)
    for name, options in (("kmeans", KMEANS), ("grid", MOVING), ("lossless", LOSSLESS)):
        writer = CkptzStorageWriter(options=options, timeout=SHORT)
        ends, seconds, pause = list[str](), list[float](), 0.1
        for number in range(N_INTERRUPTS):
            folder_of_save = folder / "interrupted" / name / str(number)
            delay = (
                generator.uniform(0, 1.1 * pause) if number else 1e-4
            )  # the first always interrupts the save
            start = time.monotonic()
            ends.append(
                _interrupted_save(folder_of_save, writer, n_ranks, delay if rank == n_ranks - 1 else None)
            )
            seconds.append(time.monotonic() - start)
            start = time.monotonic()
            dcp.save(sharded(all_tensors(), n_ranks), checkpoint_id=folder_of_save, storage_writer=writer)
            pause = time.monotonic() - start
        loaded: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in all_tensors().items()}
        loaded = sharded(loaded, n_ranks)
        dcp.load(loaded, storage_reader=CkptzStorageReader(folder_of_save, jobs=1))
        results[name] = {
            "ends": [end.strip().rpartition("\n")[2] for end in ends],
            "seconds": max(seconds),
            "same": same(full(loaded), all_tensors()),
        }
    return results


def _interrupted_save(path: Path, writer: CkptzStorageWriter, n_ranks: int, delay: float | None) -> str:
    """Save, with an interrupt of this rank after `delay` seconds unless None; return the error's text."""
    write = CkptzStorageWriter.write_data
    if delay is not None:
        CkptzStorageWriter.write_data = lambda *args: _interrupted(delay, write, *args)
    try:
        dcp.save(sharded(all_tensors(), n_ranks), checkpoint_id=path, storage_writer=writer)
    except CheckpointException as error:
        return str(error)
    finally:
        CkptzStorageWriter.write_data = write
    return ""


def _interrupted(delay: float, call: Callable[..., Any], *args: Any) -> Any:
    """Make a call, and interrupt it after `delay` seconds if it takes longer."""
    is_armed = [True]

    def interrupt(number: int, frame: object) -> None:
        if is_armed:
            is_armed.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
    try:
        return call(*args)
    finally:
        is_armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)


def saves_beside_training(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Save fifty steps with merged histograms while the ranks run other collectives."""
    state = sharded(all_tensors(), n_ranks)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    writer = CkptzStorageWriter(options=KMEANS, keep_last=1, group=group)
    n_reduced = 0
    saving: Any = None
    for step in range(50):
        if saving is not None:
            saving.result()
        path = folder / "busy" / f"step-{step}"
        saving = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, process_group=group)
        for _ in range(1 + (step * (rank + 1)) % 3):  # a different rank is late at each step
            time.sleep(0.001)
        for _ in range(3):
            dist.all_reduce(torch.ones(64))
            n_reduced += 1
    saving.result()
    return {"steps": names_in(folder / "busy"), "reduced": n_reduced}


def a_lost_rank(run: Path, steps: Sequence[int], n_ranks: int, timeout: timedelta) -> dict[str, Any]:
    """Save steps, the last of which fails, and return its error, its seconds and the newest step."""
    state = sharded(all_tensors(), n_ranks)
    group = dist.new_group(backend="gloo", timeout=timeout)
    writer = CkptzStorageWriter(options=KMEANS, keep_last=3, group=group)
    start = time.monotonic()
    try:
        for step in steps:
            start = time.monotonic()
            path = run / f"step-{step}"
            dcp.save(state, checkpoint_id=path, storage_writer=writer, process_group=group)
            if dist.get_rank() == n_ranks - 1:
                dcp_write.write_index = dcp_write.merged_guides = _die
    except (CheckpointException, RuntimeError) as error:
        return {"error": str(error), "seconds": time.monotonic() - start, "newest": latest(run)}
    return {}


def killed(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Kill the last rank during the second save."""
    return a_lost_rank(folder / "killed", (1, 2), n_ranks, SHORT)


def hung(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Make the last rank sleep instead of joining the save."""
    if rank == n_ranks - 1:
        sharded(all_tensors(), n_ranks)
        dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
        time.sleep(60)
        return {}
    return a_lost_rank(folder / "hung", (1,), n_ranks, timedelta(seconds=5))


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def titan(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, n_ranks: int) -> dict[str, Any]:
    """Return a state as torchtitan saves it: parameters by name at the top, an optimizer by their names.

    The state of the data loader is a pickle in bytes for each rank.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": torch.tensor(step), "ntokens_seen": torch.tensor(step << 12)},
        "lr_scheduler": {"last_epoch": step},
        "dataloader": {"world_size": n_ranks}
        | {f"dp_rank_{i}": pickle.dumps({"at": i}) for i in range(n_ranks)},
    }


def titan_saves(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Save two steps with torch's own writer, and keep the weights after one more."""
    model, optimizer = a_model(n_ranks)
    for step in (1, 2):
        train(model, optimizer, range(step, step + 1))
        dcp.save(titan(model, optimizer, step, n_ranks), checkpoint_id=folder / f"titan/step-{step}")
    train(model, optimizer, range(3, 4))
    after = weights(model)
    if rank == 0:
        torch.save(after, folder / "titan.pt")
    return {}


def titan_resumes(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Load a restored folder with torch's own reader, train a step, and compare the weights."""
    model, optimizer = a_model(n_ranks)
    state = titan(model, optimizer, 0, 0)
    state["dataloader"] |= {f"dp_rank_{i}": b"" for i in range(2)}
    dcp.load(state, checkpoint_id=folder / "titan/back")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_model_state_dict(model, {n: state[n] for n in get_model_state_dict(model)})
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    train(model, optimizer, range(3, 4))
    trained = weights(model)
    expected = torch.load(folder / "titan.pt")
    worst = max((trained[n] - t).abs().max().item() for n, t in expected.items())
    loader = [pickle.loads(state["dataloader"][f"dp_rank_{i}"]) for i in range(2)]
    return {"worst": worst, "step": int(state["train_state"]["step"]), "loader": loader} | state[
        "lr_scheduler"
    ]


def two_dimensional_model(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with tensor-parallel layers, sharded over data ranks, some unevenly."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(18, 32), nn.GELU(), nn.Linear(32, 18), nn.LayerNorm(18))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def sharded_runs(folder: Path, rank: int, n_ranks: int) -> dict[str, Any]:
    """Save runs with one- and two-dimensional meshes, and the gathered state of each from collectives."""
    placements = (
        *((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))),
        *((Replicate(), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())),
    )
    for name, n_parallel in (("flat", 1), ("square", math.gcd(n_ranks, 2)), ("parallel", n_ranks)):
        mesh = init_device_mesh("cpu", (n_ranks // n_parallel, n_parallel), mesh_dim_names=("dp", "tp"))
        model, optimizer = two_dimensional_model(mesh)
        for method, options in (("lossless", LOSSLESS), ("grid", GRID)):
            writer = CkptzStorageWriter(options=options, keep_last=2, timeout=TIMEOUT)
            for step in (1, 2):
                batch = torch.randn(4, 18, generator=torch.Generator().manual_seed(step))
                model(batch).square().mean().backward()
                optimizer.step()
                table: dict[str, Any] = {}
                for number, pair in enumerate(placements):
                    matrices = {
                        n: tensor for n, tensor in all_tensors(step).items() if tensor.ndim == len(pair)
                    }
                    table |= {f"{n} {number}": distribute_tensor(t, mesh, pair) for n, t in matrices.items()}
                state = {"training": Training(model, optimizer), "table": table, "step": step}
                path = folder / f"{name}-{n_ranks}-{method}" / f"step-{step}"
                dcp.save(state, checkpoint_id=path, storage_writer=writer)
            flat, _ = flatten_state_dict(
                {"training": Training(model, optimizer).state_dict(), "table": table}
            )
            gathered = full({n: v for n, v in flat.items() if isinstance(v, torch.Tensor)})
            if rank == 0:
                torch.save(gathered, folder / f"{name}-{n_ranks}-{method}.pt")
    return {}


# --- starting the ranks ---------------------------------------------------------------------------------

Scenario = Callable[[Path, int, int], dict[str, Any]]
PLAYS: dict[str, tuple[tuple[Scenario, int], ...]] = {
    "all": (
        *((save_states, 2), (save_states, 4), (load_states, 4), (load_states, 2)),
        *((load_grids, 4), (load_grids, 2)),
        *((fsdp_saves, 2), (fsdp_resumes, 4), (disagreements, 2), (a_failing_rank, 2)),
        *((moved_shards, 2), (interrupted_saves, 2), (saves_beside_training, 2), (killed, 2)),
    ),
    "slow": ((saves_beside_training, 4), (a_failing_rank, 4), (interrupted_saves, 4), (killed, 4)),
    "moved": ((moved_shards, 2),),
    "sharded": ((sharded_runs, 1), (sharded_runs, 2), (sharded_runs, 4)),
    "hung": ((hung, 2),),
    "titan": ((titan_saves, 2),),
    "titan back": ((titan_resumes, 2),),
}


def run_rank(play: str, rank: int, folder: Path) -> None:
    for number, (scenario, n_ranks) in enumerate(PLAYS[play]):
        if rank >= n_ranks:
            continue
        store = dist.FileStore(str(folder / f"store-{play}-{number}"), n_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=WAIT)
        try:
            result = scenario(folder, rank, n_ranks)
        except BaseException as error:
            result = {"raised": f"{type(error).__name__}: {error}"}
        text = json.dumps(result, default=str)
        (folder / f"{scenario.__name__}-{n_ranks}-{rank}.json").write_text(text)
        if scenario in (killed, hung):
            os._exit(0)  # a process group that lost a rank cannot be destroyed
        dist.destroy_process_group()


def main() -> None:
    play, folder = sys.argv[1], Path(sys.argv[2])
    for stale in folder.glob(f"store-{play}-*"):  # of an earlier run, whose ranks these would connect to
        stale.unlink()
    torch.set_num_threads(1)
    # The fork must come before any thread starts; it saves loading the libraries for each rank.
    processes = multiprocessing.get_context("fork")
    n_ranks = max(n for _, n in PLAYS[play])
    ranks = [processes.Process(target=run_rank, args=(play, rank, folder)) for rank in range(n_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
