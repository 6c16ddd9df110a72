"""Arguments of a wrong type are refused by name, and numbers of other libraries become built-in numbers."""

import re
from collections.abc import Callable
from dataclasses import astuple, field, make_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptz
from ckptz.api.apply import apply_
from ckptz.codec.method import Method
from ckptz.errors import ConfigError, check_float, check_int
from ckptz.numpy import load, save, save_file
from ckptz.parallel import Workers
from ckptz.sync import Follower, Publisher
from ckptz.wire.endpoint import Link
from ckptz.wire.policy import LinkPolicy, Tiled, TopK, Uniform, policy_of

torch = pytest.importorskip("torch")

WEIGHTS = {"weight": np.random.default_rng(0).standard_normal((96, 96), np.float32)}


def quality(state: Any) -> float:
    return 1.0


def register_accelerate(options: Any) -> object:
    accelerate = pytest.importorskip("accelerate")
    from ckptz.integrations.accelerate import register

    return register(accelerate.Accelerator(cpu=True), options)


def dcp_writer(**settings: Any) -> object:
    from ckptz.integrations.dcp import CkptzStorageWriter

    return CkptzStorageWriter("folder", **settings)


def linked_chain(options: Any) -> object:
    from ckptz.integrations.linked import Chain

    return Chain(options)


def chain_options(**settings: Any) -> object:
    from ckptz.integrations.linked import ChainOptions

    return ChainOptions(**settings)


def checkpointer(**settings: Any) -> object:
    return ckptz.Checkpointer("run", torch.nn.Linear(2, 2), **settings)


def calibration(**settings: Any) -> object:
    from ckptz.hooks import Calibration

    return Calibration(torch.nn.Linear(2, 2), **settings)


def sensitivity(**settings: Any) -> object:
    from ckptz.hooks import SensitivityTracker

    return SensitivityTracker(torch.nn.Linear(2, 2), **settings)


def search(**settings: Any) -> object:
    return ckptz.SearchOptions(**{"budgets": (ckptz.Budget(quality),), **settings})


def compress(**settings: Any) -> object:
    save_file(WEIGHTS, "a.ckptz")
    return ckptz.compress("a.ckptz", "b.ckptz", **settings)


def restore(**settings: Any) -> object:
    save_file(WEIGHTS, "a.ckptz")
    return ckptz.restore("a.ckptz", "a.safetensors", **settings)


def diff(**settings: Any) -> object:
    save_file(WEIGHTS, "a.ckptz")
    return ckptz.diff("a.ckptz", "a.ckptz", **settings)


def prune(**settings: Any) -> object:
    save_file(WEIGHTS, "step-1.ckptz")
    return ckptz.prune(".", **settings)


def apply(**settings: Any) -> object:
    save_file(WEIGHTS, "a.ckptz")
    return apply_({"weight": torch.zeros(96, 96)}, "a.ckptz", **settings)


def follow(**settings: Any) -> object:
    Publisher("published").publish({"weight": torch.zeros(96, 96)}, step=1)
    return Follower("published").apply_to({"weight": torch.zeros(96, 96)}, **settings)


def save_bytes(**settings: Any) -> object:
    return save(WEIGHTS, **settings)


def load_bytes(**settings: Any) -> object:
    return load(save(WEIGHTS), **settings)


def budget(**settings: Any) -> object:
    return ckptz.Budget(quality, **settings)


def probe(**settings: Any) -> object:
    return ckptz.ResumeProbe(quality, **settings)


def publisher(**settings: Any) -> object:
    return Publisher("published", **settings)


def follower(**settings: Any) -> object:
    return Follower("published", **settings)


def link(**settings: Any) -> object:
    return Link(dst=1, policy="safe", **settings)


# Callables, and the wrong values of each of their arguments.
WRONG: list[tuple[Callable[..., object], dict[str, tuple[Any, ...]]]] = [
    (
        ckptz.KeepPolicy,
        {"last": ("5", 2.0), "exact": (1.0,), "every": ("5",), "best": (None,), "weights": (5,)},
    ),
    (ckptz.KeepRules, {"lower_is_better": ("no",)}),
    (ckptz.Lossless, {"sparse": ("no",)}),
    (ckptz.Grid, {"step": ("1", None, 1j, np.str_("1"), np.array([1.0, 2.0])), "dead_zone": ("0",)}),
    (ckptz.Grid, {"min_elements": (10.5,), "moments": ({"second_step": 1},)}),
    (
        ckptz.KMeans,
        {"levels": ("16", 16.0), "embedding_levels": ("16",), "prune": ("0.1",), "sigma": (None,)},
    ),
    (ckptz.KMeans, {"layer_prune": ({"head": 0.0}, "head")}),
    (ckptz.Moments, {"first_step": ("1",)}),
    (budget, {"max_drop": ("1%",), "relative": ("no",)}),
    (probe, {"n_steps": (2.5,), "noise_floor": ("0",)}),
    (ckptz.Agreement, {"logits": ("evaluate.py:logits",)}),
    (search, {"max_evaluations": (2.5,), "budgets": (0.01, (0.01,)), "cubes": (5,), "template": ("grid",)}),
    (search, {"parent": ({"step": 1},)}),
    (checkpointer, {"every": ("5", 5.0), "full_every": ("16",), "restores": (1.5,), "jobs": (0, "2")}),
    (linked_chain, {"options": ({"exact": 1},)}),
    (dcp_writer, {"options": ({"exact": 1},), "keep_last": ("3",)}),
    (register_accelerate, {"options": ({"exact": 1},)}),
    (chain_options, {"exact": (1.0,), "full_every": ("16",), "jobs": (0,)}),
    (calibration, {"memory_cap": ("1 GB",)}),
    (sensitivity, {"beta": ("0.9",)}),
    (compress, {"step": ("5", 5.0), "budget": (0.01,), "search": ("grid",)}),
    (prune, {"keep": ({"last": 2},), "after": ("1",)}),
    (restore, {"max_decoded_bytes": ("1 GB",)}),
    (diff, {"top": ("2", -1)}),
    (save_bytes, {"jobs": ("2", 0, -1)}),
    (load_bytes, {"jobs": (2.0, 0), "max_decoded_bytes": ("1 GB",)}),
    (apply, {"max_decoded_bytes": ("1 GB",)}),
    (ckptz.warm_up, {"jobs": (0,)}),
    (publisher, {"full_every": ("10",), "keep_full": (2.0,), "jobs": ("2",)}),
    (follower, {"jobs": (0,)}),
    (follow, {"step": ("1",)}),
    (Uniform, {"bits": ("8", 8.0), "block": (256.0,), "rans": ("no",)}),
    (TopK, {"share": ("0.1",), "values": (8.0,)}),
    (Tiled, {"bits": ("4",), "tile": (64.0,)}),
    (LinkPolicy, {"forward": ("q8",), "warmup_steps": ("3",), "seed": (0.5,), "ef_decay": ("0.5",)}),
    (LinkPolicy, {"feedback": (("ef",),)}),
    (policy_of, {"policy": ({"forward": "q8"},)}),
    (link, {"src": ("0",)}),
]


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        pytest.param(call, name, value, id=f"{call.__name__}-{name}-{str(value)[:60]}")
        for call, invalid_values in WRONG
        for name, values in invalid_values.items()
        for value in values
    ],
)
def test_a_wrong_type_is_refused_by_its_name(
    call: Callable[..., object], name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        call(**{name: value})
    assert re.search(rf"\b{name.replace('_', '[_ ]')}", str(caught.value))
    assert repr(value)[:40] in str(caught.value)


def test_prune_deletes_nothing_if_a_count_is_a_float(tmp_path: Path) -> None:
    """A float as a count once turned each prune into a warning, and steps were never deleted."""
    save_file(WEIGHTS, tmp_path / "step-1.ckptz")
    with pytest.raises(ConfigError, match="exact must be a whole number"):
        ckptz.prune(tmp_path, ckptz.KeepPolicy(last=1, exact=1.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.ckptz"]


SCALARS: list[Callable[[float], Any]] = [
    *(np.float16, np.float32, np.float64, np.longdouble, np.array, Fraction, torch.tensor),
    lambda value: torch.tensor(value, dtype=torch.bfloat16),
]
COUNTS: list[Callable[[int], Any]] = [np.uint8, np.int64, np.array, torch.tensor]


@pytest.mark.parametrize("scalar", SCALARS)
def test_a_file_does_not_depend_on_the_type_of_a_number(scalar: Callable[[float], Any]) -> None:
    state = WEIGHTS | {"weight.exp_avg": WEIGHTS["weight"] / 8}
    for build in (
        lambda number: ckptz.Grid(step=number, dead_zone=number, moments=ckptz.Moments(first_step=number)),
        lambda number: ckptz.KMeans(prune=number, protect=number / 8, sigma=number),
    ):
        converted, expected = build(scalar(0.25)), build(0.25)
        assert converted == expected
        assert hash(converted) == hash(expected)
        assert save(state, config=converted) == save(state, config=expected)


@pytest.mark.parametrize("scalar", COUNTS)
def test_a_file_does_not_depend_on_the_type_of_a_count(scalar: Callable[[int], Any], tmp_path: Path) -> None:
    converted = ckptz.KMeans(levels=scalar(6), min_elements=scalar(64), layer_prune=[("head", scalar(0))])
    expected = ckptz.KMeans(levels=6, min_elements=64, layer_prune=(("head", 0),))
    assert converted == expected
    assert save(WEIGHTS, config=converted) == save(WEIGHTS, config=expected)
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    for name, step in (("converted", scalar(5)), ("expected", 5)):
        ckptz.compress(tmp_path / "a.safetensors", tmp_path / f"{name}.ckptz", step=step, jobs=scalar(1))
    assert (tmp_path / "converted.ckptz").read_bytes() == (tmp_path / "expected.ckptz").read_bytes()
    policy = LinkPolicy(forward=TopK(0.5, values=scalar(8)), backward=Uniform(scalar(8)), seed=scalar(3))
    assert policy.digest == LinkPolicy(forward=TopK(0.5), backward=Uniform(), seed=3).digest
    assert astuple(ckptz.KeepPolicy(last=scalar(2))) == astuple(ckptz.KeepPolicy(last=2))


def test_integers_for_float_fields_stay_integers() -> None:
    """The bytes of a file's records depend on it: JSON has 2, not 2.0."""
    assert type(ckptz.Grid(step=2).step) is int
    assert type(ckptz.Grid(step=np.int64(2)).step) is int
    assert type(ckptz.Grid(step=np.float64(2)).step) is float
    assert ckptz.Lossless(sparse=np.True_) == ckptz.Lossless(sparse=True)
    assert type(ckptz.Lossless(sparse=np.True_).sparse) is bool
    assert (check_int("n", True), check_float("n", False)) == (1, 0)
    assert not any(isinstance(number, bool) for number in (check_int("n", True), check_float("n", False)))


def test_a_limit_of_bytes_may_be_written_as_a_float() -> None:
    for limit in (1e9, float("inf"), np.int64(1 << 30)):
        assert load(save(WEIGHTS), max_decoded_bytes=limit).keys() == WEIGHTS.keys()


def test_fields_of_methods_of_other_packages_are_checked() -> None:
    fields: list[Any] = [("gain", float, field(default=1.0)), ("least", "int | None", field(default=None))]
    method: Any = make_dataclass("Theirs", fields, bases=(Method,), frozen=True)
    assert method() == method(gain=np.float32(1))
    assert type(method(gain=np.float32(1)).gain) is float
    for invalid in ({"gain": "1"}, {"least": 1.5}):
        with pytest.raises(ConfigError, match=r"gain must be a number|least must be a whole number"):
            method(**invalid)


def test_a_number_of_threads_beyond_any_limit_is_accepted() -> None:
    """Threads start only when there is work for them."""
    with Workers(10**19) as workers:
        assert list(workers.map(abs, (-1, -2))) == [1, 2]
