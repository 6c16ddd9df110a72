"""Whatever a live state holds comes back as it was, or is refused; a restore changes all or nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptz import Checkpointer
from ckptz.errors import CkptzError, ConfigError
from ckptz.sync import Follower, Publisher
from ckptz.training.snapshot import Snapshot
from tests.support.checkpointer_support import Run, linear

COMPLEX = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6.0]])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        keys = [(type(key), key) for key in a], [(type(key), key) for key in b]
        return keys[0] == keys[1] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


STATES: dict[str, Any] = {
    "conjugates": {"z": COMPLEX, "conj": COMPLEX.conj(), "both": COMPLEX.conj().conj()},
    "imaginary parts": {"imag": COMPLEX.imag, "of the conjugate": COMPLEX.conj().imag},
    "views": {"x": COMPLEX.real, "transposed": COMPLEX.real.T, "row": COMPLEX.real[1], "of z": COMPLEX},
    "empty": {"a": torch.zeros(0, 3), "b": torch.zeros(0, 5), "c": torch.zeros(2, 0)},
    "keys": {1: torch.ones(2), "1": torch.zeros(2), "True": torch.full((2,), 3.0)},
    "more keys": {True: torch.ones(2), "True": torch.zeros(2), "None": torch.ones(1)},
    "lists": {"a": [torch.ones(1), (torch.zeros(1), [])], "0": {"1": torch.ones(3)}, 0: {1: torch.zeros(3)}},
}


@pytest.mark.parametrize("name", STATES)
def test_a_snapshot_tells_tensors_apart(name: str) -> None:
    snapshot, state = Snapshot(), STATES[name]
    for _ in range(2):  # the second time into the buffers of the first
        assert same(snapshot.take(state), state)


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_with_its_structure(name: str, tmp_path: Path) -> None:
    model, state = linear(), STATES[name]
    extra = {"it": dict(state)}
    with Checkpointer(tmp_path, model, extra=extra) as checkpointer:
        try:
            checkpointer.save(1)
        except CkptzError:
            return  # refused, and said by the save itself
    extra["it"].clear()
    with Checkpointer(tmp_path, model, extra=extra) as checkpointer:
        assert checkpointer.restore_latest() == 1
    assert same(extra["it"], dict(state))


tensors = st.sampled_from(
    [
        COMPLEX,
        COMPLEX.conj(),
        COMPLEX.real,
        COMPLEX.imag,
        COMPLEX.conj().imag,
        COMPLEX.real.T,
        torch.zeros(0, 2),
    ]
)
keys = st.one_of(st.integers(0, 2), st.booleans(), st.sampled_from(["0", "1", "True", "x.y", ""]))
nested = st.recursive(tensors, lambda one: st.dictionaries(keys, one, max_size=4) | st.lists(one, max_size=3))


@given(st.dictionaries(keys, nested, max_size=5))
@settings(max_examples=150, deadline=None)
def test_any_state_of_views_is_told_apart(state: dict[Any, Any]) -> None:
    assert same(Snapshot().take(state), state)


# --- several files in one call ----------------------------------------------------------------------


@pytest.mark.parametrize("check", ["base", "stored"])
def test_views_of_live_tensors_follow_several_files_in_a_call(check: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(6, 4, 5, 3, generator=generator).to(memory_format=torch.channels_last)
    trained = {
        "a": image.clone(memory_format=torch.preserve_format),
        "b": torch.randn(30, 40, generator=generator),
    }
    publisher = Publisher(tmp_path)
    publisher.publish({name: tensor.contiguous() for name, tensor in trained.items()}, step=1)
    memory = torch.zeros(40, 30)
    live = {"a": torch.zeros_like(image), "b": memory.T}
    follower = Follower(tmp_path, check=check)
    follower.apply_to(live)
    for step in range(2, 7):
        for tensor in trained.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.05] += 1.0
        publisher.publish({name: tensor.contiguous() for name, tensor in trained.items()}, step=step)
    assert len(follower.apply_to(live).files) > 1
    assert all(torch.equal(live[name], tensor) for name, tensor in trained.items())
    assert torch.equal(memory, trained["b"].T)


# --- restores that cannot be ---------------------------------------------------------------------------


def everything(run: Run) -> list[Any]:
    return [
        {name: tensor.clone() for name, tensor in run.model.state_dict().items()},
        [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
            for s in run.optimizer.state.values()
        ],
        [group["lr"] for group in run.optimizer.param_groups],
        run.scheduler.state_dict(),
        run.shuffle.get_state(),
        dict(run.position),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[union-attr, index]
        torch.get_rng_state(),
    ]


class Refuses:
    """Takes no state that it has given."""

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
            patch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(16, dtype=torch.uint8)])
        if how != "raises":
            del extra["refuses"]
        with Checkpointer(tmp_path, run.model, run.optimizer, extra=extra, background=False) as checkpointer:
            checkpointer.save(1)
    run.losses(2)
    if how == "generator for a dict":
        extra["position"] = torch.Generator()
    if how == "dict for a generator":
        extra["shuffle"] = {}
    before, words = (
        everything(run),
        {"raises": "extra 'refuses' did not take its state.*nothing else had been"},
    )
    checkpointer = Checkpointer(tmp_path, run.model, run.optimizer, extra=extra)
    with pytest.raises(ConfigError, match=words.get(how, "weights_only=True")):
        checkpointer.restore(1)
    checkpointer.close()
    assert same(everything(run), before)


def groups(model: torch.nn.Module, how: str) -> list[torch.optim.Optimizer]:
    first, last = list(model.parameters())[:2], list(model.parameters())[2:]
    adam = torch.optim.AdamW
    one = [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.01}]
    return {
        "two": lambda: [adam(one)],
        "one": lambda: [adam([*first, *last])],
        "moved": lambda: [adam([{"params": first[:1]}, {"params": [*first[1:], *last]}])],
        "two optimizers": lambda: [adam(first), adam(last)],
        "moved between": lambda: [adam([*first, last[0]]), adam(last[1:])],
    }[how]()


@pytest.mark.parametrize(
    ("saved", "now"),
    [("two", "one"), ("one", "two"), ("two", "moved"), ("two optimizers", "moved between")],
)
def test_other_groups_are_refused_by_name(saved: str, now: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizers = groups(model, saved)
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with Checkpointer(tmp_path, model, optimizers) as checkpointer:
        checkpointer.save(1)
    others = groups(model, now)
    with Checkpointer(tmp_path, model, others) as checkpointer:
        with pytest.raises(ConfigError, match=r"parameter '\d\.(weight|bias)'.* was saved in group \d"):
            checkpointer.restore(1)
        assert not any(optimizer.state for optimizer in others)
        assert checkpointer.restore(1, weights_only=True) == 1


def test_the_milestones_of_schedulers_in_a_row_come_back(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, Any, Any]:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        rates = torch.optim.lr_scheduler
        steps = [rates.MultiStepLR(optimizer, [2, 4]), rates.MultiStepLR(optimizer, [3, 3])]
        return model, optimizer, rates.SequentialLR(optimizer, steps, [5])

    model, optimizer, scheduler = made()
    scheduler.step()
    with Checkpointer(tmp_path, model, optimizer, extra={"rates": scheduler}) as checkpointer:
        checkpointer.save(1)
    model, optimizer, restored = made()
    with Checkpointer(tmp_path, model, optimizer, extra={"rates": restored}) as checkpointer:
        checkpointer.restore(1)
    for ours, theirs in zip(restored._schedulers, scheduler._schedulers, strict=True):
        assert type(ours.milestones) is type(theirs.milestones)
        assert ours.milestones == theirs.milestones
