"""LoCo hooks for DDP over gloo: equal replicas, losses near exact gradients, bytes sent, and resuming."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptz.errors import ConfigError
from ckptz.wire import LinkPolicy, Uniform
from ckptz.wire.state import MessageKey
from tests.support.ddp_worker import N_STEPS
from tests.support.wire_support import N, across, ends, f32_patterns, floats, rng

ROOT = Path(__file__).parents[2]
N_WEIGHTS = 2 * 128 * 256 + 256 + 128


def error_after(policy: LinkPolicy, n: int) -> Any:
    pair = ends(policy)
    for step in range(n):
        across(pair, f32_patterns(rng(step).standard_normal(N)), MessageKey(step))
    return floats(pair[0].state_dict()["wire/0-1/forward/0/0/tx/state"])


def test_the_error_is_a_moving_average_and_is_reset() -> None:
    policy = LinkPolicy(forward=Uniform(4), feedback=("ef", None), ef_decay=0.25, ef_reset=3)
    first, second = error_after(policy, 1), error_after(policy, 2)
    x = rng(1).standard_normal(N).astype(np.float32) + first
    _, received = across(ends(LinkPolicy(forward=Uniform(4))), f32_patterns(x), MessageKey(0))
    decoded = floats(received)
    expected = np.float32(0.25) * first + np.float32(0.75) * (x - decoded)
    assert np.array_equal(second, expected)
    assert np.abs(second).max() > 0
    assert not error_after(policy, 3).any()
    assert error_after(policy, 4).any()


def test_the_json_of_a_policy_has_averaging_only_if_it_is_used() -> None:
    assert "ef_" not in LinkPolicy(feedback="ef").to_json()
    policy = LinkPolicy(feedback="ef", ef_decay=0.5, ef_reset=7)
    assert LinkPolicy.from_json(policy.to_json()) == policy
    with pytest.raises(ConfigError, match="ef_decay"):
        LinkPolicy(feedback="ef", ef_decay=1.0)


@pytest.fixture(scope="module", params=[2, 4])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, n_ranks = tmp_path_factory.mktemp("ddp"), request.param
    command = [sys.executable, "-m", "tests.support.ddp_worker"]
    tails = [[str(rank), str(n_ranks), str(folder / "store"), str(folder)] for rank in range(n_ranks)]
    ranks = [subprocess.Popen([*command, *t], stderr=subprocess.PIPE, text=True, cwd=ROOT) for t in tails]
    try:
        outcomes = [(rank.communicate(timeout=150)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(code == 0 for _, code in outcomes), outcomes
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n_ranks)]


@pytest.mark.apps
def test_replicas_stay_equal_and_near_exact_gradients(trained: list[dict[str, Any]]) -> None:
    for name, exact in (("loco", "stock"), ("tiles", "stock"), ("sharded", "stock sharded")):
        assert len({rank[name]["digest"] for rank in trained}) == 1
        assert trained[0][name]["digest"] != trained[0][exact]["digest"]
        for rank in trained:
            assert rank[name]["losses"] == pytest.approx(rank[exact]["losses"], rel=0.01)


@pytest.mark.apps
def test_bytes_are_seven_times_fewer_than_those_of_a_ring(trained: list[dict[str, Any]]) -> None:
    share = (len(trained) - 1) / len(trained)
    for rank in trained:
        assert rank["loco"]["bytes"] < 2 * share * 4 * N_WEIGHTS * (N_STEPS - 2) / 7
        assert rank["tiles"]["bytes"] == pytest.approx(
            rank["loco"]["bytes"], rel=0.02
        )  # each row is one tile
        assert rank["loco"]["raw bytes"] > 2 * share * 4 * N_WEIGHTS * 2
        assert rank["sharded"]["bytes"] < share * 4 * N_WEIGHTS * N_STEPS / 7


@pytest.mark.apps
def test_a_sharded_run_resumes_to_the_bit_and_one_of_ddp_with_equal_replicas(
    trained: list[dict[str, Any]],
) -> None:
    assert len({rank["resumed"]["digest"] for rank in trained}) == 1
    for rank in trained:
        assert rank["resumed sharded"] == {n: rank["sharded"][n] for n in ("losses", "digest")}
        assert rank["resumed"]["losses"] == pytest.approx(rank["loco"]["losses"], rel=0.01)


@pytest.mark.apps
def test_a_changed_part_is_named_by_its_link_step_and_bucket(trained: list[dict[str, Any]]) -> None:
    name = "link 0->1 forward, step 0, microbatch 0, tensor 3: payload checksum"
    assert [rank["lie"].startswith(name) for rank in trained] == [i == 1 for i in range(len(trained))]
