"""Compressed links between two processes: results of `simulate`, resuming, and errors of a failing peer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.wire_worker import POLICIES

pytestmark = pytest.mark.apps

ROOT = Path(__file__).parents[2]
TIMEOUT = 150


def launch(task: str, folder: Path) -> list[tuple[int, str]]:
    """Run both ranks of a task; return their (exit code, standard error)."""
    store = folder / f"store-{task}"
    commands = [
        [sys.executable, "-m", "tests.support.wire_worker", task, str(rank), store, folder] for rank in (0, 1)
    ]
    ranks = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True, cwd=ROOT) for c in commands]
    try:
        return [
            (rank.returncode, error) for rank in ranks for error in [rank.communicate(timeout=TIMEOUT)[1]]
        ]
    finally:
        for rank in ranks:
            rank.kill()


def results(task: str, folder: Path) -> list[dict[str, Any]]:
    outcomes = launch(task, folder)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    return [json.loads((folder / f"{task}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, Any]]:
    return results("scenarios", folder)


def without_bytes(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("bytes", "notes")}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_the_raw_policy_is_the_stock_stage_to_the_bit(trained: list[dict[str, Any]], schedule: str) -> None:
    for rank in trained:
        stock = rank["stock" if schedule == "1f1b" else f"stock {schedule}"]
        assert stock == without_bytes(rank[f"raw {schedule}"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("policy", POLICIES)
def test_frames_train_exactly_as_the_simulation(
    trained: list[dict[str, Any]], policy: str, schedule: str
) -> None:
    first, last = (rank[f"{policy} {schedule}"] for rank in trained)
    simulated = trained[1][f"{policy} simulated"]
    assert last["losses"] == simulated["losses"]
    assert [first["digest"], last["digest"]] == simulated["digests"]
    if policy != "raw":
        assert last["losses"] != trained[1]["stock"]["losses"]


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_other_schedules_train_close_to_the_stock_stage(trained: list[dict[str, Any]], schedule: str) -> None:
    rank = trained[0 if schedule == "zbv" else 1]
    compressed, stock = rank[f"q4-q8 {schedule}"]["losses"], rank[f"stock {schedule}"]["losses"]
    assert compressed != stock
    assert compressed == pytest.approx(stock, rel=0.01)


def test_messages_are_as_much_smaller_as_documented(trained: list[dict[str, Any]]) -> None:
    sent, raw = trained[0]["q4-q8 1f1b"]["bytes"]["forward"]
    assert raw / sent > 7.5
    sent, raw = trained[1]["top10-reuse 1f1b"]["bytes"]["backward"]
    assert raw / sent > 30


def test_tensors_below_the_limit_of_the_policy_are_sent_raw_with_a_note(
    trained: list[dict[str, Any]],
) -> None:
    assert trained[0]["q4-q8 1f1b"]["notes"] == []
    small = trained[0]["small"]
    sent, raw = small["bytes"]["forward"]
    assert sent > raw
    assert small["losses"] == trained[0]["stock"]["losses"]
    [note] = small["notes"]
    assert note.startswith(
        "forward: tensors of [16, 256] have fewer than 8,192 elements and are not compressed"
    )


def test_a_stage_may_send_several_tensors_and_integers(trained: list[dict[str, Any]]) -> None:
    assert len(trained[1]["two tensors"]["losses"]) == 12


def test_a_plain_pair_sends_what_the_simulation_computes(trained: list[dict[str, Any]]) -> None:
    assert trained[1]["pair"] is True


def test_new_processes_resume_to_the_bit(trained: list[dict[str, Any]], folder: Path) -> None:
    resumed = results("load", folder)
    assert [rank["straight"] for rank in trained] == resumed
    assert len(resumed[1]["ef21"]["losses"]) == 8


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(
            "flip", "forward, step 1, microbatch 0, tensor 0: payload checksum", marks=pytest.mark.slow
        ),
        pytest.param("repeat", "forward, step 1, microbatch 1, tensor 0: microbatch", marks=pytest.mark.slow),
        ("die", "forward, step 1, microbatch 0, tensor 0: receive: "),
    ],
)
def test_a_faulty_or_dead_peer_ends_the_process_with_an_error(
    tmp_path: Path, kind: str, message: str
) -> None:
    (first, _), (second, error) = launch(kind, tmp_path)
    assert first != 0
    assert second == 1
    assert f"WireError: link 0->1 {message}" in error
