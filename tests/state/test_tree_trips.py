"""Nested states that `ckptz compress` accepts are restored; all others are refused before it writes."""

import argparse
import collections
import json
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402  # torch is optional
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

import ckptz  # noqa: E402
from ckptz.errors import ConfigError, CorruptionError, UnsupportedError  # noqa: E402
from tests.support.tree_support import (  # noqa: E402
    Drawn,
    assert_same_state,
    bits_of,
    dcp_states,
    form,
    kept_states,
    save_untyped,
    spoilt_states,
)


class Subclass(torch.Tensor):  # torch is an optional import here
    pass


QUICK = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(QUICK, max_examples=10_000)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of temporary files
FILES = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


def compress(source: Path, output: Path) -> None:
    [_] = ckptz.compress(source, output, jobs=1)


def restore(source: Path, output: Path) -> None:
    ckptz.restore(source, output, jobs=1)


def loaded(path: Path) -> Any:
    """Load a trusted torch file without `weights_only`.

    torch writes some values that `weights_only=True` rejects: b"", integers of more than 255 bytes, and
    some types of tensors with gradients.
    """
    with torch.no_grad():
        return torch.load(path, weights_only=False)


def check_file(state: Any, folder: Path) -> None:
    torch.save(state, folder / "in.pt")
    compress(folder / "in.pt", folder / "in.ckptz")
    restore(folder / "in.ckptz", folder / "out.pt")
    assert_same_state(loaded(folder / "out.pt"), loaded(folder / "in.pt"))


def check_folder(state: dict[Any, Any], folder: Path) -> None:
    """Round-trip a state as a folder of two shards, with an index if all keys are strings."""
    hub, items = folder / "hub", list(state.items())
    hub.mkdir()
    for i, file in enumerate(FILES):
        torch.save(dict(items[i::2]), hub / file)
    if all(type(key) is str for key in state):
        weight_map = {key: FILES[i % 2] for i, key in enumerate(state)}
        (hub / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    compress(hub, folder / "packed")
    restore(folder / "packed" / "pytorch_model.ckptz", folder / "restored")
    for file in FILES:
        assert_same_state(loaded(folder / "restored" / file), loaded(hub / file))


@pytest.mark.parametrize("how", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["50", "10,000"])
def test_every_supported_state_is_restored(how: settings) -> None:
    @how
    @given(kept_states(), st.booleans())
    def check(drawn: Drawn, as_folder: bool) -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            (check_folder if as_folder else check_file)(drawn.state, Path(folder))

    check()


def check_shared(drawn: Drawn) -> None:
    """Require that untyped storage is restored, or refused if torch cannot save it again."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "in.pt"
        save_untyped(drawn.state, path)
        expected = loaded(path)
        compress(path, path.with_suffix(".ckptz"))
        try:
            restore(path.with_suffix(".ckptz"), path.with_name("out.pt"))
        except ConfigError as error:
            assert "torch cannot save this" in str(error)  # noqa: PT017  # not always
            ckptz.restore(path.with_suffix(".ckptz"), path.with_name("out.safetensors"), to="safetensors")
            return
        assert_same_state(loaded(path.with_name("out.pt")), expected)


@pytest.mark.parametrize("n", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_of_several_dtypes_is_restored_or_refused(n: int) -> None:
    settings(QUICK, max_examples=n)(given(kept_states(mixed=True))(check_shared))()


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)


def deep(levels: int) -> Any:
    node: Any = 0
    for _ in range(levels):
        node = [node]
    return node


def noted() -> Any:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.note = 1
    return parameter


Pair = collections.namedtuple("Pair", "a b")  # what states hold
SPOILS: list[Any] = [
    *("\ud800", "a\udfffb", {"\ud800": 1}, {("x", "\udc00"): 1}, 1j, {1}, bytearray(b"x"), Pair(1, 2)),
    *({2**64: 1}, {-(2**64): 1}, {(1, 2, 3, 4, 5): 1}, {math.nan: 1, float("nan"): 2}, deep(70)),
    *(torch.Size([-(2**63)]), torch.device("cpu"), torch.strided, collections.Counter("aab")),
    *(
        torch.zeros(2, 2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.zeros(2, device="meta"),
        quantized(),
    ),
    *(torch.zeros(2).untyped_storage(), noted(), np.float64(1), np.zeros(2), torch.nn.Linear(1, 1)),
    torch.eye(1).as_subclass(Subclass),
    *({torch.zeros(1): 1}, {frozenset([1]): 1}, argparse.Namespace(lr=1), Path("x"), os.system),
]


@settings(QUICK, max_examples=40)
@given(spoilt_states(st.sampled_from(SPOILS)), st.booleans())
def test_what_cannot_be_kept_is_refused_before_anything_is_written(drawn: Drawn, as_folder: bool) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        hub = Path(folder) / "hub"
        hub.mkdir()
        torch.save(drawn.state, hub / "model.bin")
        source = hub if as_folder else hub / "model.bin"
        with pytest.raises((UnsupportedError, ConfigError, CorruptionError), match=r"model\.bin|hub"):
            compress(source, Path(folder) / "out.ckptz")
        assert os.listdir(folder) == ["hub"]


@pytest.mark.parametrize("spoilt", SPOILS, ids=lambda spoilt: type(spoilt).__name__)
def test_each_value_that_cannot_be_kept_is_refused(spoilt: Any, tmp_path: Path) -> None:
    torch.save({"spoilt": spoilt}, tmp_path / "model.pt")
    with pytest.raises((UnsupportedError, ConfigError, CorruptionError), match=r"model\.pt"):
        compress(tmp_path / "model.pt", tmp_path / "out.ckptz")


def bare(value: Any) -> Any:
    """Return a state without the tensor attributes that DCP folders drop: flags, strides, shared memory."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bits_of(value)
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items()}
    return [bare(item) for item in value] if isinstance(value, list) else form(value, [])


@settings(QUICK, max_examples=40)
@given(dcp_states())
def test_folders_of_torch_distributed_are_restored_as_torch_reads_them(drawn: Drawn) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about a single process
        source, read = Path(folder) / "in", Path(folder) / "read.pt"
        try:
            dcp.save(drawn.state, storage_writer=FileSystemWriter(source), no_dist=True)
            dcp_to_torch_save(source, read)
            expected = torch.load(read, weights_only=True)
        except (CheckpointException, ValueError, RuntimeError):
            reject()  # two values of one name, or a type that torch cannot save here
        try:
            compress(source, Path(folder) / "in.ckptz")
        except (UnsupportedError, ConfigError) as error:
            assert "has the dtype" in str(error) or "is reserved by ckptz" in str(error)  # noqa: PT017
            return
        restore(Path(folder) / "in.ckptz", Path(folder) / "out.pt")
        assert bare(torch.load(Path(folder) / "out.pt", weights_only=True)) == bare(expected)


def test_a_state_that_joins_too_deep_is_refused(tmp_path: Path) -> None:
    """A state that is joined with an optimizer is nested one level deeper."""
    torch.save({"w": torch.ones(2), "deep": deep(62)}, tmp_path / "model.pt")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    compress(tmp_path / "model.pt", tmp_path / "alone.ckptz")
    restore(tmp_path / "alone.ckptz", tmp_path / "back.pt")
    torch.save({"w": torch.ones(2), "deep": deep(63)}, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"model\.pt: cannot be kept in one file: .* 64 levels"):
        ckptz.compress(
            tmp_path / "model.pt", tmp_path / "joined.ckptz", jobs=1, optimizer=tmp_path / "optimizer.pt"
        )
