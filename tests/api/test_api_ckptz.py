"""The loading API of ckptz where it has more than safetensors, or differs on purpose."""

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError

import ckptz
from ckptz.errors import DTypeError
from ckptz.format.dtypes import dtype_of
from ckptz.format.envelope import plain_regions, write_plain
from ckptz.format.publish import publish
from ckptz.format.sources import ArraySource
from ckptz.parallel import Workers
from ckptz.state.torch import TorchTensors
from ckptz.write import writer
from ckptz.write.job import WriteJob
from tests.support.api_support import CKPTZ, SAFETENSORS, bits, every_dtype, make, run_python, same

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "safetensors-differences.md"
ONES = torch.ones(2, 3)


def test_names_of_the_package_are_imported_on_first_use() -> None:
    assert ckptz.safe_open.__module__ == "ckptz.api.read"
    assert {"safe_open", "LOSSLESS", "__version__"} <= set(dir(ckptz))
    with pytest.raises(AttributeError, match="nothing"):
        ckptz.nothing  # noqa: B018
    for name in ckptz.__all__:
        assert getattr(ckptz, name) is not None


def test_numpy_users_never_load_pytorch(tmp_path: Path) -> None:
    code = f"""
import sys, numpy as np, ckptz
from ckptz.numpy import load_file, save_file
save_file({{"x": np.arange(5)}}, {str(tmp_path / "x.ckptz")!r})
assert load_file({str(tmp_path / "x.ckptz")!r})["x"].tolist() == [0, 1, 2, 3, 4]
with ckptz.safe_open({str(tmp_path / "x.ckptz")!r}, "np") as f:
    assert f.get_slice("x")[1:3].tolist() == [1, 2]
print("torch" in sys.modules)
"""
    assert run_python(code) == "False\n"


@pytest.mark.parametrize(
    "module",
    [
        *("api.read", "verbs.compress", "codec.grid", "codec.kmeans", "codec.lossless"),
        *("numpy", "torch"),
    ],
)
def test_the_examples_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(f"ckptz.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def public_functions() -> list[tuple[str, Any]]:
    names = ("save", "save_file", "load", "load_file")
    pairs = [
        (f"{kind}.{name}", getattr(getattr(CKPTZ, kind), name))
        for kind in ("torch", "numpy")
        for name in names
    ]
    models = [(f"torch.{name}", getattr(CKPTZ.torch, name)) for name in ("save_model", "load_model")]
    return [*pairs, *models, ("safe_open", CKPTZ.safe_open)]


@pytest.mark.parametrize(("name", "function"), public_functions(), ids=lambda value: str(value)[:20])
def test_every_public_function_has_an_example(name: str, function: Any) -> None:
    assert ">>> " in function.__doc__, name


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_threads_change_no_byte(tmp_path: Path, jobs: int) -> None:
    tensors = every_dtype() | {"large": make(torch.bfloat16, 1500, 1001)}
    expected = CKPTZ.torch.save(tensors, jobs=3)
    assert CKPTZ.torch.save(tensors, jobs=jobs) == expected
    (tmp_path / "x").write_bytes(expected)
    loaded = CKPTZ.torch.load_file(tmp_path / "x", jobs=jobs)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.is_contiguous() for tensor in loaded.values())


def test_a_plain_file_is_opened_with_the_handle_of_safetensors(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": ONES}, tmp_path / "x")
    assert type(CKPTZ.safe_open(tmp_path / "x", "pt")) is safetensors.safe_open
    assert CKPTZ.safe_open(tmp_path / "x", "tf").keys() == ["x"]
    assert same(CKPTZ.torch.load_file(tmp_path / "x", jobs=2), {"x": ONES})
    assert same(CKPTZ.torch.load((tmp_path / "x").read_bytes()), {"x": ONES})
    assert same(CKPTZ.numpy.load((tmp_path / "x").read_bytes()), {"x": ONES.numpy()})


def test_safetensors_sees_a_valid_file(tmp_path: Path) -> None:
    CKPTZ.torch.save_file({"x": ONES, "y": ONES + 1}, tmp_path / "x", {"k": "v"})
    with SAFETENSORS.safe_open(tmp_path / "x", "pt") as plain:
        assert plain.offset_keys() == ["x", "y", "__ckptz__.index"]
        assert plain.metadata()["ckptz.format"] == "ckptz"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12)[::2],
        np.arange(12)[::-1],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.frombuffer(b"x" + np.arange(4).tobytes(), np.int64, offset=1),
    ],
    ids=["transposed", "strided", "reversed", "broadcast", "fortran", "unaligned"],
)
def test_arrays_of_any_layout_are_saved_by_value(array: np.ndarray, tmp_path: Path) -> None:
    CKPTZ.numpy.save_file({"x": array}, tmp_path / "x")
    assert same(CKPTZ.numpy.load_file(tmp_path / "x")["x"], np.ascontiguousarray(array))


@pytest.mark.parametrize(
    "tensor", [make(torch.complex64, 3).conj(), torch._neg_view(ONES)], ids=["conj", "neg"]
)
def test_lazily_negated_tensors_are_saved_by_value(tensor: torch.Tensor) -> None:
    loaded = CKPTZ.torch.load(CKPTZ.torch.save({"x": tensor}))["x"]
    assert same(loaded, tensor.resolve_conj().resolve_neg())


def test_disjoint_views_of_one_buffer_are_refused_or_stored_once(tmp_path: Path) -> None:
    buffer = torch.arange(6.0)
    state = {"buffer": buffer, "first": buffer[1:2], "last": buffer[4:]}
    with pytest.raises(RuntimeError, match=r"first.*last|last.*first"):
        CKPTZ.torch.save_file(state, tmp_path / "x")
    model = torch.nn.Module()
    for name, tensor in state.items():
        model.register_buffer(name, tensor)
    CKPTZ.torch.save_model(model, tmp_path / "x")
    assert CKPTZ.safe_open(tmp_path / "x", "pt").metadata() == {"first": "buffer", "last": "buffer"}
    assert CKPTZ.torch.load_model(model, tmp_path / "x") == (set(), [])


@pytest.mark.parametrize("name", ["float4", "float8_e8m0fnu", "float8_e4m3fn", "bfloat16"])
def test_load_accepts_every_dtype_that_load_file_accepts(name: str) -> None:
    tensor = every_dtype()[name]
    loaded = CKPTZ.torch.load(CKPTZ.torch.save({"x": tensor}))["x"]
    assert loaded.dtype == tensor.dtype
    assert same(bits(loaded), bits(tensor))


def test_a_dtype_error_is_of_every_class_that_safetensors_raises() -> None:
    for kind in (SafetensorError, TypeError, AttributeError, KeyError):
        assert issubclass(DTypeError, kind)
    assert str(DTypeError("no such dtype")) == "no such dtype"


def test_the_page_of_differences_lists_at_most_five() -> None:
    headings = re.findall(r"^## (\d)\. ", PAGE.read_text(), re.MULTILINE)
    assert headings == [str(n) for n in range(1, len(headings) + 1)]
    assert 0 < len(headings) <= 5


def odd_types() -> dict[str, ArraySource]:
    """Build tensors of dtypes that PyTorch and numpy lack, or lack for this shape."""
    rows = {"f6": ("F6_E2M3", (4,)), "f6b": ("F6_E3M2", (2, 4)), "f4": ("F4", (2, 3)), "x": ("U8", (3,))}
    return {
        name: ArraySource(dtype_of(code), shape, np.arange(dtype_of(code).n_bytes(shape), dtype=np.uint8))
        for name, (code, shape) in rows.items()
    }


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_dtypes_that_the_framework_lacks_are_refused_when_read(framework: str, tmp_path: Path) -> None:
    with publish(tmp_path / "ours") as sink, Workers(1) as workers:
        writer.write(sink, WriteJob(tensors=odd_types()), workers)
    with publish(tmp_path / "theirs") as sink:
        patterns = (source.flat for source in odd_types().values())
        write_plain(sink, plain_regions(odd_types()), None, patterns)
    for library, file in ((CKPTZ, "ours"), (SAFETENSORS, "theirs")):
        handle = library.safe_open(tmp_path / file, framework)
        assert handle.get_slice("f6").get_dtype() == "F6_E2M3"
        assert handle.get_slice("f4").get_shape() == [2, 3]
        assert handle.get_tensor("x").tolist() == [0, 1, 2]
        for name in ("f6", "f6b"):
            for read in (lambda n: handle.get_tensor(n), lambda n: handle.get_slice(n)[...]):  # noqa: B023
                with pytest.raises(SafetensorError):
                    read(name)


def test_tensors_are_moved_to_the_device_when_finished() -> None:
    sources = CKPTZ.torch._sources(every_dtype())
    framework = TorchTensors("meta", is_strict=False)
    for name, source in sources.items():
        tensor, buffer = framework.allocate(source.dtype, framework.shape_of(source.dtype, source.shape))
        assert tensor.device.type == "cpu"
        assert buffer.nbytes == source.dtype.n_bytes(source.shape)
        assert framework.finish(tensor).device.type == "meta"
        assert framework.finish(tensor).shape == every_dtype()[name].shape


def test_ranges_of_a_tensor_are_copied_to_the_host() -> None:
    tensor = make(torch.float32, 100)
    assert (
        CKPTZ.torch._copy_to_host(tensor.view(torch.uint8), 4, 3, 9).tobytes()
        == tensor[3:9].numpy().tobytes()
    )
    assert CKPTZ.torch._copy_to_host(tensor.view(torch.uint8), 4, 0, 100).dtype == np.dtype("<u4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_tensors_are_loaded_to_a_cuda_device(tmp_path: Path, device: Any) -> None:
    tensors = every_dtype() | {"large": make(torch.bfloat16, 1500, 1001), "empty": torch.zeros(0, 3)}
    CKPTZ.torch.save_file({n: t.cuda() for n, t in tensors.items()}, tmp_path / "x")
    SAFETENSORS.torch.save_file(tensors, tmp_path / "plain")
    ours, theirs = (
        lib.torch.load_file(tmp_path / n, device=device) for lib, n in ((CKPTZ, "x"), (SAFETENSORS, "plain"))
    )
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].device == tensor.device
        assert same(bits(ours[name]), bits(tensor))
    with CKPTZ.safe_open(tmp_path / "x", "pt", device) as handle:
        part = handle.get_slice("large")[:, torch.arange(3).cuda()]
    assert part.device.type == "cuda"
    assert same(part.cpu(), tensors["large"][:, :3].contiguous())
