"""`save_state` and `load_state` round-trip states of `torch.save` without pickle."""

from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import ckptz

torch = pytest.importorskip("torch")

from ckptz import Grid  # noqa: E402  # torch is optional
from ckptz.state.torch import on_device  # noqa: E402
from ckptz.torch import load_state, save_file, save_state  # noqa: E402
from tests.support.script_states import STATES, nanogpt  # noqa: E402
from tests.support.tree_support import assert_same_state  # noqa: E402


@pytest.mark.parametrize("name", STATES)
def test_the_states_of_public_scripts_are_restored(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    save_state(state, tmp_path / "state.ckptz", jobs=1)
    loaded = load_state(tmp_path / "state.ckptz", jobs=1)
    assert_same_state(loaded, state)
    assert_same_state(state, STATES[name]())  # the saved state itself is unchanged


def test_what_is_one_stays_one_and_views_share_their_memory(tmp_path: Path) -> None:
    memory = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.ones(3))
    state = {"all": memory, "part": memory[2:8].reshape(2, 3).T, "tied": [weight, weight]}
    save_state(state, tmp_path / "state.ckptz")
    for loaded in (
        load_state(tmp_path / "state.ckptz"),
        on_device(load_state(tmp_path / "state.ckptz"), "cpu"),
    ):
        assert_same_state(loaded, state)
        assert loaded["tied"][0] is loaded["tied"][1]
        loaded["all"][3] = -1
        assert loaded["part"][1, 0] == -1, "they share their memory"


def test_another_device_keeps_what_is_shared(tmp_path: Path) -> None:
    memory = torch.arange(6.0)
    shared = Namespace(pair=({"a": memory, "b": memory[2:]}, [torch.nn.Parameter(memory)]), other=np.ones(2))
    save_state(shared, tmp_path / "state.ckptz")
    loaded = load_state(tmp_path / "state.ckptz", "meta")  # the only other device that every machine has
    (two, [weight]) = loaded.pair
    a, b = two["a"], two["b"]
    assert a.device.type == b.device.type == weight.device.type == "meta"
    assert type(weight) is torch.nn.Parameter
    assert (b.storage_offset(), b.stride()) == (2, (1,))
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata == weight.untyped_storage()._cdata
    assert loaded.other.sum() == 2, "an array stays where arrays are"


def test_later_states_are_deltas_and_methods_lose_what_they_may(tmp_path: Path) -> None:
    state = nanogpt()
    state["model"]["wide"] = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    save_state(state, tmp_path / "1.ckptz")
    state["model"]["wide"] += 1e-6
    save_state(state, tmp_path / "2.ckptz", base=tmp_path / "1.ckptz")
    assert_same_state(load_state(tmp_path / "2.ckptz"), state)
    sizes = [(tmp_path / f"{i}.ckptz").stat().st_size for i in (1, 2)]
    assert sizes[1] < sizes[0] / 2
    save_state(state, tmp_path / "lossy.ckptz", config=Grid())
    loaded = load_state(tmp_path / "lossy.ckptz")
    assert (tmp_path / "lossy.ckptz").stat().st_size < sizes[0] / 3
    assert not torch.equal(loaded["model"]["wide"], state["model"]["wide"])
    loaded["model"]["wide"] = state["model"]["wide"]
    assert loaded["config"] == state["config"]
    assert_same_state(loaded["optimizer"]["param_groups"], state["optimizer"]["param_groups"])


def test_the_file_of_a_torch_file_is_read_as_its_state(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(3)}, "step": 3}
    torch.save(state, tmp_path / "state.pt")
    ckptz.compress(tmp_path / "state.pt")
    assert_same_state(load_state(tmp_path / "state.ckptz"), state)
    save_state(state, tmp_path / "own.ckptz")
    assert ckptz.restore(tmp_path / "own.ckptz").kind == "pt", "and the other way round"
    assert_same_state(torch.load(tmp_path / "own.pt", weights_only=True), state)
    save_file({"a": torch.ones(3)}, tmp_path / "flat.ckptz")
    assert_same_state(load_state(tmp_path / "flat.ckptz"), {"a": torch.ones(3)})


def test_a_defaultdict_keeps_no_code(tmp_path: Path) -> None:
    save_state({"a": defaultdict(lambda: 3, {"b": 1})}, tmp_path / "state.ckptz")
    loaded = load_state(tmp_path / "state.ckptz")["a"]
    assert (type(loaded), loaded.default_factory, dict(loaded)) == (defaultdict, None, {"b": 1})
