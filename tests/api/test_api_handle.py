"""`safe_open`: the same cases and assertions for ckptz and safetensors."""

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from tests.support.api_support import (
    CKPTZ,
    LIBRARIES,
    SAFETENSORS,
    Case,
    Library,
    agrees,
    every_dtype,
    named,
    outcome,
    run_python,
    same,
    shapes,
)

METADATA = {"format": "pt", "note": "naïve ☃", "": "empty key"}
SORTED_METADATA = dict(sorted(METADATA.items()))
FILE = "shapes.file"


@pytest.fixture(scope="module", params=[*LIBRARIES, "ckptz-plain"], ids=str)
def library_and_folder(request: Any, tmp_path_factory: Any) -> tuple[Library, Path]:
    """Return a library and a folder of files for it; ckptz also opens files that safetensors wrote."""
    is_plain = request.param == "ckptz-plain"
    library, writer = (CKPTZ, SAFETENSORS) if is_plain else (request.param, request.param)
    folder = tmp_path_factory.mktemp("handle")
    writer.torch.save_file(shapes(), folder / FILE)
    writer.torch.save_file(every_dtype(), folder / "dtypes.file", metadata=METADATA)
    writer.torch.save_file({}, folder / "no-tensors.file")
    writer.torch.save_file({"point": shapes()["point"]}, folder / "no-texts.file", metadata={})
    data = (folder / FILE).read_bytes()
    damaged = {"few": b"abc", "none": b"", "junk": b"x" * 500, "header": data[:30], "longer": data + b"z"}
    for name, content in {**damaged, "shorter": data[:-3]}.items():
        (folder / f"{name}.file").write_bytes(content)
    return library, folder


def opens(framework: Any = "pt", device: Any = "cpu", file: str = FILE, **options: Any) -> Callable[..., Any]:
    """Return an action that opens a file and lists its tensors."""
    return lambda library, folder: library.safe_open(folder / file, framework, device, **options).keys()


def reads(action: Callable[[Any], Any], framework: str = "pt", device: Any = "cpu", file: str = FILE) -> Any:
    """Return an action that opens a file and calls `action` with the handle."""

    def run(library: Library, folder: Path) -> Any:
        with library.safe_open(folder / file, framework, device) as handle:
            return action(handle)

    return run


def closed(action: Callable[[Any], Any]) -> Callable[[Library, Path], Any]:
    """Return an action that calls `action` with a closed handle."""

    def run(library: Library, folder: Path) -> Any:
        with library.safe_open(folder / FILE, "pt") as handle:
            pass
        return action(handle)

    return run


NAMES = sorted(shapes())


def frameworks(expected: Any, *names: Any) -> list[Case]:
    return [Case(f"framework {name!r}", opens(name), expected) for name in names]


def devices(expected: Any, *names: Any, of: str = "pt") -> list[Case]:
    return [Case(f"device {name!r} for {of}", opens(of, name), expected) for name in names]


def backends(expected: Any, *names: Any) -> list[Case]:
    return [Case(f"backend {name!r}", opens(backend=name), expected) for name in names]


BY_KEYWORD = {"framework": "pt", "device": "cpu", "backend": "pread"}
OPENING = [
    *frameworks(NAMES, "pt", "torch", "pytorch", "np", "numpy"),
    *frameworks(SafetensorError, "PT", "xx", "", "pt ", "onnx"),
    *frameworks(TypeError, None, 3, b"pt", ["pt"]),
    *devices(NAMES, "cpu", None, "cuda", "cuda:0", "cuda:7", "cuda:+1", "cuda:01", "mps", "mps:0"),
    *devices(NAMES, "npu", "npu:1", "xpu:1", "xla", "mlu:3", "musa", "hpu", 0, 3, True, np.int64(1)),
    *devices(SafetensorError, "cpu:0", "CPU", "", "meta", "auto", "cuda:0:1", "mps:1", "privateuseone"),
    *devices(SafetensorError, -1, 1 << 70, 1.5, b"cpu", [], torch.device("cpu"), torch.device("cuda", 0)),
    *devices(
        ValueError, "cuda:", "cuda:x", "cuda:-1", "cuda: 1", "npu:x", "mps:", f"cuda:{10**20 - 1}", "cuda:٣"
    ),
    *devices(SafetensorError, "cuda", "cuda:1", "mps", "xpu", 0, of="np"),
    *devices(NAMES, None, of="np"),
    *backends(NAMES, "mmap", "pread"),
    *backends(SafetensorError, "MMAP", "", "x"),
    *backends(TypeError, None, 1),
    Case("backend by position", lambda lib, at: lib.safe_open(at / FILE, "pt", "cpu", "mmap"), TypeError),
    Case("unknown option", lambda lib, at: lib.safe_open(at / FILE, "pt", foo=1), TypeError),
    Case("no framework", lambda lib, at: lib.safe_open(at / FILE), TypeError),
    Case("no arguments", lambda lib, at: lib.safe_open(), TypeError),
    Case("all by keyword", lambda lib, at: lib.safe_open(filename=at / FILE, **BY_KEYWORD).keys(), NAMES),
    Case("path as str", lambda lib, at: lib.safe_open(str(at / FILE), "pt").keys(), NAMES),
    *(
        Case(f"path {path!r}", lambda lib, at, path=path: lib.safe_open(path, "pt"), TypeError)
        for path in (b"name", None, 3)
    ),
    Case("missing file", opens(file="nothing"), FileNotFoundError),
    Case("missing folder", opens(file="nothing/nothing"), FileNotFoundError),
    Case("a folder", opens(file="."), OSError),
    Case("missing file, unknown framework", opens("xx", file="nothing"), SafetensorError),
    Case("missing file, unknown device", opens("pt", "zz", file="nothing"), SafetensorError),
    Case("missing file, unknown backend", opens(file="nothing", backend="z"), SafetensorError),
    Case("missing file, numpy on cuda", opens("np", "cuda", file="nothing"), FileNotFoundError),
    *(
        Case(f"damaged: {name}", opens(file=f"{name}.file"), SafetensorError)
        for name in ("few", "none", "junk", "header", "longer", "shorter")
    ),
]

OFFSET_ORDER = ["line", "phase", "box", "empty", "point", "half", "hollow"]
READING = [
    Case("keys are sorted", reads(lambda f: f.keys()), NAMES),
    Case("offset_keys", reads(lambda f: f.offset_keys()), OFFSET_ORDER),
    Case("get_tensors in stored order", reads(lambda f: list(f.get_tensors())), OFFSET_ORDER),
    Case("get_tensors", reads(lambda f: f.get_tensors()), {name: shapes()[name] for name in OFFSET_ORDER}),
    Case("metadata absent", reads(lambda f: f.metadata()), None),
    Case("metadata empty", reads(lambda f: f.metadata(), file="no-texts.file"), {}),
    Case(
        "metadata", reads(lambda f: dict(sorted(f.metadata().items())), file="dtypes.file"), SORTED_METADATA
    ),
    Case("no tensors", reads(lambda f: (f.keys(), f.offset_keys()), file="no-tensors.file"), ([], [])),
    Case("of none", reads(lambda f: f.get_tensors(), file="no-tensors.file"), {}),
    *(Case(f"tensor {name}", reads(lambda f, n=name: f.get_tensor(n)), shapes()[name]) for name in NAMES),
    *(
        Case(f"array {name}", reads(lambda f, n=name: f.get_tensor(n), "np"), shapes()[name].numpy())
        for name in NAMES
        if name not in ("half", "hollow")
    ),
    *(
        Case(f"dtype {name}", reads(lambda f, n=name: f.get_tensor(n), file="dtypes.file"), tensor)
        for name, tensor in every_dtype().items()
    ),
    *(
        Case(
            f"array dtype {name}",
            reads(lambda f, n=name: f.get_tensor(n), "np", file="dtypes.file"),
            tensor.numpy(),
        )
        for name, tensor in every_dtype().items()
        if not name.startswith(("bfloat16", "float8", "float4"))
    ),
    *(
        Case(f"shape {name}", reads(lambda f, n=name: f.get_slice(n).get_shape()), list(shapes()[name].shape))
        for name in NAMES
    ),
    *(
        Case(f"code of {name}", reads(lambda f, n=name: f.get_slice(n).get_dtype(), file="dtypes.file"), code)
        for name, code in {
            **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32"},
            **{"int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16"},
            **{"float32": "F32", "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3"},
            **{"float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"},
            **{"float8_e8m0fnu": "F8_E8M0", "float4": "F4"},
        }.items()
    ),
    Case("name by keyword", reads(lambda f: f.get_tensor(name="point")), torch.tensor(3.5)),
    Case("slice by keyword", reads(lambda f: f.get_slice(name="line")[3]), torch.tensor(3)),
    Case("missing tensor", reads(lambda f: f.get_tensor("zz")), SafetensorError),
    Case("missing slice", reads(lambda f: f.get_slice("zz")), SafetensorError),
    Case("missing tensor in numpy", reads(lambda f: f.get_tensor("zz"), "np"), SafetensorError),
    *(
        Case(f"tensor {name!r}", reads(lambda f, n=name: f.get_tensor(n)), TypeError)
        for name in (None, 3, b"box")
    ),
    Case("slice 3", reads(lambda f: f.get_slice(3)), TypeError),
    Case("F4 as an array", reads(lambda f: f.get_tensor("float4"), "np", file="dtypes.file"), AttributeError),
]

HANDLE = [
    Case("class name", reads(lambda f: type(f).__name__), "safe_open"),
    Case("public names", reads(lambda f: [n for n in dir(f) if n[0] != "_"]),
         ["get_slice", "get_tensor", "get_tensors", "keys", "metadata", "offset_keys"]),
    Case("public names of a slice", reads(lambda f: [n for n in dir(f.get_slice("box")) if n[0] != "_"]),
         ["get_dtype", "get_shape"]),
    Case("hash", reads(lambda f: hash(f) == hash(f) and f in {f}), True),
    Case("equal to itself only", reads(lambda f: (f == f, f == 1)), (True, False)),
    Case("hash of a slice", reads(lambda f: isinstance(hash(f.get_slice("box")), int)), True),
    Case("iterating a slice", reads(lambda f: list(f.get_slice("half"))), list(shapes()["half"])),
    Case("len", reads(len), TypeError),
    Case("len of a slice", reads(lambda f: len(f.get_slice("box"))), TypeError),
    Case("iter", reads(iter), TypeError),
    Case("in", reads(lambda f: "box" in f), TypeError),
    Case("subscript", reads(lambda f: f["box"]), TypeError),
    Case("close", reads(lambda f: f.close()), AttributeError),
    Case("shape of a slice", reads(lambda f: f.get_slice("box").shape), AttributeError),
    Case("new attribute", reads(lambda f: setattr(f, "x", 1)), AttributeError),
    Case("weak reference", reads(weakref.ref), TypeError),
    Case("copy", reads(copy.copy), TypeError),
    Case("pickle", reads(pickle.dumps), TypeError),
    Case("enter gives the handle", reads(lambda f: f.__enter__() is f), True),
    Case("exit without arguments", reads(lambda f: f.__exit__()), TypeError),
    Case("exit twice", closed(lambda f: f.__exit__(None, None, None)), None),
    Case("hash when closed", closed(lambda f: f in {f}), True),
    Case("enter when closed", closed(lambda f: f.__enter__() is f), True),
    *(
        Case(f"{name} when closed", closed(lambda f, n=name: getattr(f, n)()), SafetensorError)
        for name in ("keys", "metadata", "offset_keys", "get_tensors")
    ),
    *(
        Case(f"{name} when closed", closed(lambda f, n=name: getattr(f, n)("box")), SafetensorError)
        for name in ("get_tensor", "get_slice")
    ),
    Case("an error passes the context", reads(lambda f: {}["x"]), KeyError),
]  # fmt: skip

no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="needs a machine without an accelerator"
)
DEVICES = [
    *(
        Case(f"tensor on {device!r}", reads(lambda f: f.get_tensor("line"), device=device), RuntimeError)
        for device in ("cuda", "cuda:1", "mps", 0)
    ),
    *(
        Case(f"tensors on {device!r}", reads(lambda f: f.get_tensors(), device=device), RuntimeError)
        for device in ("cuda", 0)
    ),
    Case("empty tensor on cuda", reads(lambda f: f.get_tensor("empty"), device="cuda"), RuntimeError),
    Case("tensor on xpu", reads(lambda f: f.get_tensor("line"), device="xpu"), AssertionError),
    Case("tensor on hpu", reads(lambda f: f.get_tensor("line"), device="hpu"), ModuleNotFoundError),
    Case("slice on cuda", reads(lambda f: f.get_slice("line")[1:3], device="cuda"), AssertionError),
    Case("slice on 0", reads(lambda f: f.get_slice("line")[1:3], device=0), RuntimeError),
    Case("bad index on cuda", reads(lambda f: f.get_slice("line")[99], device="cuda"), IndexError),
    Case("missing tensor on cuda", reads(lambda f: f.get_tensor("zz"), device="cuda"), SafetensorError),
    Case("shape on cuda", reads(lambda f: f.get_slice("line").get_shape(), device="cuda"), [20]),
]  # fmt: skip


@named(OPENING)
def test_opening(library_and_folder: tuple[Library, Path], case: Case) -> None:
    assert agrees(outcome(lambda: case.action(*library_and_folder)), case.expected)


@named(READING)
def test_reading(library_and_folder: tuple[Library, Path], case: Case) -> None:
    assert agrees(outcome(lambda: case.action(*library_and_folder)), case.expected)


@named(HANDLE)
def test_handle(library_and_folder: tuple[Library, Path], case: Case) -> None:
    assert agrees(outcome(lambda: case.action(*library_and_folder)), case.expected)


@no_accelerator
@named(DEVICES)
def test_missing_devices(library_and_folder: tuple[Library, Path], case: Case) -> None:
    assert agrees(outcome(lambda: case.action(*library_and_folder)), case.expected)


def test_a_slice_outlives_its_handle(library_and_folder: tuple[Library, Path]) -> None:
    library, folder = library_and_folder
    with library.safe_open(folder / FILE, "pt") as handle:
        part = handle.get_slice("box")
    assert part.get_shape() == [2, 3, 4]
    assert part.get_dtype() == "F32"
    assert same(part[1], shapes()["box"][1])


def test_writing_to_a_tensor_leaves_the_file_alone(library_and_folder: tuple[Library, Path]) -> None:
    library, folder = library_and_folder
    for framework in ("pt", "np"):
        with library.safe_open(folder / FILE, framework) as handle:
            handle.get_tensor("line")[0] = 99
            handle.get_slice("line")[:5][1] = 99
        with library.safe_open(folder / FILE, framework) as handle:
            assert handle.get_tensor("line")[:2].tolist() == [0, 1]


def test_arrays_that_need_ml_dtypes(library_and_folder: tuple[Library, Path]) -> None:
    library, folder = library_and_folder
    code = f"""
from {library.name} import safe_open

def outcome(read):
    try:
        return read()
    except Exception as error:
        return error

shapes, dtypes = (safe_open({str(folder)!r} + "/" + name, "np") for name in ({FILE!r}, "dtypes.file"))
reads = [lambda: shapes.get_tensor("half"), lambda: shapes.get_slice("half")[1], shapes.get_tensors]
assert all(isinstance(outcome(read), TypeError) for read in reads)
assert isinstance(outcome(lambda: shapes.get_slice("half")[5]), Exception)
assert isinstance(outcome(lambda: dtypes.get_tensor("float8_e4m3fn")), AttributeError)
assert isinstance(outcome(lambda: dtypes.get_slice("float8_e5m2")[0]), AttributeError)
import ml_dtypes
array, row, tensors = map(outcome, reads)
assert array.dtype == row.dtype == ml_dtypes.bfloat16
assert array.tolist() == [[0, 1, 2], [3, 4, 5]] and row.tolist() == [3, 4, 5]
assert tensors["half"].tobytes() == array.tobytes()
print("passed")
"""
    assert run_python(code) == "passed\n"
