"""Disk space: compressed runs never take more than plain ones, for all keep rules and sizes of deltas."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz import KeepPolicy
from ckptz.run.chain import ChainFile, Estimate, weighed
from ckptz.run.step_files import ENDLESS, ChainRule, Kept
from tests.support.checkpointer_support import Run
from tests.support.disk_simulation import PLAIN, cases, moments


@pytest.mark.parametrize("n_cases", [42, pytest.param(210, marks=pytest.mark.slow)])
def test_no_run_takes_more_than_a_file_over_plain_at_any_moment(n_cases: int) -> None:
    means, full = [], []
    for case in cases(n_cases):
        usage = moments(case)
        assert max(moment.taken - moment.plain for moment in usage) <= PLAIN, case
        means.append(sum(moment.taken for moment in usage) / sum(moment.plain for moment in usage))
        full_files = moments(case, ChainRule(1, is_forked=False))
        full.append(sum(moment.taken for moment in full_files) / sum(moment.plain for moment in full_files))
    assert max(means) < 1.1, "the cost of trying deltas"
    assert sum(means) < 0.85 * sum(full), "deltas pay where they can"
    print(
        f"of plain: {sum(means) / n_cases:.3f}, most {max(means):.3f}; full files {sum(full) / n_cases:.3f}"
    )


def state(last: int | None, delta: int, n: int, position: int = 0) -> list[ChainFile[int]]:
    """Return a full file and `n` deltas of it; the full file is hidden if the deltas fill the keep rule."""
    stays = Kept(last=last).stays(range(n + 1))
    files = [ChainFile(8000, position, None, stays[0])]
    return files + [ChainFile(delta, position + i + 1, 0, stays[i + 1]) for i in range(n)]


@pytest.mark.parametrize(
    ("last", "delta", "expected"),
    [
        (1, 100, None),  # the full file would stay for a single delta
        (2, 3000, 0),
        (2, 5000, None),
        (5, 3000, 0),
        (5, 7900, None),
        (None, 7900, 1),
    ],
)
def test_a_delta_is_written_where_it_pays(last: int | None, delta: int, expected: int | None) -> None:
    rule = ChainRule(16, is_forked=False)
    estimate = Estimate([(0, 8000), (1, delta)], PLAIN)
    chosen = weighed(rule, dict(enumerate(state(last, delta, 1))), Kept(last=last), (10, 20), estimate)
    assert chosen.base_of(2) == expected


def test_sizes_of_longer_deltas_are_drawn_from_shorter_ones() -> None:
    estimate = Estimate([(0, 8000), (1, 1000), (2, 1500), (1, 1200)], PLAIN)
    assert [estimate.delta(n) for n in (1, 2, 4, 8)] == [1200, 1500, 1800, 2100]
    assert estimate.delta(1 << 40) == 8000, "no delta is larger than a full file"
    assert Estimate([(0, 8000)], PLAIN).delta(1) == 2000


def test_multiples_stay_for_ever_and_the_rest_in_turn() -> None:
    kept = Kept(last=2, every=(40,))
    assert kept.stays((30, 40, 50, 60)) == [0, ENDLESS, 0, 1]
    assert kept.stays_of((50, 60), 4, 16) == [2, ENDLESS, 4, 5]


@pytest.mark.parametrize("last", [1, 5])
def test_a_checkpointer_takes_no_more_than_plain_files(tmp_path: Path, last: int) -> None:
    run, excess = Run(width=96), []
    with run.checkpointer(tmp_path, background=False, keep=KeepPolicy(last=last)) as checkpointer:
        for step in range(1, 9):
            run.step()
            checkpointer.save(step)
            report = checkpointer.wait()
            taken = sum(entry.stat().st_size for entry in os.scandir(tmp_path))
            excess.append(taken - len(checkpointer.steps()) * report.tensor_bytes)
            plain = report.tensor_bytes
    assert max(excess) <= plain
    assert max(excess[-last:]) <= 0, "what was tried and does not pay is gone"


@pytest.mark.apps
@pytest.mark.parametrize("n_kept", [1, 3])
def test_lightning_files_take_no_more_than_plain_ones(tmp_path: Path, n_kept: int) -> None:
    from ckptz.integrations.lightning import CkptzIO  # takes seconds to load

    io, paths, taken = CkptzIO(jobs=1), [], []
    weights = torch.randn(30_000)
    plain = weights.nbytes
    for step in range(12):
        weights = weights + 0.1 * torch.randn(30_000)
        paths.append(tmp_path / f"{step}.ckpt")
        checkpoint: dict[str, Any] = {"state_dict": {"weight": weights}, "global_step": step}
        io.save_checkpoint(checkpoint, paths[-1])
        if len(paths) > n_kept:
            io.remove_checkpoint(paths.pop(0))
        taken.append(sum({e.inode(): e.stat().st_size for e in os.scandir(tmp_path)}.values()))
        # The number of kept files is known only at the first deletion; until then one more file stays.
        assert taken[-1] <= (len(paths) + 2) * plain
    assert max(taken[-n_kept:]) <= n_kept * plain, "what was tried and does not pay is gone"
    assert torch.equal(io.load_checkpoint(paths[-1])["state_dict"]["weight"], weights)
