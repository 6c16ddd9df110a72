"""The Checkpointer in a training loop: what resumes, what is said, and what it refuses."""

from __future__ import annotations

import errno
import os
import runpy
import subprocess
import sys
import textwrap
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointer_support import Run, loss_after, names_in, saved_run
from torch import nn

from ckptz import Checkpointer, KeepPolicy, KMeans
from ckptz.container import publish
from ckptz.container.publish import TEMPORARY_SUFFIX
from ckptz.errors import ChecksumError, ConfigError, CorruptionError, UnsupportedError, WriteError
from ckptz.hooks.snapshot import Snapshot
from ckptz.store import steps as store_steps
from ckptz.torch import load_file

ROOT = Path(__file__).parent.parent


def linear(width: int = 4) -> nn.Module:
    return nn.Linear(width, width)


def state_of(run: Run) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(tensor.equal(b[name]) for name, tensor in a.items())


# --- resuming -----------------------------------------------------------------------------------


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
        made = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 4))
        return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    return {
        "AdamW": lambda: with_(linear(), torch.optim.AdamW, amsgrad=True),
        "SGD": lambda: with_(linear(), torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        "plain SGD": lambda: with_(linear(), torch.optim.SGD, lr=0.1),
        "Adafactor": lambda: with_(linear(), torch.optim.Adafactor),
        "lr tensor": lambda: with_(linear(), torch.optim.Adam, lr=torch.tensor(0.01)),
        "frozen": lambda: with_(frozen(), torch.optim.AdamW),
        "tied": lambda: with_(tied(), torch.optim.AdamW),
        "bf16": lambda: with_(linear().bfloat16(), torch.optim.AdamW),
        "compiled": lambda: with_(torch.compile(linear(), backend="eager"), torch.optim.AdamW),  # type: ignore[arg-type]
        "two optimizers": two,
        "channels last": lambda: with_(channels_last(), torch.optim.AdamW),
        "no optimizer": lambda: (linear(), None),
    }


def one_step(model: nn.Module, optimizers: Any) -> float:
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(6, 4).to(dtype)).square().mean()
    optimizers = [] if optimizers is None else optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("kind", models())
@pytest.mark.parametrize("n_before", [0, 3])
def test_models_and_optimizers_of_all_kinds_resume_exactly(tmp_path: Path, kind: str, n_before: int) -> None:
    torch.manual_seed(0)
    model, optimizer = models()[kind]()
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        for _ in range(n_before):
            one_step(model, optimizer)
        checkpointer.save(n_before)
        expected = [one_step(model, optimizer) for _ in range(4)]
    model, optimizer = models()[kind]()
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.restore_latest()
        assert [one_step(model, optimizer) for _ in range(4)] == expected


def test_saving_changes_nothing_in_the_run(tmp_path: Path) -> None:
    expected = Run().losses(6)
    run = Run()
    with run.checkpointer(tmp_path) as checkpointer:
        losses = []
        for step in range(6):
            checkpointer.save(step)  # also before the optimizer has any state
            losses.append(run.step())
    assert losses == expected


def test_a_save_holds_what_was_there_when_it_was_asked_for(tmp_path: Path) -> None:
    run = Run()
    with run.checkpointer(tmp_path) as checkpointer:
        run.step()
        before = state_of(run)
        checkpointer.save(1)
        for parameter in run.model.parameters():
            parameter.data.zero_()
        checkpointer.wait()
        checkpointer.restore(1)
    assert same(state_of(run), before)


def test_the_files_are_ordinary_ones(tmp_path: Path) -> None:
    run = Run()
    with run.checkpointer(tmp_path, background=False) as checkpointer:
        run.step()
        checkpointer.save(1)
    weights = load_file(tmp_path / "step-00000001.ckptz")
    assert same({name.removeprefix("model."): tensor for name, tensor in weights.items()}, state_of(run))
    state = load_file(tmp_path / "step-00000001.state.ckptz")
    moment = run.optimizer.state[run.model[0].weight]["exp_avg"]
    assert state["optimizer.0.weight.exp_avg"].equal(moment)
    assert state["rng.torch"].equal(torch.get_rng_state())


def test_extras_of_all_kinds_come_back(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {
                "seen": Counter({3: 2}),
                "by_name": defaultdict(list, {"a": [1]}),
                "best": np.float64(0.5),
                "order": torch.randperm(5),
                "nested": ({"deep": (1, [2.5, None])},),
            }

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.state = state_dict

    loader, position, model = Loader(), {"epoch": 3}, linear()
    saved = loader.state
    extra: dict[str, Any] = {"loader": loader, "position": position}
    with Checkpointer(tmp_path, model, extra=extra) as checkpointer:
        checkpointer.save(1)
        loader.state = {name: type(value)() for name, value in saved.items() if name != "order"}
        position.update(epoch=9, other=1)
        checkpointer.restore(1)
    assert loader.state.pop("order").equal(saved.pop("order"))
    assert loader.state == saved
    assert {name: type(value) for name, value in loader.state.items() if name != "best"} == {
        name: type(value) for name, value in saved.items() if name != "best"
    }
    assert position == {"epoch": 3}


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
    with Checkpointer(tmp_path, model, optimizer, config=config, extra=extra) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
        checkpointer.restore(2)
    assert 0 < (model.weight - weight).norm() < 0.3 * weight.norm()
    assert optimizer.state[model.weight]["exp_avg"].equal(moment)
    assert position["table"].equal(exact)


# --- saving beside training ---------------------------------------------------------------------


class Gate:
    """Holds writers back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        self.error: Exception | None = None
        real = store_steps.StepStore.write

        def write(store: Any, *args: Any, **kwargs: Any) -> Any:
            self.is_reached.set()
            self.is_open.wait(10)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return real(store, *args, **kwargs)

        monkeypatch.setattr(store_steps.StepStore, "write", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_training_goes_on_while_a_save_is_written_and_the_next_save_waits(tmp_path: Path, gate: Gate) -> None:
    run = Run()
    with run.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1)
        assert gate.is_reached.wait(10)
        run.losses(3)
        assert checkpointer.steps() == ()
        threading.Timer(0.2, gate.is_open.set).start()
        checkpointer.save(2)
        assert checkpointer.steps()[:1] == (1,)
        report = checkpointer.wait()
    assert report is not None
    assert report.step == 2
    assert report.stall_seconds >= report.waited_seconds > 0.1
    assert report.stored_bytes == sum(
        (tmp_path / name).stat().st_size for name in names_in(tmp_path) if name.startswith("step-00000002")
    )


@pytest.mark.parametrize("then", ["save", "wait", "restore_latest", "close"])
def test_an_error_in_the_background_surfaces_once_at_the_next_call(
    tmp_path: Path, gate: Gate, then: str
) -> None:
    gate.is_open.set()
    run = Run()
    checkpointer = run.checkpointer(tmp_path)
    run.step()
    checkpointer.save(1)
    checkpointer.wait()
    gate.error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    checkpointer.save(2)
    arguments = (3,) if then == "save" else ()
    with pytest.raises(
        WriteError, match=r"step 2 was not saved: .*quota.*the steps before it are whole"
    ) as caught:
        getattr(checkpointer, then)(*arguments)
    assert caught.value.errno == errno.EDQUOT
    checkpointer.save(2)
    checkpointer.close()
    assert loss_after(tmp_path)[0] == 2


def test_a_full_disk_leaves_the_steps_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = saved_run(tmp_path, 2)
    before = names_in(tmp_path)
    run = Run(seed=4)
    with run.checkpointer(tmp_path, background=False) as checkpointer:
        checkpointer.restore_latest()
        run.step()

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(publish.os, "fsync", full)
            with pytest.raises(WriteError, match="No space left") as caught:
                checkpointer.save(3)
        assert caught.value.errno == errno.ENOSPC
        assert names_in(tmp_path) == before
        checkpointer.save(3)
    assert loss_after(tmp_path, 1) == (1, losses[2])
    assert loss_after(tmp_path)[0] == 3


def test_what_ended_training_is_not_hidden_by_a_lost_save(tmp_path: Path, gate: Gate) -> None:
    gate.is_open.set()
    gate.error = OSError(errno.EIO, os.strerror(errno.EIO))
    run = Run()

    def train() -> None:
        with run.checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert "step 1 was not saved" in caught.value.__notes__[0]


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from checkpointer_support import Run
    from ckptz import Checkpointer
    run = Run(width=64)
    run.step()
    checkpointer = Checkpointer(sys.argv[1], run.model, run.optimizer, extra=run.extra, jobs=int(sys.argv[2]))
    checkpointer.save(1)
    {more}
"""


def run_script(folder: Path, jobs: int, more: str = "") -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(SCRIPT).format(tests=str(ROOT / "tests"), more=more)
    command = [sys.executable, "-c", text, str(folder), str(jobs)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    done = run_script(tmp_path, jobs=3)
    assert done.returncode == 0, done.stderr
    run = Run(width=64)
    with run.checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest() == 1


def test_a_program_that_ends_says_what_was_lost(tmp_path: Path) -> None:
    more = "checkpointer.wait(); checkpointer._store.write = lambda *_: 1 / 0; checkpointer.save(2)"
    done = run_script(tmp_path, jobs=1, more=more)
    assert done.returncode == 0
    assert "ckptz: step 2 was lost: division by zero" in done.stderr


# --- what is refused ----------------------------------------------------------------------------


def test_a_step_is_saved_once_and_after_those_that_are_there(tmp_path: Path) -> None:
    run = Run()
    with run.checkpointer(tmp_path, every=2) as checkpointer:
        assert [checkpointer.maybe_save(step) for step in range(1, 5)] == [False, True, False, True]
        checkpointer.save(4)
        with pytest.raises(ConfigError, match="step 3 is not after 4"):
            checkpointer.save(3)
        with pytest.raises(ConfigError, match="from 0 to below"):
            checkpointer.save(-1)
        checkpointer.restore(2)
        with pytest.raises(ConfigError, match="discard_after"):
            checkpointer.save(3)
        checkpointer.discard_after(2)
        checkpointer.save(3)
        assert checkpointer.steps() == () or checkpointer.wait() is not None
        assert checkpointer.steps() == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"anchor_every": 0}, "anchor_every must be 1..64"),
        ({"anchor_every": 65}, "anchor_every must be 1..64"),
        ({"config": "lossless"}, "config must be a configuration"),
        ({"keep": 5}, "keep must be a KeepPolicy"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpointer(tmp_path, linear(), **options)
    assert not names_in(tmp_path)


def test_maybe_save_needs_to_know_when(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every=N"):
        Checkpointer(tmp_path, linear()).maybe_save(1)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        Checkpointer(tmp_path, linear()).save(1)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match="run"):
        Checkpointer(tmp_path / "run", linear()).save(1)


def test_a_model_of_another_shape_is_refused_and_left_alone(tmp_path: Path) -> None:
    saved_run(tmp_path, 1)
    other = Run(width=7)
    before, seen = state_of(other), dict(other.position)
    with other.checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ConfigError, match=r"'0.weight' is float32 \[12, 12\], and float32 \[7, 7\]"):
            checkpointer.restore_latest()
        with pytest.raises(ConfigError, match="step 9 is not there; the newest is 1"):
            checkpointer.restore(9)
    assert same(state_of(other), before)
    assert other.position == seen


@pytest.mark.parametrize(("saved", "live"), [(2, 3), (3, 2)])
def test_parameters_added_or_removed_are_named(tmp_path: Path, saved: int, live: int) -> None:
    models = {n: nn.Sequential(*(linear() for _ in range(n))) for n in (2, 3)}
    with Checkpointer(tmp_path, models[saved]) as checkpointer:
        checkpointer.save(1)
    with pytest.raises(ConfigError, match=r"'2.weight' and 1 more"):
        Checkpointer(tmp_path, models[live]).restore_latest()


def test_parameters_that_come_and_go_between_saves_stand_alone(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), linear())
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
        model.append(linear())
        checkpointer.save(2)
        del model[0]
        checkpointer.save(3)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        nn.init.zeros_(model[0].weight)
        checkpointer.restore(3)
    assert same(dict(model.state_dict()), before)


def test_another_optimizer_between_saves_is_saved_and_not_restored_into_the_first(tmp_path: Path) -> None:
    model = linear()
    first, second = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)
    with Checkpointer(tmp_path, model, first) as checkpointer:
        one_step(model, first)
        checkpointer.save(1)
        checkpointer.optimizer = second
        one_step(model, second)
        checkpointer.save(2)
        expected = [one_step(model, second) for _ in range(2)]
        checkpointer.restore(2)
        assert [one_step(model, second) for _ in range(2)] == expected
        with pytest.raises(ConfigError, match=r"was saved with AdamW, now there is SGD.*weights_only=True"):
            checkpointer.restore(1)
        checkpointer.restore(1, weights_only=True)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(linear().parameters())
    with pytest.raises(ConfigError, match="parameters that are not the model's"):
        Checkpointer(tmp_path, linear(), optimizer).save(1)


def test_an_optimizer_of_fewer_parameters_is_refused(tmp_path: Path) -> None:
    model = linear()
    with Checkpointer(tmp_path, model, torch.optim.AdamW(model.parameters())) as checkpointer:
        checkpointer.save(1)
    with pytest.raises(ConfigError, match="'bias' is not in the optimizer"):
        Checkpointer(tmp_path, model, torch.optim.AdamW([model.weight])).restore(1)


def test_other_extras_are_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, linear(), extra={"position": {}}) as checkpointer:
        checkpointer.save(1)
    with pytest.raises(ConfigError, match="extra 'position' was saved, and is not given now"):
        Checkpointer(tmp_path, linear()).restore(1)
    with pytest.raises(ConfigError, match="extra 'file' is a PosixPath"):
        Checkpointer(tmp_path, linear(), extra={"file": Path()}).save(2)  # type: ignore[dict-item]


def test_values_that_need_code_are_named(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"position": {"where": Path()}}
    checkpointer = Checkpointer(tmp_path, linear(), extra=extra)
    checkpointer.save(1)
    with pytest.raises(UnsupportedError, match=r"step 1 was not saved: 'extra\.position\.where'"):
        checkpointer.close()


@pytest.mark.parametrize("where", ["save", "restore"])
def test_tensors_without_values_are_named(tmp_path: Path, where: str) -> None:
    with Checkpointer(tmp_path, linear()) as checkpointer:
        checkpointer.save(1)
    with torch.device("meta"):
        offloaded = Checkpointer(tmp_path, linear())
    with pytest.raises(ConfigError, match=r"'(model\.)?weight' is on the meta device"):
        getattr(offloaded, where)(2 if where == "save" else 1)


def test_sparse_tensors_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'extra\.mask' is not dense"):
        Snapshot().take({"extra": {"mask": torch.eye(3).to_sparse()}})


# --- damage -------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_step_is_named_and_changes_nothing(tmp_path: Path) -> None:
    saved_run(tmp_path, 2, anchor_every=1)
    path = tmp_path / "step-00000002.state.ckptz"
    flip(path, path.stat().st_size // 2)
    run = Run(seed=6)
    before, seen = state_of(run), dict(run.position)
    with run.checkpointer(tmp_path) as checkpointer:
        with pytest.raises((ChecksumError, CorruptionError), match=r"step-00000002\.state\.ckptz"):
            checkpointer.restore_latest()
        assert same(state_of(run), before)
        assert run.position == seen
        assert checkpointer.restore(1) == 1


def test_a_save_against_a_damaged_base_is_an_anchor(tmp_path: Path) -> None:
    saved_run(tmp_path, 1)
    path = tmp_path / "step-00000001.ckptz"
    frames_begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, frames_begin + 100)
    run = Run()
    with run.checkpointer(tmp_path, background=False) as checkpointer:
        run.step()
        checkpointer.save(2)
        report = checkpointer.wait()
        assert report is not None
        assert "weights: stored as an anchor, because the base cannot be read" in " ".join(report.notes)
        before = state_of(run)
        run.step()
        checkpointer.restore(2)
    assert same(state_of(run), before)


def test_weights_and_state_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    saved_run(tmp_path / "a", 1)
    run = Run(seed=3)
    with run.checkpointer(tmp_path / "b") as checkpointer:
        checkpointer.save(1)
    os.replace(tmp_path / "b" / "step-00000001.state.ckptz", tmp_path / "a" / "step-00000001.state.ckptz")
    with (
        run.checkpointer(tmp_path / "a") as checkpointer,
        pytest.raises(CorruptionError, match="other weights"),
    ):
        checkpointer.restore_latest()


# --- the snapshot -------------------------------------------------------------------------------


def test_buffers_are_used_again() -> None:
    snapshot, state = Snapshot(), {"a": torch.ones(5), "b": [torch.zeros(2, 2).T]}
    first = snapshot.take(state)
    state["a"] += 1
    second = snapshot.take(state)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["a"].equal(torch.full((5,), 2.0))
    assert snapshot.n_bytes == 9 * 4
    assert snapshot.take({"a": torch.ones(6)})["a"].shape == (6,)
    assert snapshot.n_bytes == 6 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_snapshot_of_device_memory_is_consistent() -> None:
    snapshot, tensor = Snapshot(), torch.zeros(1 << 24, device="cuda")
    for i in range(10):
        tensor.fill_(i)
        taken = snapshot.take({"a": tensor})
        tensor.fill_(-1)  # waits on the device for the copy
        snapshot.synchronize()
        assert taken["a"].is_pinned()
        assert bool((taken["a"] == i).all())


# --- the example --------------------------------------------------------------------------------


def test_the_example_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = ROOT / "examples" / "plain_loop.py"
    assert len(path.read_text().splitlines()) < 80
    said = []
    for n_steps in (20, 40):
        monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path), str(n_steps)])
        runpy.run_path(str(path), run_name="__main__")
        said.append(capsys.readouterr().out)
    assert "from step 0" in said[0]
    assert "from step 20" in said[1]


def test_nothing_unfinished_is_left_behind(tmp_path: Path) -> None:
    saved_run(tmp_path, 3, keep=KeepPolicy(last=1))
    assert not [name for name in names_in(tmp_path) if name.endswith(TEMPORARY_SUFFIX)]
