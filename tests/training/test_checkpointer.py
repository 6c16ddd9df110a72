"""The Checkpointer in a training loop: saves and resumed runs."""

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy, KMeans
from ckptz.codec.method import Method
from ckptz.format import reader
from ckptz.torch import load_file
from ckptz.training.checkpointer import SaveReport
from ckptz.training.restoring import Restored
from ckptz.training.snapshot import Snapshot
from tests.support.checkpointer_support import GRID, LOSSY, Run, linear, names_in, one_step, same, state_of

ROOT = Path(__file__).parents[2]

# --- resuming --------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("n_before", [0, 1, 7])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(
    tmp_path: Path, background: bool, n_before: int
) -> None:
    expected = Run().losses(n_before + 5)
    run = Run()
    with run.checkpointer(tmp_path, background=background) as checkpointer:
        assert checkpointer.restore_latest() is None
        for step in range(n_before + 1):
            if step:
                run.step()
            checkpointer.save(step)
    run = Run(seed=1)
    with run.checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest() == n_before
        assert run.losses(5) == expected[n_before:]
    assert run.scheduler.last_epoch == n_before + 5


def models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    def with_(
        model: nn.Module, optimizer: type[torch.optim.Optimizer], **options: Any
    ) -> tuple[nn.Module, Any]:
        return model, optimizer([p for p in model.parameters() if p.requires_grad], **options)

    def frozen() -> nn.Module:
        model = nn.Sequential(linear(), nn.BatchNorm1d(4), linear())
        model[0].requires_grad_(False)
        return model

    def tied() -> nn.Module:
        model = nn.Sequential(linear(), nn.GELU(), linear())
        model[2].weight = model[0].weight
        return model

    def two() -> tuple[nn.Module, Any]:
        model = nn.Sequential(linear(), linear())
        return model, [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), 0.1)]

    def channels_last() -> nn.Module:
        model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 4))
        return model.to(memory_format=torch.channels_last)

    return {
        "AdamW": lambda: with_(linear(), torch.optim.AdamW, amsgrad=True),
        "SGD": lambda: with_(linear(), torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        "plain SGD": lambda: with_(linear(), torch.optim.SGD, lr=0.1),
        "Adafactor": lambda: with_(linear(), torch.optim.Adafactor),
        "lr tensor": lambda: with_(linear(), torch.optim.Adam, lr=torch.tensor(0.01)),
        "frozen": lambda: with_(frozen(), torch.optim.AdamW),
        "tied": lambda: with_(tied(), torch.optim.AdamW),
        "bf16": lambda: with_(linear().bfloat16(), torch.optim.AdamW),
        "compiled": lambda: with_(torch.compile(linear(), backend="eager"), torch.optim.AdamW),
        "two optimizers": two,
        "channels last": lambda: with_(channels_last(), torch.optim.AdamW),
        "no optimizer": lambda: (linear(), None),
    }


def bits_of(model: nn.Module, optimizers: Any) -> dict[str, Any]:
    """Return the state of a model and its optimizers as flat values by name, with tensors as bytes."""
    values = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        if isinstance(value, dict | list | tuple):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                add(f"{name}.{key}", item)
        else:
            values[name] = value

    add("model", dict(model.state_dict()))
    optimizers = [] if optimizers is None else optimizers if isinstance(optimizers, list) else [optimizers]
    add("optimizers", [optimizer.state_dict() for optimizer in optimizers])
    return values


@pytest.mark.parametrize("kind", models())
@pytest.mark.parametrize("n_before", [3, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [LOSSLESS, Grid(min_elements=1)], ids=["lossless", "exact newest step"])
def test_models_and_optimizers_of_all_kinds_resume_exactly(
    tmp_path: Path, kind: str, n_before: int, config: Method
) -> None:
    torch.manual_seed(0)
    model, optimizer = models()[kind]()
    with Checkpointer(tmp_path, model, optimizer, config=config) as checkpointer:
        for step in range(n_before):
            checkpointer.save(step)
            one_step(model, optimizer)
        checkpointer.save(n_before)
        report = checkpointer.wait()
        assert (report.exact_bytes > 0) == (config is not LOSSLESS)
        saved = bits_of(model, optimizer)
        expected = [one_step(model, optimizer) for _ in range(4)]
    model, optimizer = models()[kind]()
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        assert checkpointer.restore_latest() == n_before
        assert checkpointer.restored == Restored(step=n_before, is_exact=True)
        assert bits_of(model, optimizer) == saved
        assert [one_step(model, optimizer) for _ in range(4)] == expected


@pytest.mark.parametrize("options", [{}, {"max_staging_bytes": 1}], ids=["copied", "read in place"])
def test_a_default_device_does_not_move_saves_and_restores(tmp_path: Path, options: dict[str, Any]) -> None:
    run = Run()
    run.step()
    before = state_of(run)
    # as loops on a GPU set "cuda"
    with torch.device("meta"), run.checkpointer(tmp_path, background=False, **options) as checkpointer:
        checkpointer.save(1)
    run.step()
    with torch.device("meta"), run.checkpointer(tmp_path, **options) as checkpointer:
        checkpointer.restore(1)
    assert same(state_of(run), before)


def test_the_files_are_ordinary_ones(tmp_path: Path) -> None:
    run = Run()
    with run.checkpointer(tmp_path, background=False) as checkpointer:
        run.step()
        checkpointer.save(1)
    weights = load_file(tmp_path / "step-00000001.ckptz")
    assert same(weights, state_of(run))
    state = load_file(tmp_path / "step-00000001.state.ckptz")
    moment = run.optimizer.state[run.model[0].weight]["exp_avg"]
    assert state["optimizer.0.weight.exp_avg"].equal(moment)
    assert state["rng.torch"].equal(torch.get_rng_state())


def test_lossy_weights_leave_the_rest_exact(tmp_path: Path) -> None:
    model = linear(96)
    optimizer, position = torch.optim.AdamW(model.parameters()), {"table": torch.randn(96, 96)}
    exact = position["table"].clone()
    model(torch.randn(4, 96)).square().mean().backward()
    optimizer.step()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    weight = model.weight.detach().clone()
    config = KMeans(levels=16)
    extra: dict[str, Any] = {"position": position}
    with Checkpointer(tmp_path, model, optimizer, config=config, extra=extra, keep=LOSSY) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
        checkpointer.restore(2)
    assert 0 < (model.weight - weight).norm() < 0.3 * weight.norm()
    assert optimizer.state[model.weight]["exp_avg"].equal(moment)
    assert position["table"].equal(exact)


# --- the snapshot ----------------------------------------------------------------------------------


def test_buffers_are_used_again() -> None:
    snapshot, state = Snapshot(), {"a": torch.ones(5), "b": [torch.zeros(2, 2).T]}
    first = snapshot.take(state)
    state["a"] += 1
    second = snapshot.take(state)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["a"].equal(torch.full((5,), 2.0))
    assert sum(one.nbytes for one in snapshot._buffers.values()) == 9 * 4
    assert snapshot.take({"a": torch.ones(6)})["a"].shape == (6,)
    assert sum(one.nbytes for one in snapshot._buffers.values()) == 6 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_snapshot_of_device_memory_is_consistent() -> None:
    snapshot, tensor = Snapshot(), torch.zeros(1 << 24, device="cuda")
    for i in range(10):
        tensor.fill_(i)
        taken = snapshot.take({"a": tensor})
        tensor.fill_(-1)  # the device waits for the copy
        snapshot.synchronize()
        assert taken["a"].is_pinned()
        assert bool((taken["a"] == i).all())


# --- the example -----------------------------------------------------------------------------------


def test_the_example_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = ROOT / "examples" / "plain_loop.py"
    outputs = []
    for n_steps in (20, 40):
        monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path), str(n_steps)])
        runpy.run_path(str(path), run_name="__main__")
        outputs.append(capsys.readouterr().out)
    assert "from step 0" in outputs[0]
    assert "from step 20" in outputs[1]


@pytest.mark.parametrize("exact", [0, 1], ids=["lossy", "exact newest step"])
def test_a_save_decodes_as_much_however_long_its_chain_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: int
) -> None:
    decoded: list[str] = []
    keep = KeepPolicy(last=None, exact=exact)

    def counting(name: str) -> None:
        decode = getattr(reader, name)
        monkeypatch.setattr(reader, name, lambda *a: decoded.append(name) or decode(*a))

    def counts(folder: Path) -> list[int]:
        """Return the number of chunks that each save decodes, from the second delta on."""
        run, n_decoded = Run(), []
        with run.checkpointer(folder, background=False, config=GRID, keep=keep) as checkpointer:
            for step in range(1, 7):
                run.step()
                decoded.clear()
                checkpointer.save(step)
                n_decoded.append(len(decoded))
        return n_decoded[2:]

    counting("decode_chunk")
    counting("decode_codes")
    in_memory = counts(tmp_path / "held")
    assert in_memory[0] == max(in_memory) > 0
    monkeypatch.setattr("ckptz.training.checkpointer.memory_for_last", lambda: 0)
    anew = counts(tmp_path / "anew")
    assert anew == sorted(anew)
    assert anew[-1] > 2 * in_memory[-1]
    files = sorted(name for name in names_in(tmp_path / "held") if name.startswith("step-"))
    assert [(tmp_path / "held" / name).read_bytes() for name in files] == [
        (tmp_path / "anew" / name).read_bytes() for name in files
    ]


def test_what_on_save_raises_costs_no_step(tmp_path: Path) -> None:
    run = Run()

    def fail(report: SaveReport) -> None:
        raise OSError("the logger is gone")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with run.checkpointer(tmp_path, background=False, on_save=fail) as checkpointer:
            run.step()
            checkpointer.save(1)
            assert checkpointer.steps() == (1,)
    assert [str(w.message) for w in caught] == ["on_save raised OSError: the logger is gone; step 1 is saved"]
