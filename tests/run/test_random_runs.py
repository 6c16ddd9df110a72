"""Random runs of every interface: saved, killed, resumed, branched, copied, pruned, and with deleted steps.

A model in memory knows the values of each step. After every operation, all steps that a rule keeps exist,
every complete step restores exactly, and unfinished saves are no steps.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils._pytree import tree_leaves

import ckptz
from ckptz import KeepPolicy
from ckptz.run.keep import KeepRules
from tests.support.kills import killed_after
from tests.support.run_writers import SIZE, WRITERS, Writer, metric, quietly, weights_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.usefixtures("deltas_at_any_cost"),
]

N_RUNS: Final = int(os.environ.get("CKPTZ_RANDOM_RUNS", "12"))  # of each interface


class Runs(RuleBasedStateMachine):
    """Run of one interface, with the expected values of its steps."""

    def __init__(self, kind: type[Writer], home: Path) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir=home))
        self.kind, self.full_every, self.n_values = kind, 4, 0
        self.run = self.home / "run"
        self.held: dict[int, int] = {}  # values by complete step
        self.light: dict[int, int] = {}  # values by step whose optimizer state a rule has deleted
        self.start(None)

    def start(self, step: int | None) -> None:
        if self.kind.goes_forward and step is not None:
            self.held, self.light = (
                {s: v for s, v in of.items() if s <= step} for of in (self.held, self.light)
            )
        self.writer = quietly(self.kind, self.run, self.full_every, step)
        self.step = step or 0

    def next_value(self) -> int:
        self.n_values += 1
        return self.n_values

    @property
    def unfinished(self) -> set[int]:
        return self.kind.steps(self.run) - self.held.keys() - self.light.keys()

    @rule(distance=st.integers(1, 9))
    def save(self, distance: int) -> None:
        self.step += distance
        value = self.next_value()
        quietly(self.writer.save, self.step, value)
        self.light.pop(self.step, None)
        self.held[self.step] = value

    @precondition(lambda self: self.held)
    @rule(distance=st.integers(1, 9), data=st.data())
    def kill(self, distance: int, data: st.DataObject) -> None:
        """Kill the save of a new step and continue from the newest complete step."""
        step, value = max(self.held | self.light) + distance, self.next_value()
        if step in self.unfinished:
            return
        killed_after(
            data.draw(st.integers(0, self.kind.n_calls)), partial(quietly, self.writer.save, step, value)
        )
        if self.writer.is_whole(step):
            self.held[step] = value
        self.start(max(self.held))

    @precondition(lambda self: len(self.held) > 1 and not self.kind.goes_forward)
    @rule(data=st.data())
    def kill_again(self, data: st.DataObject) -> None:
        """Kill a repeated save of a step: it has the old or new values, or does not exist."""
        step, value = data.draw(st.sampled_from(sorted(self.kind.steps(self.run)))), self.next_value()
        old = (self.held | self.light).get(step)
        killed_after(
            data.draw(st.integers(0, self.kind.n_calls)), partial(quietly, self.writer.save, step, value)
        )
        if not self.writer.is_whole(step):
            self.held.pop(step, None)
            self.light.pop(step, None)
        elif torch.equal(quietly(self.writer.read, step), weights_of(value)):
            self.held[step] = value
            self.light.pop(step, None)
        else:
            assert old is not None
        self.start(max(self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Continue from any step; later steps stay and may be saved again, unless saves only go forward."""
        self.start(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: len(self.held) > 1 and not self.kind.goes_forward)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete a step, as frameworks and users do."""
        step = data.draw(st.sampled_from(sorted(self.held)))
        self.remove(step)
        del self.held[step]

    @precondition(lambda self: self.unfinished and not self.kind.goes_forward)
    @rule()
    def delete_unfinished(self) -> None:
        for step in self.unfinished:
            self.remove(step)

    def remove(self, step: int) -> None:
        path = self.writer.place(step)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    @precondition(lambda self: self.held)
    @rule()
    def copy(self) -> None:
        """Continue in a copy without hard links."""
        copied = self.home / f"copy-{self.next_value()}"
        shutil.copytree(self.run, copied)
        shutil.rmtree(self.run)
        self.run = copied
        self.start(max(self.held))

    @precondition(lambda self: self.held)
    @rule(
        last=st.integers(1, 3),
        every=st.sampled_from([None, 2, 5]),
        best=st.integers(0, 2),
        weights=st.sampled_from([None, None, KeepRules(last=1), KeepRules(last=2, every=3)]),
        data=st.data(),
    )
    def prune(
        self, last: int, every: int | None, best: int, weights: KeepRules | None, data: st.DataObject
    ) -> None:
        after = data.draw(st.sampled_from([None, *sorted(self.held)]))
        policy = KeepPolicy(
            last=last,
            every=every,
            best=best if self.kind.has_metrics else 0,
            weights=weights if self.kind.is_split else None,
        )
        unfinished = self.unfinished
        expected, expected_weights = self.wanted(policy, after)
        # A folder without a file of ckptz is no step and does not block one.
        begun = {step for step in unfinished if any(self.writer.place(step).glob("*.ckptz"))}
        planned = ckptz.prune(self.run, policy, after=after, dry_run=True)
        assert self.kind.steps(self.run) == self.held.keys() | self.light.keys() | unfinished
        report = ckptz.prune(self.run, policy, after=after)
        assert (planned.steps, planned.removed) == (report.steps, report.removed)
        complete, light = set(report.steps), set(report.weights_only)
        assert complete >= expected
        assert complete | light >= expected_weights
        assert self.kind.steps(self.run) - unfinished == complete | light
        later = {step for step in begun if after is not None and step > after}
        assert begun - self.kind.steps(self.run) == later
        if not begun - later:
            assert (complete, complete | light) == (expected, expected | expected_weights)
        values = self.held | self.light
        self.held = {step: values[step] for step in sorted(complete)}
        self.light = {step: values[step] for step in sorted(light)}
        if self.step not in self.held:
            self.start(max(self.held))

    def wanted(self, policy: KeepPolicy, after: int | None) -> tuple[set[int], set[int]]:
        """Return the steps that rules keep, and the steps of which they keep the weights."""
        complete, light = (
            {step for step in steps if after is None or step <= after} for steps in (self.held, self.light)
        )
        metrics = {step: metric(value) for step, value in (self.held | self.light).items()}
        if policy.weights is not None:
            return policy.kept(complete, metrics), policy.weights.kept(complete | light, metrics)
        newer = {step for step in light if step > max(complete)}
        return policy.kept(complete, metrics), policy.kept(newer, metrics)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        values = self.held | self.light
        step = data.draw(st.sampled_from(sorted(values)))
        ckptz.restore(f"{self.run}@{step}", self.home / "back.pt", to="pt", jobs=1, force=True)
        state = tree_leaves(torch.load(self.home / "back.pt"))
        [tensor] = [value for value in state if isinstance(value, torch.Tensor) and value.numel() == SIZE]
        assert torch.equal(tensor.reshape(-1), weights_of(values[step]))

    @precondition(lambda self: self.held)
    @invariant()
    def only_complete_steps_count(self) -> None:
        report = ckptz.prune(self.run, KeepPolicy(last=None), dry_run=True)
        assert report.steps == tuple(sorted(self.held))
        assert report.weights_only == tuple(sorted(self.light))

    def teardown(self) -> None:
        """Read every step, unless the run has failed already."""
        try:
            for step, value in (self.held | self.light).items() if sys.exc_info()[0] is None else ():
                assert torch.equal(quietly(self.writer.read, step), weights_of(value)), step
        finally:
            shutil.rmtree(self.home)


APP_KINDS = ("lightning", "accelerate", "trainer")
APPS = [pytest.param(kind, marks=pytest.mark.apps) for kind in APP_KINDS]


@pytest.mark.parametrize("kind", ["checkpointer", "folders", "folders of parts", "dcp", *APPS])
def test_no_step_is_lost_or_mistaken(kind: str, tmp_path: Path) -> None:
    if kind in APP_KINDS:
        pytest.importorskip("transformers" if kind == "trainer" else kind)
    how: dict[str, Any] = {"deadline": None, "database": None, "stateful_step_count": 12}
    checks = settings(max_examples=N_RUNS, derandomize=True, suppress_health_check=list(HealthCheck), **how)
    run_state_machine_as_test(partial(Runs, WRITERS[kind], tmp_path), settings=checks)
