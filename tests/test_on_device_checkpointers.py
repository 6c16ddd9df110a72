"""Runs, files and adapters whose tensors live on a device: the files are those of the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import Checkpointer, Grid, safe_open
from ckptz.encoding import on_device as on_device_encoding
from ckptz.encoding import there as there_encoding
from ckptz.encoding.draft import Draft
from ckptz.encoding.there import There
from ckptz.integrations import linked
from ckptz.integrations.sharded import ShardedCheckpointer
from ckptz.methods.state import Moments
from ckptz.parallel import Workers
from ckptz.pipeline import write
from ckptz.torch import save_file
from ckptz.training import device as training_device
from tests.support.device_support import DEVICE, KEPT, SMALL_CHUNK, chain, kinds_of, moved_state, three_steps

pytestmark = pytest.mark.apps
pytest_plugins = ["tests.support.device_fixtures"]


def stepped(seed: int = 0) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(30, 20).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), fused=False)


def saved(folder: Path, n_steps: int = 3, **settings: Any) -> tuple[dict[str, bytes], Any]:
    """The bytes of a run's files, and the last report."""
    model, optimizer = stepped()
    with Checkpointer(folder, model, optimizer, **settings) as checkpointer:  # writes beside training
        for step in range(1, n_steps + 1):
            optimizer.zero_grad()
            model(torch.full((3, 30), 0.1 * step, device=DEVICE)).square().sum().backward()
            optimizer.step()
            checkpointer.save(step)
        report = checkpointer.wait()
        assert checkpointer._snapshot.elsewhere == {}
    return {path.name: path.read_bytes() for path in folder.glob("*.ckptz")}, report


@pytest.mark.usefixtures("deltas_at_any_cost", "small_chunks")
@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"anchor_every": 1}, ""),
        ({"anchor_every": 3, "snapshot": "device"}, ""),
        (
            {"anchor_every": 3},
            "3 tensors of 0.0 MB were encoded on the host: the GPU encodes what loses nothing, and",
        ),
        (
            {"config": Grid(step=1.0), "snapshot": "device"},
            "1 tensors of 0.0 MB were encoded on the host: the GPU",
        ),
        ({"anchor_every": 1, "snapshot": "host"}, ""),
    ],
    ids=["anchors", "deltas", "deltas, coded", "grid", "host"],
)
def test_a_checkpointer_writes_the_files_of_the_host_from_tensors_on_the_device(
    settings: dict[str, Any], note: str, tmp_path: Path, only_here: Callable[[], None]
) -> None:
    made: list[Any] = []
    encode = There._exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(There, "_exact", lambda *args: made.append(args) or encode(*args))
        there, report = saved(tmp_path / "there", keep=KEPT, **settings)
    found = [one for one in report.notes if "encoded on the host" in one]
    assert len(found) == bool(note)
    assert not note or found[0].startswith(note)
    assert bool(made) == (settings.get("snapshot") != "host")
    # Lossy files are coded as they are; what makes them exact stands by itself.
    is_delta = settings.get("snapshot") == "device" and "config" not in settings
    assert any(plan.needs_base for _, plan, *_ in made) == is_delta
    only_here()
    here, _ = saved(tmp_path / "here", keep=KEPT, **settings)
    assert there == here
    model, optimizer = stepped(1)
    with Checkpointer(tmp_path / "there", model, optimizer, **settings) as checkpointer:
        assert checkpointer.restore_latest() == 3
        assert checkpointer.restored is not None
        assert checkpointer.restored.is_exact


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_without_room_on_the_device_a_snapshot_is_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for two of the three: the weight and its first moment.
    monkeypatch.setattr(training_device, "room_on", lambda device: training_device.DEVICE_BYTES + 5_000)
    _, report = saved(tmp_path, 1, snapshot="device")
    assert report.notes[0].startswith("1 tensors of 0.0 MB were encoded on the host")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("step", [1, 2])
def test_save_file_encodes_tensors_where_they_live(
    step: int, tmp_path: Path, only_here: Callable[[], None]
) -> None:
    paths, states = chain(tmp_path), three_steps()
    state = {name: tensor.to(DEVICE) for name, tensor in states[step].items()}
    save_file(state, tmp_path / "there.ckptz", base=paths[step - 1])
    assert (tmp_path / "there.ckptz").read_bytes() == paths[step].read_bytes()


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_adapters_encode_a_state_where_it_lives(tmp_path: Path) -> None:
    state = {"model": moved_state(three_steps()[0]), "step": 7}
    state["tied"] = state["model"]["f32"]
    job = linked.job_of(state)
    there = {name for name, s in job.tensors.items() if isinstance(s, on_device_encoding.DeviceSource)}
    assert {"model.bf16", "model.f32", "model.f64"} <= there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_device, "lives_elsewhere", lambda tensor: False)
        here = linked.job_of(state)
    assert here.tree == job.tree
    files = []
    for one in (job, here):
        with Workers(1) as workers, (tmp_path / "x").open("w+b") as sink:
            write(sink, one, workers)
        files.append((tmp_path / "x").read_bytes())
    assert files[0] == files[1]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_rank_copies_and_encodes_its_shards_on_its_device(
    tmp_path: Path, only_here: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "00000000")
    files = []
    for snapshot in ("device", "host"):
        folder, (model, optimizer) = tmp_path / snapshot, stepped()
        with ShardedCheckpointer(folder, model, optimizer, snapshot=snapshot) as checkpointer:
            for step in (1, 2):
                saved = model.weight.detach().clone()
                checkpointer.save(step)
                with torch.no_grad():  # beside the writer
                    model.weight += 0.01
            checkpointer.restore(2)
        assert model.weight.equal(saved)
        files.append({p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.ckptz")})
        only_here()
    assert files[0] == files[1]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Drafts of lossy tensors that a device encodes."""
    made: list[Draft] = []
    encode = There.encoded

    def noted(self: There, draft: Draft) -> Any:
        made.extend([draft] * (draft.plan.quant_map is not None))
        return encode(self, draft)

    monkeypatch.setattr(There, "encoded", noted)
    return made


def adam(model: torch.nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=False)


def slow_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return adam(model, 1e-5)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


OF_ADAM = ("OUTER", "BASE", "BaseCode", "Row")


@pytest.mark.usefixtures("deltas_at_any_cost", "small_chunks")
@pytest.mark.parametrize(
    ("optimizer_of", "dtype", "moments", "wanted"),
    [
        (adam, torch.float32, Moments(), {*OF_ADAM, "escape"}),
        (adam, torch.bfloat16, Moments(first_step=0.1, second_step=0.5), {*OF_ADAM, "escape", "Magnitude"}),
        (slow_adam, torch.float32, Moments(keeps_first=True), {*OF_ADAM, "Magnitude", "drawn"}),
        (momentum, torch.float32, Moments(), {"BASE", "Row"}),
    ],
    ids=["adam", "small steps", "kept on average", "momentum"],
)
def test_a_run_on_the_grid_is_written_on_the_device_as_on_the_host(
    optimizer_of: Any,
    dtype: torch.dtype,
    moments: Moments,
    wanted: set[str],
    tmp_path: Path,
    only_here: Callable[[], None],
    encoded: list[Draft],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = []
    if dtype == torch.bfloat16:  # in several runs of chunks
        monkeypatch.setattr(there_encoding, "DEVICE_BYTES", 2 * SMALL_CHUNK * there_encoding.MOMENT_SCRATCH)
    for folder in (tmp_path / "there", tmp_path / "here"):
        generator = torch.manual_seed(0)
        model = torch.nn.Linear(64, 20).to(DEVICE, dtype)
        optimizer, config = optimizer_of(model), Grid(min_elements=100, moments=moments)
        chosen: dict[str, Any] = {"anchor_every": 3, "keep": KEPT, "snapshot": "device", "background": False}
        with Checkpointer(folder, model, optimizer, config=config, **chosen) as checkpointer:
            for step in range(1, 4):
                inputs = torch.randn(50, 64, generator=generator) * torch.logspace(-2, 1, 64)
                model(inputs.to(DEVICE, dtype)).square().sum().backward()
                optimizer.step()
                with torch.no_grad():
                    model.weight[0, 0] += 3  # which escapes
                checkpointer.save(step)
        files.append({path.name: path.read_bytes() for path in folder.glob("*.ckptz")})
        only_here()
    assert files[0] == files[1]
    assert len(encoded) == (6 if optimizer_of is momentum else 9)
    assert set.union(*(kinds_of(draft.plan) | draft.found.keys() for draft in encoded)) >= wanted


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("snapshot", ["coded", "device", "host"])
def test_runs_on_hardware_write_the_files_of_the_host_in_bounded_memory(
    snapshot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(folder: Path, device: str) -> tuple[dict[str, bytes], int]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3000, 2000)
        moved = [1e-3 * torch.randn_like(model.weight) for _ in range(3)]
        model, extra = model.to(device), 0
        settings: dict[str, Any] = {"anchor_every": 3, "snapshot": snapshot, "background": False}
        with Checkpointer(folder, model, **settings) as checkpointer:
            for step, change in enumerate(moved, 1):
                with torch.no_grad():
                    model.weight += change.to(device)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                checkpointer.save(step)
                extra = max(extra, torch.cuda.max_memory_allocated() - before)
                assert torch.cuda.memory_allocated() - before < 1 << 20
        with safe_open(sorted(folder.glob("*[0-9].ckptz"))[-1], "pt", device) as file:
            assert torch.equal(file.get_tensor("model.weight"), model.weight)
        return {path.name: path.read_bytes() for path in folder.glob("*[0-9].ckptz")}, extra

    monkeypatch.setattr("ckptz.store.steps.weighed_in_folder", lambda _kind, rule, *_: rule)
    there, extra = saved(tmp_path / "there", "cuda")
    assert extra < 6_002_000 * 4 * 7
    assert there == saved(tmp_path / "here", "cpu")[0]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_optimizer_state_on_hardware_is_written_as_on_the_host(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, moment, square = torch.randn(3, 1500, 2000, generator=generator)
    moments = {"exp_avg": 1e-3 * moment, "exp_avg_sq": (1e-3 * square).square(), "momentum_buffer": moment}
    first = {"layer.weight": weight} | {f"layer.weight.{name}": part for name, part in moments.items()}
    second = {name: 1.01 * part for name, part in first.items()}
    for device in ("cpu", DEVICE):
        for i, state in enumerate((first, second)):
            there = {name: part.to(device) for name, part in state.items()}
            base = tmp_path / "cpu0.ckptz" if i else None
            save_file(there, tmp_path / f"{device}{i}.ckptz", base=base, config=Grid())
    for i in range(2):
        files = [tmp_path / f"{device}{i}.ckptz" for device in ("cpu", DEVICE)]
        assert files[0].read_bytes() == files[1].read_bytes()
