"""Nested PyTorch states that are flattened and restored keep names, shared storages, strides and flags."""

import json
import os
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptz.errors import ConfigError, UnsupportedError  # noqa: E402
from ckptz.foreign import torch_files  # noqa: E402
from ckptz.format.sources import chunk_bounds  # noqa: E402  # torch is optional
from ckptz.state.flatten import flatten, unflatten  # noqa: E402

# Quantized tensors are refused, and torch itself cannot save dtypes of less than a byte.
NOT_SAVED = re.compile(r"torch\.(q|u?int[1-7]$)")
DTYPES = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not NOT_SAVED.match(str(d))}


def round_trip(state: Any, folder: Path) -> Any:
    """Save a state with torch, read and write it with `torch_files`, and load it with torch."""
    torch.save(state, folder / "in.pt")
    flat = torch_files.read(folder / "in.pt")
    tree = json.loads(json.dumps(flat.tree))
    torch_files.write(folder / "out.pt", flat.tensors, tree)
    assert sorted(os.listdir(folder)) == ["in.pt", "out.pt"], "temporary files are left"
    return torch.load(folder / "out.pt", weights_only=True)


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def assert_same(actual: Any, expected: Any) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.stride() == expected.stride()
    assert bits(actual) == bits(expected)


def address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)], ids=str)
def test_every_dtype_is_restored(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, 16), dtype=torch.uint8)
    tensor = raw[..., : dtype.itemsize].contiguous().view(dtype).reshape(shape)
    restored = round_trip({"t": tensor, "dtype": dtype}, tmp_path)
    assert restored["dtype"] is dtype
    assert_same(restored["t"], tensor)


def test_empty_tensors_of_every_dtype_are_restored_among_others(tmp_path: Path) -> None:
    empties = {str(dtype): torch.empty((0, 3), dtype=dtype) for dtype in sorted(DTYPES, key=str)}
    full = {f"{dtype} full": torch.zeros(5).to(dtype) for dtype in (torch.bfloat16, torch.int64)}
    state = {"first": torch.empty(0), **full, **empties, "window": torch.ones(4)[2:2], "last": torch.ones(2)}
    restored = round_trip(state, tmp_path)
    assert list(restored) == list(state)
    for name, tensor in state.items():
        assert_same(restored[name], tensor)


def test_names_are_paths_and_tensors_keep_shape_and_type(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(state, tmp_path / "in.pt")
    flat = torch_files.read(tmp_path / "in.pt")
    kinds = {name: (source.dtype.name, source.shape) for name, source in flat.tensors.items()}
    assert kinds["model.0.weight"] == ("F32", (4, 3))
    assert kinds["model.1.num_batches_tracked"] == ("I64", ())
    assert kinds["optimizer.state.0.exp_avg_sq"] == ("F32", (4, 3))
    restored = round_trip(state, tmp_path)
    assert type(restored["model"]) is OrderedDict
    assert vars(restored["model"]) == vars(state["model"])
    assert "_metadata" in vars(restored["model"])
    assert restored["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    optimizer.load_state_dict(restored["optimizer"])
    model.load_state_dict(restored["model"])


def test_views_of_one_storage_share_it_after_restore(tmp_path: Path) -> None:
    flat, matrix = torch.arange(30.0), torch.randn(4, 6)
    state = {
        "apart": flat[:10],
        "left": flat[10:20],
        "overlapping": flat[15:],
        "column": matrix[:, 1],
        "matrix": matrix,
        "line": matrix.view(-1),
        "transposed": matrix.t(),
    }
    stored = flatten(state).tensors
    assert set(stored) == {"apart", "left.storage", "matrix"}
    assert sum(source.dtype.n_bytes(source.shape) for source in stored.values()) == (30 + 24) * 4
    restored = round_trip(state, tmp_path)
    for name, tensor in state.items():
        assert_same(restored[name], tensor)
    assert len({address(restored[name]) for name in ("apart", "left", "overlapping")}) == 1
    assert len({address(restored[name]) for name in ("column", "matrix", "line", "transposed")}) == 1
    restored["overlapping"].fill_(7)
    assert restored["left"].tolist() == [10, 11, 12, 13, 14, 7, 7, 7, 7, 7]
    assert restored["apart"].tolist() == list(range(10))


def test_adjacent_tensors_of_one_storage_are_stored_separately() -> None:
    """cuDNN keeps the weights of an LSTM in one flat storage."""
    lstm = torch.nn.LSTM(3, 4)
    state: dict[str, Any] = {}
    memory = torch.randn(sum(p.numel() for p in lstm.parameters()))
    for name, parameter in lstm.named_parameters():
        begin = sum(t.numel() for t in state.values())
        state[name] = memory[begin : begin + parameter.numel()].view_as(parameter)
    flat = flatten(state)
    assert {n: s.shape for n, s in flat.tensors.items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert flat.tree["storages"] == [list(state)]


def test_strides_are_restored_and_values_stored_in_c_order(tmp_path: Path) -> None:
    state = {
        "transposed": torch.randn(5, 7).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bf16": torch.randn(3, 3).bfloat16().t(),
        "c64": torch.randn(3, 4, dtype=torch.complex64).t(),
        "large": torch.randn(1025, 2048).t(),  # more than one chunk
    }
    flat = flatten(state)
    for name, tensor in state.items():
        source = flat.tensors[name]
        bounds = chunk_bounds(source.dtype.n_patterns(source.shape))
        assert b"".join(source.patterns(*chunk).tobytes() for chunk in bounds) == bits(tensor), name
    restored = round_trip(state, tmp_path)
    for name, tensor in state.items():
        assert_same(restored[name], tensor)


def test_a_range_of_patterns_of_a_strided_complex_tensor_is_read() -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64).t()
    source = flatten([tensor]).tensors["0"]
    patterns = np.frombuffer(bits(tensor), "<u4")
    for begin in range(7):
        assert source.patterns(begin, 23 - begin).tolist() == patterns[begin : 23 - begin].tolist()


def test_elements_that_no_view_shows_are_not_stored(tmp_path: Path) -> None:
    state = {"every_third": torch.arange(3000)[::3], "window": torch.arange(1 << 20)[5:9]}
    assert [source.shape for source in flatten(state).tensors.values()] == [(1000,), (4,)]
    restored = round_trip(state, tmp_path)
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())
    assert (tmp_path / "out.pt").stat().st_size < 20_000


def test_an_expanded_tensor_is_stored_without_its_copies(tmp_path: Path) -> None:
    state = {"mask": torch.ones(1).expand(1 << 20, 1 << 20), "windows": torch.arange(9).unfold(0, 3, 1)}
    restored = round_trip(state, tmp_path)
    assert restored["mask"].stride() == (0, 0)
    assert restored["windows"].tolist() == state["windows"].tolist()
    assert (tmp_path / "out.pt").stat().st_size < 5000


def test_a_lazy_conjugate_is_stored_as_its_values(tmp_path: Path) -> None:
    tensor = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(round_trip({"c": tensor}, tmp_path)["c"], tensor)


def test_views_of_different_dtypes_are_restored_but_torch_cannot_save_them(tmp_path: Path) -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    state = {"a": memory[3:30], "b": memory[8:16].view(torch.float64), "c": memory[40:48].view(torch.int32)}
    flat = flatten(state)
    restored = unflatten(flat.tensors, flat.tree, tmp_path)
    for name, tensor in state.items():
        assert_same(restored[name], tensor)
    with pytest.raises(ConfigError, match=r"out\.pt: torch cannot save this"):
        torch_files.write(tmp_path / "out.pt", flat.tensors, flat.tree)
    assert os.listdir(tmp_path) == []


def test_names_of_tensors_are_unique_and_not_reserved() -> None:
    one, two, three = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    state = {
        "a.b": one,
        "a": {"b": two},
        "a.b~2": three,
        "__ckptz__.index": one.clone(),
        (1, "x"): one.clone(),
    }
    names = ["a.b", "a.b~2", "a.b~2~2", "tensor.__ckptz__.index", "(1,x)"]
    assert list(flatten(state).tensors) == names
    assert list(flatten(one).tensors) == ["tensor"]
    assert list(flatten({"__metadata__": one}).tensors) == ["tensor.__metadata__"]


def parameter_with_attribute() -> Any:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.note = 1
    return parameter


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in torch
        return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)


class Subclass(torch.Tensor):  # torch is an optional import here
    pass


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: torch.zeros(2, 2).to_sparse(), "sparse_coo tensor"),
        (quantized, "quantized tensor"),
        (lambda: torch.zeros(2, device="meta"), "device meta"),
        (parameter_with_attribute, "attribute 'note'"),
        (lambda: torch.zeros(2).as_subclass(Subclass), "Subclass"),
        (lambda: torch.zeros(2).untyped_storage(), "UntypedStorage"),
        (lambda: torch.device("cpu"), r"torch\.device"),
        (lambda: np.zeros(2), r"numpy\.ndarray"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_objects_are_refused_with_their_path(create: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"'layers\.3'.*{message}"):
        flatten({"layers": [1, 2, 3, create()]})
