"""Several ranks save one state, another number of ranks restores it; a dead rank damages no checkpoint."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file as load_plain
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptz
import ckptz.torch
from ckptz.foreign.dcp_index import INDEX_FILE, read_index
from ckptz.integrations.dcp import CkptzStorageReader
from tests.support.ranks_worker import KMEANS, PLAYS, SIZES, all_tensors

pytestmark = pytest.mark.apps

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torchrun_fsdp2.py"


def play(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run scenarios in processes that are started once; return the results of all ranks by scenario."""
    command = [sys.executable, "-m", "tests.support.ranks_worker", name, str(folder)]
    subprocess.run(command, cwd=ROOT, timeout=1200, check=True)

    results = {}
    for scenario, n_ranks in PLAYS[name]:
        paths = [folder / f"{scenario.__name__}-{n_ranks}-{rank}.json" for rank in range(n_ranks)]
        results[f"{scenario.__name__} {n_ranks}"] = [json.loads(p.read_text()) for p in paths if p.exists()]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    for step in (0, 1):
        state = all_tensors(step)
        torch.save(state, path / f"lossless-{step}.pt")
        base = path / "whole-0.ckptz" if step else None
        ckptz.torch.save_file(state, path / f"whole-{step}.ckptz", config=KMEANS.config, base=base, jobs=1)
        torch.save(ckptz.torch.load_file(path / f"whole-{step}.ckptz"), path / f"kmeans-{step}.pt")
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return play("all", folder)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_another_number_of_ranks_restores_equal_tensors(results: Any, n_ranks: int) -> None:
    cases = {f"{name} {step}": True for name in ("lossless", "kmeans") for step in (0, 1)}
    assert results[f"save_states {6 - n_ranks}"] == [{}] * (6 - n_ranks)
    assert results[f"load_states {n_ranks}"] == [cases] * n_ranks


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("step", [0, 1])
def test_grids_restore_to_equal_values_on_any_number_of_ranks(
    results: Any, folder: Path, n_ranks: int, step: int
) -> None:
    assert results[f"load_grids {6 - n_ranks}"] == [{}] * (6 - n_ranks)
    restored, exact = torch.load(folder / f"grid-{n_ranks}-{step}.pt"), all_tensors(step)
    unsharded: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SIZES.items()}
    reader = CkptzStorageReader(
        folder / f"grid-{n_ranks}-{step}", jobs=1
    )  # compares every chunk with its checksum
    dcp.load(unsharded, storage_reader=reader, no_dist=True)
    assert all(torch.equal(unsharded[name], tensor) for name, tensor in restored.items())
    for name in ("wide", "narrow", "odd"):
        error = (restored[name] - exact[name]).square().mean().sqrt() / exact[name].std()
        assert 0 < error < 0.25


def test_the_unsharded_kmeans_state_is_lossy_where_shards_alone_would_not_be(folder: Path) -> None:
    decoded, exact = torch.load(folder / "kmeans-0.pt"), all_tensors()
    assert not torch.equal(decoded["odd"], exact["odd"])  # its shards have fewer elements than min_elements
    assert torch.equal(decoded["small"], exact["small"])


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_shards_record_where_they_belong(results: Any, folder: Path, n_ranks: int) -> None:
    del results
    step = folder / f"lossless-{n_ranks}-1"
    covered = {name: np.zeros(shape, np.int64) for name, shape in SIZES.items()}
    shards = sorted(step.glob("shard-*"))
    assert len(shards) == n_ranks
    assert len(list(step.glob("base-*"))) == n_ranks
    for shard in shards:
        with ckptz.safe_open(shard, "np") as file:
            assert file.metadata()["ckptz.ranks"] == str(n_ranks)
            for name, record in json.loads(file.metadata()["ckptz.shards"]).items():
                shape = file.get_slice(name).get_shape()
                assert tuple(record["shape"]) == SIZES[record["tensor"]]
                at = tuple(slice(o, o + n) for o, n in zip(record["offset"], shape, strict=True))
                covered[record["tensor"]][at] += 1
    assert all((count == 1).all() for count in covered.values())


def test_one_process_reads_what_four_ranks_wrote(results: Any, folder: Path) -> None:
    del results
    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SIZES.items()}
    dcp.load(state, storage_reader=CkptzStorageReader(folder / "lossless-4-1", jobs=1), no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in all_tensors(1).items())


def test_fsdp2_resumes_on_another_number_of_ranks_with_a_full_file(results: Any) -> None:
    assert results["fsdp_saves 2"][0]["steps"] == ["step-2", "step-3"]  # of the rank that deletes old ones
    assert len(results["fsdp_resumes 4"]) == 4
    for rank in results["fsdp_resumes 4"]:
        assert rank["step"] == 3
        assert rank["same"]
        assert rank["scheduler"] == 4
    assert results["fsdp_resumes 4"][0]["bases"] == 0
    assert results["fsdp_resumes 4"][0]["steps"] == ["step-3", "step-4"]


def test_shards_are_moved_by_the_share_of_momentum_that_all_ranks_follow(results: Any) -> None:
    weight = "training.model.0.weight"
    first, second = results["moved_shards 2"]
    assert first["15"][weight] == 0.9  # the default share, as no weight updates were observed yet
    assert first["31"][weight] is None  # lost before the restart
    # The second rank has not applied these updates.
    assert first["30"][weight] == second["30"][weight] == pytest.approx(0.5, abs=0.1)
    assert first["46"][weight] == second["46"][weight] > 0.7
    for shares in (*first.values(), *second.values()):
        # This tensor is lossy, without momentum correction.
        assert shares["training.optimizer.state.0.weight.exp_avg"] is None


def test_ranks_that_disagree_are_told(results: Any, folder: Path) -> None:
    assert len(results["disagreements 2"]) == 2
    for rank in results["disagreements 2"]:
        assert "all ranks must save the same model" in rank["dtypes"]
        assert "CheckpointException" in rank["names"]
    for name in ("dtypes", "names"):
        assert not (folder / name / INDEX_FILE).exists()


@pytest.mark.parametrize("play_", ["all", pytest.param("slow", marks=pytest.mark.slow)])
def test_a_rank_that_fails_fails_the_save_on_all(play_: str, request: pytest.FixtureRequest) -> None:
    name, n_ranks, fixture = {
        "all": ("a_failing_rank 2", 2, "results"),
        "slow": ("a_failing_rank 4", 4, "slowly"),
    }[play_]
    ranks = request.getfixturevalue(fixture)[name]
    assert len(ranks) == n_ranks
    for outcome in (of_rank[method] for of_rank in ranks for method in ("kmeans", "grid")):
        assert "Input/output error" in outcome["error"]
        assert outcome["seconds"] < 100


@pytest.mark.parametrize("play_", ["all", pytest.param("slow", marks=pytest.mark.slow)])
def test_an_interrupted_rank_ends_the_save_on_all_and_the_next_save_works(
    play_: str, request: pytest.FixtureRequest
) -> None:
    name, fixture = {
        "all": ("interrupted_saves 2", "results"),
        "slow": ("interrupted_saves 4", "slowly"),
    }[play_]
    first_rank, *other_ranks = request.getfixturevalue(fixture)[name]
    for method in ("kmeans", "grid", "lossless"):
        assert "KeyboardInterrupt" in first_rank[method]["ends"]
        assert set(first_rank[method]["ends"]) <= {"KeyboardInterrupt", ""}
        assert all(rank[method]["ends"] == first_rank[method]["ends"] for rank in other_ranks)
        assert first_rank[method]["seconds"] < 20
    assert first_rank["lossless"]["same"]


def check_busy(ranks: list[dict[str, Any]], n_ranks: int) -> None:
    assert len(ranks) == n_ranks
    assert all(rank["reduced"] == 150 and "step-49" in rank["steps"] for rank in ranks)
    assert ranks[0]["steps"] == ["step-49"]  # of the rank that deletes old ones


def test_fifty_saves_beside_collectives(results: Any) -> None:
    check_busy(results["saves_beside_training 2"], 2)


def check_killed(ranks: list[dict[str, Any]], folder: Path, n_ranks: int) -> None:
    assert len(ranks) == n_ranks - 1, "one is dead"
    step = folder / "killed" / "step-1"
    for rank in ranks:
        assert rank["newest"] == str(step)
        assert rank["seconds"] < 60
    state = {name: torch.zeros(shape) for name, shape in SIZES.items()}
    dcp.load(state, storage_reader=CkptzStorageReader(step, jobs=1), no_dist=True)
    # Lossy files, and the residual files that make the newest step exact.
    assert all(torch.equal(state[name], tensor) for name, tensor in all_tensors().items())
    assert read_index(step).ranks == n_ranks


def test_a_killed_rank_leaves_the_step_before_and_no_half_of_its_own(results: Any, folder: Path) -> None:
    check_killed(results["killed 2"], folder, 2)


# --- the same on four ranks -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slowly(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return play("slow", tmp_path_factory.mktemp("slow"))


@pytest.mark.slow
def test_fifty_saves_of_four_ranks(slowly: Any) -> None:
    check_busy(slowly["saves_beside_training 4"], 4)


@pytest.mark.slow
def test_one_of_four_is_killed(slowly: Any) -> None:
    ranks = slowly["killed 4"]
    assert len(ranks) == 3
    assert all(rank["newest"].endswith("step-1") and rank["seconds"] < 60 for rank in ranks)


@pytest.mark.slow
def test_a_missing_rank_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    first, _ = play("hung", tmp_path)["hung 2"]
    assert 4 < first["seconds"] < 50
    assert first["newest"] is None


@pytest.mark.slow
def test_the_example_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    for n_ranks, first, last in ((2, 0, 10), (4, 10, 20), (1, 20, 30)):
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_ranks)]
        command = [*run, str(EXAMPLE), str(tmp_path / "run"), "10"]
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        assert f"{n_ranks} ranks, from step {first} to {last}" in process.stdout


# --- one file of all ranks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def consolidated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    assert play("sharded", folder) == {f"sharded_runs {n}": [{}] * n for n in (1, 2, 4)}
    return folder


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("mesh", ["flat", "square", "parallel"])
@pytest.mark.parametrize("method", ["lossless", "grid"])
def test_a_sharded_step_is_restored_to_the_full_state(
    consolidated: Path, mesh: str, method: str, n_ranks: int, tmp_path: Path
) -> None:
    run = consolidated / f"{mesh}-{n_ranks}-{method}"
    expected = torch.load(run.with_suffix(".pt"))
    report = ckptz.restore(f"{run}@2", tmp_path / "full.safetensors", jobs=1)
    assert report.n_tensors == len(expected)
    check_bits(load_plain(tmp_path / "full.safetensors"), expected)
    ckptz.restore(f"{run}@2", tmp_path / "dcp", to="dcp", jobs=1)
    loaded: dict[str, Any] = {}
    _load_state_dict(
        loaded, FileSystemReader(tmp_path / "dcp"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    flat, _ = flatten_state_dict(loaded)
    check_bits({name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}, expected)
    assert loaded["step"] == 2
    assert ckptz.diff(f"{run}@2", tmp_path / "full.safetensors").is_equal


def check_bits(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert tensors[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes(), name


# --- plain folders of FSDP2 -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    assert play("titan", path) == {"titan_saves 2": [{}, {}]}
    return path


@pytest.mark.parametrize("config", [ckptz.LOSSLESS, ckptz.Grid(step=0.25)], ids=["lossless", "grid"])
def test_plain_folders_of_fsdp2_are_packed_restored_and_resumed(titan: Path, config: Any) -> None:
    sources, packed = [titan / "titan" / f"step-{step}" for step in (1, 2)], titan / "titan" / config.name
    for report in ckptz.compress(sources, packed, config=config, chain=True):
        assert not [note for note in report.notes if "no calibration" not in note]  # the moments are known
    [newest] = packed.rglob("step-2.ckptz")
    back = titan / "titan" / "back"
    ckptz.restore(newest, back, to="dcp")
    results = play("titan back", titan)["titan_resumes 2"]
    shutil.rmtree(back)
    for rank in results:
        assert (rank["step"], rank["last_epoch"], rank["loader"]) == (2, 2, [{"at": 0}, {"at": 1}])
        assert rank["worst"] == 0 if config == ckptz.LOSSLESS else 0 < rank["worst"] < 0.01
