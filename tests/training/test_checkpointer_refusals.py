"""Refusals of the Checkpointer: arguments, other models, and damaged steps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from ckptz import Budget, Checkpointer, Grid, KMeans, Lossless
from ckptz.errors import ConfigError, CorruptionError, UnsupportedError
from ckptz.training.snapshot import Snapshot
from tests.support.checkpointer_support import (
    Run,
    linear,
    names_in,
    one_step,
    same,
    saved,
    saved_run,
    state_of,
)
from tests.support.hooks_support import process_group

# --- refused calls ---------------------------------------------------------------------------------


def test_a_step_is_saved_once_and_after_those_that_are_there(tmp_path: Path) -> None:
    run = Run()
    with run.checkpointer(tmp_path, every=2) as checkpointer:
        assert [checkpointer.maybe_save(step) for step in range(1, 5)] == [False, True, False, True]
        checkpointer.save(4)
        with pytest.raises(ConfigError, match="step 3 is not after 4"):
            checkpointer.save(3)
        for step in (-1, 5.0, "5"):
            with pytest.raises(ConfigError, match="whole number from 0 to below"):
                checkpointer.save(step)
        checkpointer.restore(2)
        with pytest.raises(ConfigError, match="discard_after"):
            checkpointer.save(3)
        checkpointer.discard_after(2)
        checkpointer.save(3)
        assert checkpointer.steps() == () or checkpointer.wait() is not None
        assert checkpointer.steps() == (2, 3)


Call = Callable[[Path], object]


def opening(**options: Any) -> Call:
    return lambda folder: Checkpointer(folder, **({"model": linear()} | options))


def saving(**options: Any) -> Call:
    return lambda folder: Checkpointer(folder, **({"model": linear()} | options)).save(1)


def restoring(how: dict[str, Any] | None = None, **options: Any) -> Call:
    return lambda folder: Checkpointer(folder, **({"model": linear()} | options)).restore(1, **(how or {}))


def layers(n: int) -> nn.Module:
    return nn.Sequential(*(linear() for _ in range(n)))


def offloaded() -> nn.Module:
    with torch.device("meta"):
        return linear()


def four_bits() -> torch.Tensor:
    return torch.ones(4, dtype=torch.int32).view(torch.float4_e2m1fn_x2)


def ragged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def expanded() -> nn.Module:
    model = linear()
    model.register_buffer("mask", torch.ones(1, 4).expand(8, 4))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


MODEL = linear()
BOTH = [optimizer_of(MODEL), torch.optim.Adam([MODEL.weight])]
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
GROUPS: list[dict[str, Any]] = [{"params": list(MODEL.parameters())}, {"params": []}]
LOOSELY = {"weights_only": True, "strict": False}
# Calls that are refused before anything is written, and words of the ConfigError.
REFUSED: dict[str, tuple[Call, str]] = {
    "every": (opening(every=0), "every must be at least 1"),
    "no chain": (opening(full_every=0), r"full_every must be 1\.\.64"),
    "long chain": (opening(full_every=65), r"full_every must be 1\.\.64"),
    "name for a method": (opening(config="lossless"), "config must be a configuration"),
    "another name": (opening(config="grid"), r"ckptz\.Grid\(\), got"),
    "class for a method": (opening(config=Grid), r"ckptz\.Grid\(\), got"),
    "number for a policy": (opening(keep=5), "keep must be a KeepPolicy"),
    "budget": (opening(budget=0.05), r"budget must be a ckptz\.Budget"),
    "no budgets": (opening(budget=()), r"budget must be a ckptz\.Budget"),
    "budget without loss": (opening(budget=Budget(str), config=Lossless(sparse=True)), "lossy method"),
    "calibration": (opening(calibration=3, config=Grid()), "calibration must be"),
    "nothing to guide": (opening(calibration="inputs.safetensors"), "guides the grid method only"),
    "guide of k-means": (
        opening(calibration="a.safetensors", config=KMeans()),
        "guides the grid method only",
    ),
    **{f"staging {n}": (opening(max_staging_bytes=n), "max_staging_bytes") for n in (-1, 0.5, "1GB")},
    "state": (opening(model=MODEL.state_dict()), r"model must be a torch\.nn\.Module, got OrderedDict"),
    "no interval": (lambda folder: Checkpointer(folder, linear()).maybe_save(1), "every=N"),
    "optimizer": (saving(optimizer=optimizer_of(MODEL)), "parameters that are not the model's"),
    "two optimizers": (saving(model=MODEL, optimizer=BOTH), "'weight' is in two optimizers"),
    "cycle": (saving(extra={"x": {"cycle": CYCLE}}), r"'cycle\.0.*a part of itself"),
    "path": (saving(extra={"file": Path()}), "extra 'file' is a PosixPath"),
    "no values": (saving(model=offloaded()), r"'(model\.)?weight' is on the meta device"),
    "no type": (
        saving(extra={"position": {"x": four_bits()}}),
        r"step 1 was not saved: tensor 'extra\.position\.x' is of torch\.float4",
    ),
    "made of others": (
        lambda _: Snapshot().take({"extra": {"rows": ragged()}}),
        r"'extra\.rows' is a NestedTensor",
    ),
    "sparse": (
        lambda _: Snapshot().take({"extra": {"mask": torch.eye(3).to_sparse()}}),
        r"'extra\.mask' is sparse \(torch\.sparse_coo\)",
    ),
}
# Refused restores of a saved step: what was saved, the call, and words of the ConfigError.
UNFIT: dict[str, tuple[dict[str, Any], Call, str]] = {
    "dtype": (
        {"model": linear().bfloat16()},
        restoring(),
        r"the dtype differs: restore into model\.to\(torch\.bfloat16\)",
    ),
    "shape": (
        {"model": linear()},
        restoring(model=nn.Linear(4, 5)),
        "the shape differs: restore into a model of the saved shape, and resize that afterwards",
    ),
    "shape, loosely": (
        {"model": linear()},
        restoring(LOOSELY, model=nn.Linear(4, 5)),
        r"'weight' is float32 \[4, 4\], and float32 \[5, 4\]",
    ),
    "no name": (
        {"model": linear()},
        restoring(LOOSELY, model=nn.ModuleDict({"head": linear()})),
        r"no name matches the model.*'weight'.*'head\.weight'",
    ),
    "loosely with state": ({}, restoring({"strict": False}), "add weights_only=True"),
    "layer more": ({"model": layers(2)}, restoring(model=layers(3)), r"'2.weight' and 1 more"),
    "layer less": ({"model": layers(3)}, restoring(model=layers(2)), r"'2.weight' and 1 more"),
    "shared memory": (
        {"model": expanded()},
        restoring(model=expanded()),
        r"elements of 'mask' share memory.*\.contiguous\(\)",
    ),
    "no values": ({}, restoring(model=offloaded()), r"'(model\.)?weight' is on the meta device"),
    "parameter less": (
        {"model": MODEL, "optimizer": optimizer_of(MODEL)},
        restoring(model=MODEL, optimizer=torch.optim.AdamW([MODEL.weight])),
        "'bias' is not in the optimizer",
    ),
    "group less": (
        {"model": MODEL, "optimizer": torch.optim.Adam(GROUPS)},
        restoring(model=MODEL, optimizer=torch.optim.Adam(GROUPS[:1])),
        "1 empty parameter groups, now there are 0",
    ),
    "extra less": (
        {"extra": {"position": {}}},
        restoring(),
        "extra 'position' was saved, and is not given now",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_with_a_remedy_and_leaves_no_step(tmp_path: Path, name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        call(tmp_path)
    assert not [file for file in names_in(tmp_path) if file.startswith("step-")]


@pytest.mark.parametrize("name", UNFIT)
def test_a_step_of_something_else_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    before, call, words = UNFIT[name]
    saved(tmp_path, **({"model": linear()} | before))
    files = names_in(tmp_path)
    with pytest.raises(ConfigError, match=words):
        call(tmp_path)
    assert names_in(tmp_path) == files


def test_a_model_may_be_cast_to_the_dtype_of_a_step(tmp_path: Path) -> None:
    saved(tmp_path, linear().bfloat16())
    assert Checkpointer(tmp_path, linear().to(torch.bfloat16)).restore(1) == 1


@pytest.mark.parametrize("link", [False, True])
def test_a_file_in_the_place_of_the_folder(tmp_path: Path, link: bool) -> None:
    if link:
        (tmp_path / "run").symlink_to("nowhere")
    else:
        (tmp_path / "run").touch()
    with pytest.raises(NotADirectoryError, match=r"a broken link.*give another folder.*run"):
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


def test_values_that_need_code_are_named(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"position": {"where": range(3)}}
    checkpointer = Checkpointer(tmp_path, linear(), extra=extra)
    with pytest.raises(UnsupportedError, match=r"step 1 was not saved: 'extra\.position\.where'"):
        checkpointer.save(1)
    extra["position"]["where"] = np.array(["here"])
    with pytest.raises(UnsupportedError, match=r"of type numpy\.ndarray of dtype <U4 cannot be stored"):
        checkpointer.save(1)
    extra["position"]["where"] = "here"
    checkpointer.save(1)
    checkpointer.close()
    assert checkpointer.steps() == (1,)


@pytest.mark.parametrize("where", ["save", "restore"])
def test_sharded_models_are_sent_to_the_checkpointer_that_knows_them(tmp_path: Path, where: str) -> None:
    model = linear()
    saved(tmp_path / "run", model, torch.optim.AdamW(model.parameters()))
    with process_group():
        sharded = distribute_module(linear(), init_device_mesh("cpu", (1,)))
        checkpointer = Checkpointer(tmp_path / "run", sharded, torch.optim.AdamW(sharded.parameters()))
        with pytest.raises(ConfigError, match=r"weight' is a DTensor.*ckptz\.integrations\.dcp"):
            getattr(checkpointer, where)(2 if where == "save" else 1)


# --- damage ----------------------------------------------------------------------------------------


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
