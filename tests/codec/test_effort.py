"""Efforts: the same values in different bytes, which every reader decodes without knowing the effort."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import ckptz
from ckptz import Checkpointer, KMeans, compress, inspect, rebase
from ckptz.codec.effort import EffortName
from ckptz.errors import ConfigError
from ckptz.format.plan import PlaneMode
from ckptz.format.streams import CoderId
from ckptz.integrations.linked import Chain, ChainOptions, job_of
from ckptz.numpy import load_file, save, save_file
from ckptz.store.resolve import open_checkpoint
from ckptz.sync import Publisher
from ckptz.torch import apply_, save_state
from tests.support.cli_support import ckptz as command

EFFORTS: tuple[Any, ...] = get_args(EffortName)
State = dict[str, np.ndarray[Any, Any]]


def state(step: int = 0) -> State:
    """Return float16 and float32 weights that move by 1e-5 per step, one too small for Huffman codes."""
    rng = np.random.default_rng(7)
    values = 0.02 * rng.standard_normal((96, 160)) + step * 1e-5 * rng.standard_normal((96, 160))
    return {
        "half": values.astype(np.float16),
        "single": values.astype(np.float32),
        "small": values[:4, :8].astype(np.float32),
    }


def write_files(folder: Path, effort: EffortName) -> list[Path]:
    """Write a full file and a delta, and return their paths."""
    paths = [folder / f"{effort}-{step}.ckptz" for step in range(2)]
    for step, path in enumerate(paths):
        save_file(state(step), path, base=paths[0] if step else None, effort=effort)
    return paths


def coders(path: Path) -> set[int]:
    """Return the coders of all streams in a file."""
    checkpoint = open_checkpoint(path)
    headers = [source.header for source in checkpoint.container.tensors.values()]
    checkpoint.close()
    return {stream.coder for header in headers for chunk in header.chunks for stream in chunk.streams}


def equal(tensors: State, expected: State) -> bool:
    return tensors.keys() == expected.keys() and all(
        tensors[name].tobytes() == tensor.tobytes() for name, tensor in expected.items()
    )


def test_fast_files_are_larger_and_only_huffman_streams_need_version_1_2(tmp_path: Path) -> None:
    paths = {effort: write_files(tmp_path, effort) for effort in EFFORTS}
    for step in range(2):
        small, default, fast = (paths[effort][step].stat().st_size for effort in ("small", "default", "fast"))
        assert small < fast
        assert default < fast
    for path in paths["fast"]:
        assert CoderId.HUFFMAN in coders(path)
        assert inspect(path).format_version == "1.2"
    for path in paths["small"]:
        assert CoderId.HUFFMAN not in coders(path)
        assert inspect(path).format_version == "1.0"


def test_a_fast_file_without_huffman_streams_has_version_1_0() -> None:
    file = save({"w": np.ones((80, 80), np.float32)}, effort="fast")
    assert b'"ckptz.version":"1.0"' in file
    assert b"huffman" not in file


def test_fast_deltas_are_ordered_differences_without_contexts(tmp_path: Path) -> None:
    plans = {}
    for effort in EFFORTS:
        checkpoint = open_checkpoint(write_files(tmp_path, effort)[1])
        plans[effort] = checkpoint.container.tensors["single"].header.plan
        checkpoint.close()
    assert plans["fast"].mode is PlaneMode.DIFFERENCE
    assert not plans["fast"].rules
    assert plans["default"].rules == plans["small"].rules != ()


def moments(step: int) -> State:
    """Return Adam's moments: between steps, first ones are independent and second ones move 1/3 octave."""
    rng = np.random.default_rng(5)
    levels = -24 + 2 * rng.standard_normal((256, 1)) + 1.2 * rng.standard_normal((256, 192))
    rng = np.random.default_rng(step)
    second = np.exp2(levels + 0.33 * rng.standard_normal(levels.shape))
    first = 0.25 * np.sqrt(second) * rng.standard_normal(levels.shape)
    return {"first": first.astype(np.float32), "second": second.astype(np.float32)}


@pytest.mark.parametrize("effort", ["default", "small"])
def test_a_base_and_contexts_that_save_too_little_are_not_used(tmp_path: Path, effort: EffortName) -> None:
    base, path = tmp_path / "0.ckptz", tmp_path / "1.ckptz"
    save_file(moments(0), base)
    save_file(moments(1), path, base=base, effort=effort)
    checkpoint = open_checkpoint(path)
    plans = {name: source.header.plan for name, source in checkpoint.container.tensors.items()}
    checkpoint.close()
    # Contexts seem to save bytes on a sample of the first moments, because each has few of its codes.
    assert not plans["first"].needs_base
    assert plans["second"].needs_base
    assert bool(plans["second"].rules) == (effort == "small")  # contexts save less than 1 %


def test_a_fast_delta_is_applied_in_place(tmp_path: Path) -> None:
    paths = write_files(tmp_path, "fast")
    live = {name: torch.from_numpy(tensor) for name, tensor in state().items()}
    apply_(live, paths[1].read_bytes())
    assert equal({name: tensor.numpy() for name, tensor in live.items()}, state(1))


def test_a_rebased_file_requires_huffman_only_for_frames_that_it_copies(tmp_path: Path) -> None:
    paths = write_files(tmp_path, "fast")
    rebase(paths[1], tmp_path / "rebased.ckptz")  # lossless tensors are encoded again, without Huffman
    assert inspect(tmp_path / "rebased.ckptz").format_version == "1.0"
    config = KMeans(levels=12)
    for step, path in enumerate(paths):
        save_file(state(step), path, config=config, base=paths[0] if step else None, effort="fast")
    expected = load_file(paths[1])
    rebase(paths[1], tmp_path / "inline.ckptz")
    assert CoderId.HUFFMAN in coders(paths[0])
    assert inspect(tmp_path / "inline.ckptz").format_version == "1.2"
    assert equal(load_file(tmp_path / "inline.ckptz"), expected)


def test_the_command_line_and_python_functions_write_the_same_bytes(tmp_path: Path) -> None:
    plain = tmp_path / "w.safetensors"
    ckptz.numpy.save_file(state(), tmp_path / "w.ckptz", effort="fast")
    command("restore", tmp_path / "w.ckptz", "-o", plain)
    command("compress", plain, "-o", tmp_path / "cli.ckptz", "--effort", "fast")
    compress(plain, tmp_path / "api.ckptz", effort="fast")
    assert (tmp_path / "cli.ckptz").read_bytes() == (tmp_path / "api.ckptz").read_bytes()
    assert CoderId.HUFFMAN in coders(tmp_path / "cli.ckptz")
    assert (tmp_path / "w.ckptz").read_bytes() == save(state(), effort="fast")


def test_a_run_is_saved_with_the_effort_of_its_checkpointer(tmp_path: Path) -> None:
    sizes = {}
    for effort in ("small", "fast"):
        torch.manual_seed(0)
        model = torch.nn.Linear(96, 160)
        with Checkpointer(tmp_path / effort, model, effort=effort, background=False) as checkpointer:
            checkpointer.save(1)
            sizes[effort] = checkpointer.wait().stored_bytes
            expected = model.weight.detach().clone()
            torch.nn.init.zeros_(model.weight)
            checkpointer.restore_latest()
        assert torch.equal(model.weight, expected)
    assert sizes["small"] < sizes["fast"]


def test_runs_of_frameworks_are_written_with_the_effort_of_their_options(tmp_path: Path) -> None:
    weights = {name: torch.from_numpy(tensor) for name, tensor in state().items()}
    for effort in ("fast", "small"):
        Chain(ChainOptions(effort=effort)).write(tmp_path / f"{effort}.ckptz", job_of(weights))
        assert (CoderId.HUFFMAN in coders(tmp_path / f"{effort}.ckptz")) is (effort == "fast")


def test_published_weights_are_written_with_the_effort_of_the_publisher(tmp_path: Path) -> None:
    weights = {name: torch.from_numpy(tensor) for name, tensor in state().items()}
    for effort in ("fast", "small"):
        [file] = Publisher(tmp_path / effort, effort=effort).publish(weights, step=1).files
        assert (CoderId.HUFFMAN in coders(tmp_path / effort / file)) is (effort == "fast")


@pytest.mark.parametrize(
    "write",
    [
        lambda folder, effort: save(state(), effort=effort),
        lambda folder, effort: save_file(state(), folder / "w.ckptz", effort=effort),
        lambda folder, effort: save_state({"step": 3}, folder / "w.ckptz", effort=effort),
        lambda folder, effort: compress(folder / "none.safetensors", effort=effort),
        lambda folder, effort: Checkpointer(folder / "run", torch.nn.Linear(2, 2), effort=effort),
        lambda folder, effort: ChainOptions(effort=effort),
        lambda folder, effort: Publisher(folder / "sync", effort=effort),
    ],
    ids=["save", "save_file", "save_state", "compress", "Checkpointer", "ChainOptions", "Publisher"],
)
def test_an_unknown_effort_is_refused_before_anything_is_written(
    tmp_path: Path, write: Callable[[Path, Any], object]
) -> None:
    for effort in ("fastest", None, 3, ["fast"]):
        with pytest.raises(ConfigError, match="effort must be one of fast, default, small"):
            write(tmp_path, effort)
    assert not list(tmp_path.iterdir())
