"""All values of live states are restored exactly or refused; restores change everything or nothing."""

import copy
import random
import tempfile
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptz import Checkpointer
from ckptz.api.apply import CHECKS
from ckptz.errors import CkptzError, ConfigError
from ckptz.state.torch import TYPE_KEY
from ckptz.sync import Follower, Publisher
from ckptz.torch import apply_, save_file
from ckptz.training.snapshot import Snapshot
from tests.support.checkpointer_support import Run, identical, linear, restored, saved, state_of


class Point(NamedTuple):
    x: torch.Tensor
    y: int


COMPLEX = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6.0]])


STATES: dict[str, Any] = {
    "conjugates": {"z": COMPLEX, "conj": COMPLEX.conj(), "both": COMPLEX.conj().conj()},
    "imaginary parts": {"imag": COMPLEX.imag, "of the conjugate": COMPLEX.conj().imag},
    "views": {"x": COMPLEX.real, "transposed": COMPLEX.real.T, "row": COMPLEX.real[1], "of z": COMPLEX},
    "empty": {"a": torch.zeros(0, 3), "b": torch.zeros(0, 5), "c": torch.zeros(2, 0)},
    "keys": {1: torch.ones(2), "1": torch.zeros(2), "True": torch.full((2,), 3.0)},
    "more keys": {True: torch.ones(2), "True": torch.zeros(2), "None": torch.ones(1)},
    "lists": {"a": [torch.ones(1), (torch.zeros(1), [])], "0": {"1": torch.ones(3)}, 0: {1: torch.zeros(3)}},
}


MAY_BE_REFUSED = {"keys", "more keys"}
# The types of values that checkpoints store.
TYPES: dict[str, Any] = {
    "path": Path("logs") / "run",
    "namespace": Namespace(lr=0.1, layers=[1, 2]),
    "counter": Counter({"a": 2, 3: 1}),
    "factory": defaultdict(list, {"a": [1]}),
    "set": {1, "b"},
    "frozenset": frozenset({2.5}),
    "complex": 1 + 2j,
    "timedelta": timedelta(days=1, microseconds=3),
    "datetime": datetime(2026, 1, 2, 3, 4, 5),
    "device": torch.device("cuda", 1),
    "scalar": np.float32(0.1),
    "bool": np.bool_(True),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "own": {TYPE_KEY: "Path", "value": "not ours"},
    "nested": [({"deep": {Path("x")}},)],
}


@pytest.mark.parametrize("name", STATES)
def test_a_snapshot_tells_tensors_apart(name: str) -> None:
    snapshot, state = Snapshot(), STATES[name]
    for _ in range(2):  # the second save copies into the buffers of the first
        assert identical(snapshot.take(state), state)


@pytest.mark.parametrize("name", [*STATES, "types"])
def test_a_state_is_restored_with_its_structure(name: str, tmp_path: Path) -> None:
    model, state = linear(), TYPES if name == "types" else STATES[name]
    extra = {"it": dict(state)}
    with Checkpointer(tmp_path, model, extra=extra) as checkpointer:
        try:
            checkpointer.save(1)
        except CkptzError:
            assert name in MAY_BE_REFUSED
            return
    extra["it"].clear()
    extra["it"]["gone"] = 1
    restored(tmp_path, model, extra=extra)
    assert identical(extra["it"], dict(state))


VIEWS = [COMPLEX.conj(), COMPLEX.real, COMPLEX.imag, COMPLEX.conj().imag, COMPLEX.real.T]
tensors = st.sampled_from([COMPLEX, *VIEWS, torch.zeros(0, 2)])
keys = st.one_of(st.integers(0, 2), st.booleans(), st.sampled_from(["0", "1", "True", "x.y", ""]))
plain_values = st.sampled_from([None, True, 1, 1.5, "x"])
collections_ = st.sampled_from([OrderedDict({"x": torch.ones(1)}), Counter(a=2), defaultdict(list, a=[1])])
odd = st.sampled_from([{1}, Point(torch.ones(2), 1), torch.Size([2]), b"bytes", 2j, 1 << 80, range(3)])
odd |= st.sampled_from([np.float32(0.1), np.int64(3), np.arange(3), Path("a"), torch.device("cpu")])
nested = st.recursive(
    tensors | plain_values | collections_ | odd,
    lambda one: st.dictionaries(keys, one, max_size=4) | st.lists(one, max_size=3) | st.tuples(one, one),
)


@given(st.dictionaries(keys, nested, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_state_is_restored_unchanged_or_refused(state: dict[Any, Any]) -> None:
    model, extra = linear(), {"it": copy.deepcopy(state)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            saved(folder, model, extra=extra, jobs=1)
        except CkptzError:
            return
        extra = {"it": {}}
        restored(folder, model, extra=extra, jobs=1)
    assert identical(extra["it"], state)


# --- several files in one call ----------------------------------------------------------------------


def views(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return views by layout, each with its memory, in which a restore may change only the view."""
    n, m = shape
    pairs = torch.zeros(n, m, 2, dtype=dtype)
    wide, deep = torch.zeros(2 * n, 3 * m, dtype=dtype), torch.zeros(m, 2, n, dtype=dtype)
    return {
        "plain": ((plain := torch.zeros(n, m, dtype=dtype)), plain),
        "transposed": ((turned := torch.zeros(m, n, dtype=dtype)).T, turned),
        "one of pairs": (pairs[..., 1], pairs),
        "steps": (wide[1::2, 2::3], wide),
        "turned slice": (deep[:, 1].T, deep),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("check", CHECKS)
def test_views_of_live_tensors_follow_several_files_in_a_call(
    check: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    live = {name: view for name, (view, _) in views((30, 40), dtype).items()}
    image = torch.zeros(6, 4, 5, 3, dtype=dtype).to(memory_format=torch.channels_last)
    live |= {"image": image, "imaginary": torch.zeros(9, 7, dtype=torch.complex64).imag}
    trained = {
        name: torch.randint(0, 99, view.shape, generator=generator).to(view.dtype)
        for name, view in live.items()
    }
    publisher = Publisher(tmp_path, full_every=4)
    follower = Follower(tmp_path, check=check)
    n_files = list[int]()
    for step in range(1, 22):
        for tensor in trained.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.05] += 1
        publisher.publish(trained, step=step)
        if step % 5 == 1:
            n_files.append(len(follower.apply_to(live).files))
            assert all(torch.equal(live[name], tensor) for name, tensor in trained.items())
    assert max(n_files) > 1


@pytest.mark.parametrize("check", CHECKS)
def test_a_view_is_written_and_nothing_beside_it(check: Any, tmp_path: Path) -> None:
    for name, (view, memory) in views((30, 40), torch.float32).items():
        save_file({"x": torch.zeros(30, 40)}, tmp_path / "1.ckptz")
        save_file({"x": torch.eye(30, 40)}, tmp_path / "2.ckptz", base=tmp_path / "1.ckptz")
        apply_({"x": view}, tmp_path / "2.ckptz", check=check)
        assert torch.equal(view, torch.eye(30, 40)), name
        assert memory.count_nonzero() == 30, name


def test_elements_that_share_memory_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3, 4)}, tmp_path / "1.ckptz")
    for view in (torch.zeros(4).expand(3, 4), torch.zeros(6).unfold(0, 4, 1)):
        with pytest.raises(ConfigError, match="has elements that share memory"):
            apply_({"x": view}, tmp_path / "1.ckptz")
        assert not view.any()


# --- impossible restores -------------------------------------------------------------------------------


def everything(run: Run) -> list[Any]:
    return [
        state_of(run),
        copy.deepcopy(list(run.optimizer.state.values())),
        [group["lr"] for group in run.optimizer.param_groups],
        run.scheduler.state_dict(),
        run.shuffle.get_state(),
        dict(run.position),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state(),
    ]


class Refuses:
    """Object whose `load_state_dict` refuses its own state."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("other")


@pytest.mark.parametrize("how", ["cuda", "generator for a dict", "dict for a generator", "raises"])
def test_a_restore_that_cannot_be_changes_nothing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.losses(3)
    extra: dict[str, Any] = {"refuses": Refuses(), **run.extra}
    with monkeypatch.context() as patch:
        if how == "cuda":
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            states = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
            patch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
        if how != "raises":
            del extra["refuses"]
        saved(tmp_path, run.model, run.optimizer, extra=extra)
    run.losses(2)
    if how == "generator for a dict":
        extra["position"] = torch.Generator()
    if how == "dict for a generator":
        extra["shuffle"] = {}
    before = everything(run)
    words = {"raises": "extra 'refuses' did not take its state.*nothing else had been"}
    checkpointer = Checkpointer(tmp_path, run.model, run.optimizer, extra=extra)
    with checkpointer, pytest.raises(ConfigError, match=words.get(how, "weights_only=True")):
        checkpointer.restore(1)
    assert identical(everything(run), before)


def groups(model: torch.nn.Module, how: str) -> list[torch.optim.Optimizer]:
    parameters, adam, sgd = list(model.parameters()), torch.optim.AdamW, torch.optim.SGD
    first, last, out = parameters[:2], parameters[2:4], parameters[4:]
    one = [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.01}]
    return {
        "two": lambda: [adam(one)],
        "one": lambda: [adam([*first, *last])],
        "moved": lambda: [adam([{"params": first[:1]}, {"params": [*first[1:], *last]}])],
        "two optimizers": lambda: [adam(first), adam(last)],
        "moved between": lambda: [adam([*first, last[0]]), adam(last[1:])],
        "two kinds": lambda: [sgd([one[0], one[1]]), adam([*out])],
        "kinds that changed places": lambda: [sgd([one[0]]), adam([one[1], {"params": out}])],
    }[how]()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("two", "one"),
        ("one", "two"),
        ("two", "moved"),
        ("two optimizers", "moved between"),
        ("two kinds", "kinds that changed places"),
    ],
)
def test_other_groups_are_refused_by_name(before: str, now: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    optimizers = groups(model, before)
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    saved(tmp_path, model, optimizers)
    restored = groups(model, now)
    with Checkpointer(tmp_path, model, restored) as checkpointer:
        with pytest.raises(ConfigError, match=r"parameter '\d\.(weight|bias)'.* was saved in group \d"):
            checkpointer.restore(1)
        assert not any(optimizer.state for optimizer in restored)
        assert checkpointer.restore(1, weights_only=True) == 1


def test_groups_that_changed_places_keep_their_rates(tmp_path: Path) -> None:
    def made(sign: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        both = [{"params": list(model[i].parameters()), "lr": rate} for i, rate in ((0, 0.1), (1, 0.01))]
        optimizer = torch.optim.AdamW(both[::sign])
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, turned) = made(1), made(-1)
    saved(tmp_path, model, optimizer)
    restored(tmp_path, other, turned)
    assert [group["lr"] for group in turned.param_groups] == [0.01, 0.1]
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert identical(turned.state[ours], optimizer.state[theirs])


def test_the_milestones_of_a_sequential_scheduler_are_restored(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, Any, Any]:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        rates = torch.optim.lr_scheduler
        steps = [rates.MultiStepLR(optimizer, [2, 4]), rates.MultiStepLR(optimizer, [3, 3])]
        return model, optimizer, rates.SequentialLR(optimizer, steps, [5])

    model, optimizer, scheduler = made()
    scheduler.step()
    saved(tmp_path, model, optimizer, extra={"rates": scheduler})
    model, optimizer, resumed = made()
    restored(tmp_path, model, optimizer, extra={"rates": resumed})
    for ours, theirs in zip(resumed._schedulers, scheduler._schedulers, strict=True):
        assert type(ours.milestones) is type(theirs.milestones)
        assert ours.milestones == theirs.milestones
