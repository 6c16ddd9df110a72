"""save, save_file, load, load_file, save_model and load_model: the same cases for ckptz and safetensors."""

import collections
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from tests.support.api_support import (
    LIBRARIES,
    NUMPY_DTYPES,
    Case,
    Library,
    agrees,
    every_dtype,
    make,
    named,
    outcome,
    run_python,
    same,
    shapes,
)

ONES = torch.ones(2, 3)
GRID = np.arange(6.0).reshape(2, 3)
BIG_ENDIAN = GRID.astype(">f8")


@pytest.fixture(params=LIBRARIES, ids=str)
def library(request: Any) -> Library:
    """Return the library under test."""
    return request.param


def sorted_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Compare two dicts without their order, which `load` of safetensors does not keep."""
    return same(dict(sorted(left.items())), dict(sorted(right.items())))


def saves(
    tensors: Any, metadata: Any = None, to: str = "file", of: str = "torch"
) -> Callable[[Library, Path], Any]:
    """Return an action that saves tensors (or, with `of`, numpy arrays) and loads them from the file."""

    def run(library: Library, folder: Path) -> Any:
        module = getattr(library, of)
        module.save_file(tensors, folder / to, metadata)
        loaded = module.load_file(folder / to)
        assert sorted_same(module.load(module.save(tensors, metadata)), loaded)
        return dict(sorted(loaded.items()))

    return run


saves_arrays = functools.partial(saves, of="numpy")


def texts(metadata: Any) -> Callable[[Library, Path], Any]:
    """Return an action that saves metadata and reads it from the file."""

    def run(library: Library, folder: Path) -> Any:
        library.torch.save_file({"x": ONES}, folder / "file", metadata=metadata)
        loaded = library.safe_open(folder / "file", "pt").metadata()
        return loaded if loaded is None else dict(sorted(loaded.items()))

    return run


flat = torch.arange(6.0)
TENSORS = [
    Case("contiguous", saves({"a": ONES}), {"a": ONES}),
    Case("several", saves({"b": ONES, "a": ONES + 1}), {"a": ONES + 1, "b": ONES}),
    Case("ordered dict", saves(collections.OrderedDict(a=ONES)), {"a": ONES}),
    Case("none at all", saves({}), {}),
    Case("empty name", saves({"": ONES}), {"": ONES}),
    Case("odd names", saves({"a/../b": ONES, "ü\n☃": flat}), {"a/../b": ONES, "ü\n☃": flat}),
    Case("parameter", saves({"a": torch.nn.Parameter(ONES)}), {"a": ONES}),
    Case("scalar", saves({"a": torch.tensor(1.5)}), {"a": torch.tensor(1.5)}),
    Case("no elements", saves({"a": torch.zeros(0, 3)}), {"a": torch.zeros(0, 3)}),
    Case("no elements, of numpy's", saves({"a": torch.from_numpy(np.zeros((0, 3)))}),
         {"a": torch.zeros(0, 3, dtype=torch.float64)}),
    Case("two without elements", saves({"a": torch.zeros(0), "b": torch.zeros(0)}),
         {"a": torch.zeros(0), "b": torch.zeros(0)}),
    Case("part of a memory", saves({"a": flat[2:4]}), {"a": flat[2:4].clone()}),
    Case("odd part of a memory", saves({"a": torch.arange(9, dtype=torch.uint8)[1:]}),
         {"a": torch.arange(1, 9, dtype=torch.uint8)}),
    Case("one element of many", saves({"a": flat[::4][:1]}), {"a": flat[:1].clone()}),
    Case("disjoint parts", saves({"a": flat[:3], "b": flat[3:]}),
         {"a": flat[:3].clone(), "b": flat[3:].clone()}),
    Case("special values", saves({"a": torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45])}),
         {"a": torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45])}),
    Case("a list", saves([ONES]), ValueError),
    Case("None", saves(None), ValueError),
    Case("another mapping", saves(collections.UserDict(a=ONES)), ValueError),
    Case("a number", saves({"a": 1}), ValueError),
    Case("an array", saves({"a": GRID}), ValueError),
    Case("None as tensor", saves({"a": None}), ValueError),
    Case("sparse", saves({"a": ONES.to_sparse()}), ValueError),
    Case("sparse without values", saves({"a": torch.zeros(2, 2).to_sparse()}), ValueError),
    Case("transposed", saves({"a": ONES.t()}), ValueError),
    Case("strided", saves({"a": flat[::2]}), ValueError),
    Case("expanded", saves({"a": torch.ones(1).expand(3)}), ValueError),
    Case("shared", saves({"a": ONES, "b": ONES}), RuntimeError),
    Case("shared views", saves({"a": ONES, "b": ONES.view(6)}), RuntimeError),
    Case("overlapping", saves({"a": flat[:4], "b": flat[2:]}), RuntimeError),
    Case("shared and transposed", saves({"a": ONES, "b": ONES.t()}), RuntimeError),
    Case("name is a number", saves({1: ONES}), TypeError),
    Case("name is no text", saves({"\ud800": ONES}), UnicodeEncodeError),
    Case("meta tensor", saves({"a": torch.ones(2, device="meta")}), NotImplementedError),
    Case("complex128", saves({"a": torch.ones(2, dtype=torch.complex128)}), KeyError),
    Case("bits8", saves({"a": torch.ones(2, dtype=torch.uint8).view(torch.bits8)}), KeyError),
    *(
        Case(f"round trip {name}", saves({"a": tensor}), {"a": tensor})
        for name, tensor in every_dtype().items()
        if name not in ("float4", "float8_e8m0fnu")
    ),
    Case("folder is missing", saves({"a": ONES}, to="nothing/file"), SafetensorError),
    Case("a folder", saves({"a": ONES}, to="."), SafetensorError),
    *(
        Case(f"path {path!r}", lambda lib, at, path=path: lib.torch.save_file({"a": ONES}, path), TypeError)
        for path in (None, 3, b"name")
    ),
]  # fmt: skip

TEXTS = [
    Case("no metadata", texts(None), None),
    Case("empty metadata", texts({}), {}),
    Case("metadata", texts({"k": "v", "": "ü☃\n\0"}), {"": "ü☃\n\0", "k": "v"}),
    *(
        Case(f"metadata {metadata!r}", texts(metadata), TypeError)
        for metadata in ({"a": 1}, {1: "a"}, {"a": None}, {"a": {}}, {"a": b"x"}, {"a": True})
    ),
    *(Case(f"metadata {metadata!r}", texts(metadata), TypeError) for metadata in (["a"], "abc", 3)),
    Case("metadata is no text", texts({"a": "\ud800"}), UnicodeEncodeError),
]

ARRAYS = [
    Case("array", saves_arrays({"a": GRID}), {"a": GRID}),
    Case("no arrays", saves_arrays({}), {}),
    Case("the same twice", saves_arrays({"a": GRID, "b": GRID}), {"a": GRID, "b": GRID}),
    Case("scalar array", saves_arrays({"a": np.array(1.5)}), {"a": np.array(1.5)}),
    Case("empty array", saves_arrays({"a": np.zeros((0, 2))}), {"a": np.zeros((0, 2))}),
    Case("big endian", saves_arrays({"a": BIG_ENDIAN}), {"a": GRID}),
    Case("big-endian scalar", saves_arrays({"a": np.array(3, ">i4")}), {"a": np.array(3, np.int32)}),
    Case("big endian, transposed", saves_arrays({"a": BIG_ENDIAN[:1].T}), {"a": GRID[:1].T}),
    Case("masked array", saves_arrays({"a": np.ma.array([1.0])}), {"a": np.array([1.0])}),
    Case("array metadata", saves_arrays({"a": GRID}, {"k": "v"}), {"a": GRID}),
    Case("array metadata of numbers", saves_arrays({"a": GRID}, {"k": 1}), TypeError),
    *(
        Case(
            f"array of {dtype}",
            saves_arrays({"a": make(dtype, 2, 3).numpy()}),
            {"a": make(dtype, 2, 3).numpy()},
        )
        for dtype in NUMPY_DTYPES
    ),
    *(
        Case(f"no dict but {type(value).__name__}", saves_arrays(value), AttributeError)
        for value in ([GRID], None)
    ),
    *(
        Case(f"no array but {type(value).__name__}", saves_arrays({"a": value}), AttributeError)
        for value in (1, [1, 2], ONES, np.float32(1))
    ),
    *(
        Case(f"dtype {value.dtype}", saves_arrays({"a": value}), SafetensorError)
        for value in (
            *(GRID.astype(np.complex128), GRID.astype(np.longdouble), np.array([None]), np.array(["x"])),
            *(np.array(["2020"], "M8[s]"), np.zeros(2, [("x", "f4")])),
        )
    ),
    Case("array name is a number", saves_arrays({1: GRID}), TypeError),
    Case("array name is no text", saves_arrays({"\ud800": GRID}), UnicodeEncodeError),
    Case("arrays: folder is missing", saves_arrays({"a": GRID}, to="nothing/file"), SafetensorError),
]


def loads(name: str, data: Any) -> Iterator[Case]:
    """Yield the cases of loading invalid `data` with both modules."""
    for kind in ("torch", "numpy"):
        expected = TypeError if not isinstance(data, bytes) else SafetensorError
        yield Case(f"{kind}.load({name})", lambda lib, at, kind=kind: getattr(lib, kind).load(data), expected)


INVALID = {
    **{"no bytes": b"", "few bytes": b"abc", "other bytes": b"x" * 500},
    **{"text": "text", "a bytearray": bytearray(9), "a memoryview": memoryview(b"123")},
    **{"a number": 3, "None": None},
}
LOADING = [
    *(case for name, data in INVALID.items() for case in loads(name, data)),
    Case("cut bytes", lambda lib, at: lib.torch.load(lib.torch.save({"a": ONES})[:-3]), SafetensorError),
    Case("load_file, no file", lambda lib, at: lib.torch.load_file(at / "no"), FileNotFoundError),
    Case("numpy.load_file, no file", lambda lib, at: lib.numpy.load_file(at / "no"), FileNotFoundError),
    Case("load_file, odd backend", lambda lib, at: lib.torch.load_file(at, backend="x"), SafetensorError),
    Case("load_file, odd device", lambda lib, at: lib.torch.load_file(at / "no", "meta"), SafetensorError),
]


@named([*TENSORS, *TEXTS, *ARRAYS, *LOADING])
def test_saving_and_loading(library: Library, tmp_path: Path, case: Case) -> None:
    before = sorted(tmp_path.iterdir())
    result = outcome(lambda: case.action(library, tmp_path))
    assert agrees(result, case.expected)
    if isinstance(result, Exception):
        assert sorted(tmp_path.iterdir()) == before, "a failed call leaves no file"


@pytest.mark.parametrize("name", ["save", "save_file", "load", "load_file", "save_model", "load_model"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_signatures_have_the_same_order_and_defaults(kind: str, name: str) -> None:
    theirs, ours = (getattr(getattr(lib, kind), name, None) for lib in LIBRARIES)
    if theirs is None:
        return
    expected = inspect.signature(theirs).parameters.values()
    parameters = inspect.signature(ours).parameters
    assert [(p.name, p.kind, p.default) for p in expected] == [
        (p.name, p.kind, p.default) for p in parameters.values() if p.name in {q.name for q in expected}
    ]
    extra = [p for p in parameters.values() if p.name not in {q.name for q in expected}]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra)


def test_a_failed_save_leaves_the_old_file(library: Library, tmp_path: Path) -> None:
    library.torch.save_file({"a": ONES}, tmp_path / "file")
    for bad in ({"b": ONES.t()}, {"b": torch.ones(2, dtype=torch.complex128)}):
        with pytest.raises((ValueError, KeyError)):
            library.torch.save_file(bad, tmp_path / "file")
    assert same(library.torch.load_file(tmp_path / "file"), {"a": ONES})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_load_file_returns_new_memory_in_stored_order(library: Library, tmp_path: Path, backend: str) -> None:
    library.torch.save_file(shapes(), tmp_path / "file")
    loaded = library.torch.load_file(tmp_path / "file", backend=backend)
    assert list(loaded) == library.safe_open(tmp_path / "file", "pt").offset_keys()
    assert all(same(loaded[name], tensor) for name, tensor in shapes().items())
    loaded["line"].fill_(7)
    assert same(library.torch.load_file(tmp_path / "file")["line"], shapes()["line"])


def test_bf16_arrays_are_saved_and_loaded_with_ml_dtypes(library: Library, tmp_path: Path) -> None:
    code = f"""
import ml_dtypes, numpy as np
from {library.name}.numpy import load_file, save_file
array = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
save_file({{"a": array}}, {str(tmp_path / "file")!r})
loaded = load_file({str(tmp_path / "file")!r})["a"]
assert loaded.dtype == array.dtype and loaded.tobytes() == array.tobytes()
print("passed")
"""
    assert run_python(code) == "passed\n"


# --- models ------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """Two layers that share a weight, and a convolution with weights in `layout`."""

    def __init__(self, layout: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.c = torch.nn.Conv2d(2, 2, 3).to(memory_format=layout)


def names_in(library: Library, path: Path) -> tuple[list[str], Any]:
    handle = library.safe_open(path, "pt")
    return handle.keys(), handle.metadata()


def test_tied_weights_are_saved_once_and_named(library: Library, tmp_path: Path) -> None:
    model = Tied()
    library.torch.save_model(model, tmp_path / "file")
    assert names_in(library, tmp_path / "file") == (
        ["a.weight", "c.bias", "c.weight"],
        {"b.weight": "a.weight"},
    )
    other = Tied()
    missing, unexpected = library.torch.load_model(other, tmp_path / "file")
    assert (set(missing), unexpected) == (set(), [])
    assert other.b.weight is other.a.weight
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_metadata_of_the_caller_override_the_names_of_tied_weights(library: Library, tmp_path: Path) -> None:
    library.torch.save_model(Tied(), tmp_path / "file", metadata={"b.weight": "mine", "x": "y"})
    assert names_in(library, tmp_path / "file")[1] == {"b.weight": "mine", "x": "y"}


def test_an_untied_model_keeps_its_metadata(library: Library, tmp_path: Path) -> None:
    library.torch.save_model(torch.nn.Linear(2, 2), tmp_path / "file")
    assert names_in(library, tmp_path / "file") == (["bias", "weight"], None)


def test_a_file_may_keep_the_other_name_of_a_tied_weight(library: Library, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items() if name != "a.weight"}
    library.torch.save_file(state, tmp_path / "file")
    model = Tied()
    assert library.torch.load_model(model, tmp_path / "file") == (set(), [])
    assert same(model.a.weight.detach(), state["b.weight"])


@pytest.mark.parametrize(
    ("change", "missing", "unexpected"),
    [
        (lambda s: s | {"z": ONES}, set(), ["z"]),
        (lambda s: {k: v for k, v in s.items() if k != "c.bias"}, {"c.bias"}, []),
        (lambda s: s | {"b.weight": s["a.weight"].clone()}, set(), ["b.weight"]),
    ],
    ids=["one more", "one less", "both names"],
)
def test_strict_loading(
    library: Library, tmp_path: Path, change: Any, missing: set[str], unexpected: Any
) -> None:
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items() if name != "b.weight"}
    library.torch.save_file(change(state), tmp_path / "file")
    with pytest.raises(RuntimeError):
        library.torch.load_model(Tied(), tmp_path / "file")
    assert library.torch.load_model(Tied(), tmp_path / "file", strict=False) == (missing, unexpected)


def test_another_shape_is_refused(library: Library, tmp_path: Path) -> None:
    library.torch.save_model(torch.nn.Linear(2, 2), tmp_path / "file")
    with pytest.raises(RuntimeError, match="size mismatch"):
        library.torch.load_model(torch.nn.Linear(3, 2), tmp_path / "file")


def test_other_layouts_are_made_contiguous_by_default(library: Library, tmp_path: Path) -> None:
    model = Tied(torch.channels_last)
    library.torch.save_model(model, tmp_path / "file")
    assert same(library.torch.load_file(tmp_path / "file")["c.weight"], model.c.weight.detach().contiguous())
    with pytest.raises(ValueError, match="force_contiguous"):
        library.torch.save_model(model, tmp_path / "file", force_contiguous=False)


def test_a_view_of_a_larger_buffer_is_refused(library: Library, tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("part", torch.arange(6.0)[:3])
    with pytest.raises(RuntimeError):
        library.torch.save_model(model, tmp_path / "file")
