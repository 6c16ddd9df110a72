"""Refused calls: class and words of the error, which is one line; no file and no tensor changes.

All run in the folder of the fixture `scene`, with names of files in it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import ckptz
import ckptz.numpy
import ckptz.torch
from ckptz import KMeans, restore, safe_open
from ckptz.errors import CkptzError, ConfigError, FormatError, LimitError, MissingBaseError, UnsupportedError
from ckptz.sync import Follower, Publisher
from ckptz.torch import apply_, load, load_file, load_model, load_state, save, save_file, save_state
from tests.support.sync_support import cloned, moved, same

ONES = torch.ones(2, 3)
LIVE = {"a": torch.arange(3000.0), "b": torch.ones(4, 5).bfloat16()}
NEXT = moved(LIVE, 1, 0.5)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a full file a, a delta b of a and c of b, a plain file, other bases, and four published steps."""
    folder = tmp_path_factory.mktemp("scene")
    save_file(LIVE, folder / "a.ckptz")
    save_file(NEXT, folder / "b.ckptz", base=folder / "a.ckptz")
    save_file(moved(NEXT, 2), folder / "c.ckptz", base=folder / "b.ckptz")
    safetensors.torch.save_file(LIVE, folder / "a.safetensors")
    (folder / "old").mkdir()
    save_file({"x": torch.arange(9)}, folder / "old" / "base.ckptz")
    save_file({"x": torch.arange(9) + 1}, folder / "delta.ckptz", base=folder / "old" / "base.ckptz")
    save_file({"z": ONES}, folder / "other.ckptz")
    publisher = Publisher(folder / "published")
    for step in range(4):
        publisher.publish(LIVE if step % 2 else NEXT, step)
    return folder


class Settings:
    """A user-defined class."""


def with_state(value: Any) -> Callable[[], object]:
    return lambda: save_state({"run": {"hooks": [1, value]}}, "new")


def cyclic_state() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["self"] = state
    return state


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in LIVE.items() if key != name}


def applying(file: str, state: Any = None, **options: Any) -> Callable[[], object]:
    return lambda: apply_(LIVE if state is None else state, file, **options)


def publishing(step: Any) -> Callable[[], object]:
    return lambda: Publisher("published").publish(LIVE, step)


HOOK = r"'run\.hooks\.1"
NOT_A_STEP = "a step is a whole number"
NO_MEMORY = {
    "sparse": torch.ones(3).to_sparse(), "meta": torch.ones(3, device="meta"), "array": np.ones(3),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "tensors": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
}  # fmt: skip
OF_KMEANS = (
    *({"levels": 1}, {"levels": 256}, {"embedding_levels": 0}, {"prune": -0.1}, {"prune": 1.0}),
    *({"protect": 1.0}, {"prune": 0.6, "protect": 0.4}, {"protect_as": "fp8"}, {"sigma": 2.0}),
    {"layer_prune": (("head", 1.0),)},
)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    # saving
    "method by name": (lambda: save(LIVE, config="lossless"), ConfigError, "LOSSLESS"),
    "arrays": (lambda: ckptz.numpy.save({"x": np.ones(3)}, config="x"), ConfigError, "LOSSLESS"),
    **{
        f"reserved {name}": (lambda name=name: save_file({name: ONES}, "new"), ConfigError, "reserved")
        for name in ("__ckptz__", "__ckptz__.index", "__ckptz__x", "__metadata__")
    },
    "reserved array": (lambda: ckptz.numpy.save({"__ckptz__": np.ones(3)}), ConfigError, "reserved"),
    "folder": (lambda: save_file(LIVE, "new/"), ConfigError, "names a folder"),
    "its base": (lambda: save_file(LIVE, "a.ckptz", base="a.ckptz"), ConfigError, "base"),
    "base of its base": (
        lambda: save_file(LIVE, "a.ckptz", base="b.ckptz"), ConfigError, r"a\.ckptz: .* under another name"),
    **{f"k-means {how}": (lambda how=how: KMeans(**how), ConfigError, "") for how in OF_KMEANS},
    # states
    "class": (with_state(Settings()), UnsupportedError, f"{HOOK}': a value of type .*Settings .* pickle"),
    "function": (with_state(len), UnsupportedError, f"{HOOK}': a value of type builtin_function"),
    "objects": (with_state(np.array(["a"], object)), UnsupportedError, f"{HOOK}': a value of type numpy"),
    "sparse": (with_state(ONES.to_sparse()), UnsupportedError, f"{HOOK}': a sparse_coo tensor"),
    "meta": (with_state(torch.empty(2, device="meta")), UnsupportedError, f"{HOOK}': a tensor on device"),
    "key": (with_state({Settings(): 1}), UnsupportedError, rf"{HOOK}\.key': a value of type"),
    "cycle": (lambda: save_state(cyclic_state(), "new"), ConfigError, "a part of itself"),
    "plain state": (lambda: load_state("a.safetensors"), FormatError, "not a .ckptz file; read it with"),
    "state gone": (lambda: load_state("gone"), FileNotFoundError, ""),
    # reading
    **{
        f"framework {name}": (lambda name=name: safe_open("a.ckptz", name), UnsupportedError, "numpy")
        for name in ("tf", "tensorflow", "jax", "flax", "mlx", "paddle")
    },
    "moved base": (lambda: load_file("delta.ckptz"), MissingBaseError, r"base\.ckptz"),
    "bytes alone": (lambda: load(Path("b.ckptz").read_bytes()), MissingBaseError, r"a\.ckptz"),
    "limit": (lambda: load(save({"x": torch.ones(9)}), max_decoded_bytes=35), LimitError, "max_decoded"),
    "limit of arrays": (
        lambda: ckptz.numpy.load(ckptz.numpy.save({"x": np.zeros(9)}), max_decoded_bytes=71),
        LimitError, "max_decoded_bytes"),
    "limit of restore": (lambda: restore("a.ckptz", "new", max_decoded_bytes=99), LimitError, r"a\.ckptz"),
    "other model": (
        lambda: load_model(torch.nn.Linear(2, 2), "other.ckptz", strict=False), ConfigError, "no name"),
    # weight sync
    "check": (applying("a.ckptz", check="none"), ConfigError, "check must be one of"),
    "no dict": (applying("a.ckptz", list(LIVE.values())), ConfigError, "a state is a dict"),
    "gone": (applying("gone"), FileNotFoundError, ""),
    "plain": (applying("a.safetensors"), FormatError, r"a\.safetensors: not a \.ckptz file"),
    "dtype": (
        applying("b.ckptz", LIVE | {"a": LIVE["a"].half()}),
        ConfigError,
        "'a' is F32 .*F16.*; convert",
    ),
    "shape": (
        applying("b.ckptz", LIVE | {"a": LIVE["a"][None]}),
        ConfigError,
        r"\[3000\], .*F32 \[1, 3000\]",
    ),
    "tensor less": (applying("b.ckptz", without("b")), ConfigError, "lacks tensor 'b'"),
    "tensors less": (applying("b.ckptz", {}), ConfigError, "lacks tensor '(a|b)' and 1 more"),
    "memory": (applying("b.ckptz", max_decoded_bytes=1000), LimitError, r"b\.ckptz: decodes to"),
    "other base": (applying("c.ckptz"), MissingBaseError, r"c\.ckptz: .* apply the deltas in order"),
    "twice": (applying("b.ckptz", NEXT), MissingBaseError, r"b\.ckptz: .* applied before"),
    **{
        f"no memory: {name}": (applying("a.ckptz", LIVE | {"a": value}), ConfigError, "'a'")
        for name, value in NO_MEMORY.items()
    },
    **{f"older step {n}": (publishing(n), ConfigError, f"step {n} is not after the newest") for n in (2, 3)},
    **{f"step {n!r}": (publishing(n), ConfigError, NOT_A_STEP) for n in (-1, 1 << 63, 1.5, "4")},
    **{
        f"publisher {how}": (lambda how=how: Publisher("old", **how), ConfigError, next(iter(how)))
        for how in ({"full_every": 0}, {"full_every": 65}, {"keep_full": 0})
    },
    "nothing": (lambda: Follower("old").apply_to(LIVE), MissingBaseError, "nothing is published here"),
    "ahead": (lambda: Follower("published").apply_to(LIVE, 9), MissingBaseError, "step 9 is not published"),
    "follower's check": (lambda: Follower("old", check="none"), ConfigError, "check must be one of"),
}  # fmt: skip


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line_and_changes_nothing(
    name: str, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, error, words = REFUSED[name]
    monkeypatch.chdir(scene)
    files, live, newer = contents(scene), cloned(LIVE), cloned(NEXT)
    with pytest.raises(error, match=words) as caught:
        call()
    assert not isinstance(caught.value, CkptzError) or "\n" not in str(caught.value)
    assert contents(scene) == files
    assert same(LIVE, live)
    assert same(NEXT, newer)
