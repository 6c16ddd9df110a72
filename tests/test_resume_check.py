"""`ckptz resume-check`: the first thing that differs, in which order, and where records of losses part."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptz import Checkpointer, KMeans, resume_check
from ckptz.codec.units import CHUNK_UNITS
from ckptz.commands.resume_check import FirstDifference
from ckptz.errors import ConfigError, CorruptionError
from ckptz.integrations.linked import DEFAULTS, Chain, ChainOptions, job_of
from ckptz_cli.diff import DIFFERENT
from tests.support.cli_support import Row, a_state, ckptz, write_plain


def row(array: np.ndarray, dtype: str) -> Row:
    return dtype, array.shape, array.tobytes()


def first_of(tmp_path: Path, a: dict[str, Row], b: dict[str, Row]) -> FirstDifference:
    files = [write_plain(tmp_path / f"{name}.safetensors", rows) for name, rows in (("a", a), ("b", b))]
    report = resume_check(*files, jobs=1)
    assert report.difference is not None
    assert not report.is_equal
    return report.difference


# --- tensors --------------------------------------------------------------------------------------


def test_a_difference_has_position_values_count_and_size(tmp_path: Path) -> None:
    a = np.zeros((3, CHUNK_UNITS // 2), "<f4")  # differs in its second chunk only
    b = a.copy()
    b[2, 7], b[2, 9] = 0.5, -2
    found = first_of(tmp_path, {"w": row(a, "F32")}, {"w": row(b, "F32")})
    assert (found.part, found.name, found.kind, found.dtype_a) == ("weights", "w", "changed", "F32")
    assert (found.position, found.value_a, found.value_b) == ((2, 7), "0.0", "0.5")
    assert (found.n_differing, found.n_units, found.max_change) == (2, a.size, 2.0)


@pytest.mark.parametrize(
    ("dtype", "bits", "values"),
    [
        ("F32", ([0x7FC00000], [0x7FC00001]), ("0x7fc00000", "0x7fc00001")),
        ("F32", ([0], [0x80000000]), ("0.0", "-0.0")),
        ("F32", ([0x3F800000], [0x3F800001]), ("1.0", "1.0000001")),
        ("F32", ([0x3F800000], [0x7F800000]), ("1.0", "inf")),
    ],
)
def test_values_that_read_the_same_are_told_apart(dtype: str, bits: Any, values: Any, tmp_path: Path) -> None:
    a, b = (row(np.array(pattern, "<u4"), dtype) for pattern in bits)
    found = first_of(tmp_path, {"w": a}, {"w": b})
    assert (found.value_a, found.value_b) == values
    assert found.max_change is None or math.isfinite(found.max_change)


@pytest.mark.parametrize(("dtype", "shape", "where"), [("F4", (2, 4), (1, 1)), ("C64", (3, 1), (2, 0))])
def test_positions_count_elements_where_units_are_others(
    dtype: str, shape: tuple[int, ...], where: tuple[int, ...], tmp_path: Path
) -> None:
    a = bytearray(4 if dtype == "F4" else 24)
    b = bytearray(a)
    b[2 if dtype == "F4" else 20] = 0x10  # the upper half of a byte; the imaginary part
    found = first_of(tmp_path, {"w": (dtype, shape, bytes(a))}, {"w": (dtype, shape, bytes(b))})
    assert found.position == where


def test_other_types_shapes_and_names_are_told(tmp_path: Path) -> None:
    w = np.zeros((2, 3), "<f4")
    for other, kind in (
        ({"w": row(w.reshape(6), "F32")}, "reshaped"),
        ({"w": row(w, "I32")}, "retyped"),
        ({"w": row(w, "F32"), "x": row(w, "F32")}, "only in B"),
        ({}, "only in A"),
    ):
        found = first_of(tmp_path, {"w": row(w, "F32")}, other)
        assert found.kind == kind
        assert found.position is None


def test_weights_come_before_optimizer_state_and_that_before_the_rest(tmp_path: Path) -> None:
    names = ["extra.ema", "rng.host", "optimizer.w.exp_avg", "exp_avg_sq.w", "model.b", "w"]
    state = {name: row(np.zeros(3, "<f4"), "F32") for name in names}
    order = []
    other = {name: row(np.ones(3, "<f4"), "F32") for name in names}
    while state:
        found = first_of(tmp_path, state, other)
        order.append((found.part, found.name))
        del state[found.name], other[found.name]
    parts = [part for part, _ in order]
    assert parts == ["weights"] * 2 + ["optimizer"] * 2 + ["rest"] * 2
    assert [name for _, name in order] == ["model.b", "w", *names[2:4], *names[:2]]


def test_equal_checkpoints_of_other_kinds_are_equal(tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "m.safetensors", a_state())
    ckptz("compress", plain)
    run = ckptz("resume-check", plain, tmp_path / "m.ckptz", "--json")
    assert (run.json["is_equal"], run.json["n_equal"]) == (True, len(a_state()))
    assert run.json["difference"] is None
    assert "no difference" in ckptz("resume-check", plain, tmp_path / "m.ckptz").stdout


def test_plain_values_are_compared_too(tmp_path: Path) -> None:
    def saved(name: str, **groups: Any) -> Path:
        state = {"model": {"w": torch.ones(3)}, "optimizer": {"groups": [groups]}, "epoch": 1}
        torch.save(state, tmp_path / f"{name}.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=tmp_path / f"{name}-dcp", no_dist=True)
        return tmp_path / f"{name}.pt"

    a, b, c = saved("a", lr=0.1), saved("b", lr=0.2), saved("c", lr=0.1, wd=0.0)
    found = resume_check(a, b).difference
    assert found == FirstDifference(
        part="optimizer", name="optimizer.groups.0.lr", kind="changed", value_a="0.1", value_b="0.2"
    )
    found = resume_check(a, c).difference
    assert found is not None
    assert (found.name, found.kind, found.value_b) == ("optimizer.groups.0.wd", "only in B", "0.0")
    assert resume_check(a, tmp_path / "a-dcp").is_equal
    assert not resume_check(a, tmp_path / "b-dcp").is_equal


# --- steps of a Checkpointer ----------------------------------------------------------------------


def trained(folder: Path, n_steps: int, nudge: float = 0.0) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Checkpointer(folder, model, optimizer, every=1) as checkpointer:
        for step in range(1, n_steps + 1):
            model(torch.full((2, 20), 0.5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if nudge:
                optimizer.state[model.weight]["exp_avg"][3, 4] += nudge
            checkpointer.maybe_save(step)


def test_a_step_stands_for_both_its_files(tmp_path: Path) -> None:
    trained(tmp_path / "a", 2)
    trained(tmp_path / "b", 1)
    trained(tmp_path / "c", 1, nudge=1.0)
    run = ckptz("resume-check", f"{tmp_path / 'a'}@1", f"{tmp_path / 'b'}@1")
    assert "no difference" in run.stdout
    found = resume_check(f"{tmp_path / 'a'}@1", f"{tmp_path / 'c'}@1").difference
    assert found is not None
    assert (found.part, found.name, found.position) == ("optimizer", "optimizer.weight.exp_avg", (3, 4))
    found = resume_check(f"{tmp_path / 'a'}@1", f"{tmp_path / 'a'}@2").difference
    assert found is not None
    assert found.part == "weights"
    (tmp_path / "a" / "step-00000001.state.ckptz").unlink()
    found = resume_check(f"{tmp_path / 'a'}@1", f"{tmp_path / 'b'}@1").difference
    assert found is not None
    assert (found.part, found.kind) == ("optimizer", "only in B")
    assert ckptz("resume-check", f"{tmp_path / 'a'}@3", tmp_path / "a", fails=True).exit_code == 5


def test_a_folder_stands_for_all_that_was_saved_in_it(tmp_path: Path) -> None:
    trained(tmp_path / "a", 1)
    trained(tmp_path / "b", 1, nudge=1.0)
    found = resume_check(tmp_path / "a", tmp_path / "b").difference
    assert found is not None
    assert (found.part, found.name) == ("optimizer", "optimizer.weight.exp_avg")


# --- folders of the Trainer and of accelerate -----------------------------------------------------


def saved(folder: Path, moment: float, lr: float, seed: float, options: ChainOptions = DEFAULTS) -> Path:
    """What the Trainer's mixin writes on two ranks, and a file of the Trainer's own."""
    states = {
        "model": {"w": torch.linspace(0, 1, 4096).reshape(64, 64)},
        "state": {"optimizer": {"w": {"exp_avg": torch.full((3,), moment)}}, "groups": [{"lr": lr}]},
        "rng-00000": {"rng": {"host": torch.zeros(2)}},
        "rng-00001": {"rng": {"host": torch.full((2,), seed)}},
    }
    folder.mkdir()
    for name, state in states.items():
        Chain(options).write(folder / f"{name}.ckptz", job_of(state, 2))
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_a_folder_of_the_trainer_is_compared_whole(tmp_path: Path) -> None:
    a = saved(tmp_path / "checkpoint-2", 0.0, 0.1, 1.0)
    assert "not compared: trainer_state.json" in ckptz("resume-check", a, a).stdout
    assert resume_check(a, a).n_equal == 5
    for i, (changed, name) in enumerate(
        (
            ((1.0, 0.1, 1.0), "optimizer.w.exp_avg"),
            ((0.0, 0.2, 1.0), "groups.0.lr"),
            ((0.0, 0.1, 2.0), "rng-00001.rng.host"),
        )
    ):
        found = resume_check(a, saved(tmp_path / f"other-{i}", *changed)).difference
        assert found is not None
        assert found.name == name


def test_files_of_other_programs_beside_a_model_are_named(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", 0.0, 0.1, 1.0)
    for path in a.glob("*.ckptz"):
        if path.name != "model.ckptz":
            path.unlink()
    (a / "optimizer.bin").write_bytes(b"a pickle of accelerate")
    assert resume_check(a, a).not_compared == ("optimizer.bin", "trainer_state.json")


def test_a_lossy_folder_of_the_trainer_is_compared_as_exactly_as_it_is_there(tmp_path: Path) -> None:
    lossy = ChainOptions(config=KMeans(levels=4, min_elements=1))
    a = saved(tmp_path / "a", 0.0, 0.1, 1.0)
    b = saved(tmp_path / "b", 0.0, 0.1, 1.0, lossy)
    assert list(b.glob("model.exact-*"))
    assert resume_check(a, b).is_equal


# --- losses ---------------------------------------------------------------------------------------


def lines(path: Path, *content: object) -> Path:
    path.write_text("".join(f"{line}\n" for line in content))
    return path


def test_the_first_step_of_other_loss_is_named(tmp_path: Path) -> None:
    a = lines(tmp_path / "a", 3.5, 2.25, "nan", 1.0)
    b = lines(tmp_path / "b", 3.5, 2.25, "nan", 1.5, 7)
    run = ckptz("resume-check", "--losses", a, b, fails=True)
    assert run.exit_code == DIFFERENT
    assert "step 4: 1.0 in A, 1.5 in B; 3 before it are equal" in run.stdout
    assert run.stderr == ""
    for tolerance, is_equal in (("0.5", True), ("0.4", False)):
        run = ckptz("resume-check", "--losses", a, b, "--tolerance", tolerance, "--json", fails=not is_equal)
        assert run.json["is_equal"] is is_equal


def test_json_lines_are_matched_by_step(tmp_path: Path) -> None:
    whole = [f'{{"step": {step}, "loss": {10 / step}, "lr": 1}}' for step in range(1, 9)]
    resumed = ['{"note": "resumed"}', "", *whole[4:], '{"step": 9, "loss": NaN}']
    a, b = lines(tmp_path / "a", *whole), lines(tmp_path / "b", *resumed)
    assert resume_check(a, b, losses=True).n_equal == 4
    lines(b, *resumed[:-2], '{"step": 8, "loss": NaN}')
    found = resume_check(a, b, losses=True, tolerance=1e9).difference
    assert found is not None
    assert (found.part, found.name, found.value_b, found.max_change) == ("losses", "8", "nan", None)


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "{",
        '{"loss": "1"}',
        '{"loss": true}',
        '{"loss": 1, "step": 1.5}',
        '{"loss": 1' + "0" * 400 + "}",
        '{"loss": ' + "[" * 100_000,
        "\xff",
    ],
)
def test_what_is_no_loss_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    a = lines(tmp_path / "a", 1.0, line)
    with pytest.raises(CorruptionError, match="line 2"):
        resume_check(a, a, losses=True)


def test_records_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    a = lines(tmp_path / "a", '{"step": 1, "loss": 1}')
    b = lines(tmp_path / "b", '{"step": 2, "loss": 1}')
    with pytest.raises(ConfigError, match="no step is in both"):
        resume_check(a, b, losses=True)
    lines(b, '{"step": 1, "loss": 1}', '{"step": 1, "loss": 2}')
    with pytest.raises(CorruptionError, match="step 1 occurs twice"):
        resume_check(a, b, losses=True)
    with pytest.raises(ConfigError, match="tolerance"):
        resume_check(a, a, tolerance=0.1)
    with pytest.raises(ConfigError, match="tolerance"):
        resume_check(a, a, losses=True, tolerance=math.nan)
