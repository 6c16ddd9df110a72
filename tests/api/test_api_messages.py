"""Messages of errors contain those of safetensors, which callers may look for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.api_support import CKPTZ, SAFETENSORS, Library, outcome

S = slice


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Write the same tensors as `safetensors.file` and `ckptz.file`, each with its library."""
    root: Path = tmp_path_factory.mktemp("messages")
    for library in (SAFETENSORS, CKPTZ):
        library.torch.save_file({"a": torch.zeros(2, 3), "b": torch.ones(2)}, root / f"{library}.file")
    return root


def words(error: Any, library: Library) -> str:
    """Return the message of an error with a common file name and single spaces."""
    assert isinstance(error, Exception), error
    return " ".join(str(error).replace(f"{library}.file", "FILE").split())


def check(action: Any, upto: str | None = None) -> None:
    """Check that the message of ckptz contains that of safetensors, or its beginning up to `upto`."""
    theirs, ours = (outcome(lambda library=library: action(library)) for library in (SAFETENSORS, CKPTZ))
    expected = words(theirs, SAFETENSORS)
    if upto is not None:
        assert upto in expected
        expected = expected[: expected.index(upto) + len(upto)]
    assert expected in words(ours, CKPTZ)


INDEXES = (
    *(5, -5, (0, 0, 0), (S(None), 9), "q", 1.5, S(0, 9), S(9), S(5, 7), S(7, None), S(1, 9, 3), [0, 1], None),
    *((0, ..., 0, 0), (..., ...), S(0, 2, 0), S(0, 2, -1), 2**40, (0, 0, -9), (-1, 7), S(1.5, 2)),
)


@pytest.mark.parametrize("index", INDEXES, ids=repr)
def test_errors_of_indexes(folder: Path, index: Any) -> None:
    check(lambda library: library.safe_open(folder / f"{library}.file", "np").get_slice("a")[index])


def test_errors_of_handles(folder: Path) -> None:
    def opened(library: Library, framework: str = "pt", device: str = "cpu") -> Any:
        return library.safe_open(folder / f"{library}.file", framework, device)

    def closed(library: Library) -> Any:
        with opened(library) as handle:
            pass
        return handle.keys()

    check(lambda library: opened(library).get_tensor("zz"))
    check(lambda library: opened(library).get_slice("zz"))
    check(lambda library: opened(library, framework="xx"))
    check(lambda library: opened(library, device="zz"))
    check(closed)


def test_errors_of_missing_files(folder: Path) -> None:
    missing = folder / "missing"
    check(lambda library: library.safe_open(missing, "pt"))
    check(lambda library: library.torch.load_file(missing))
    check(lambda library: library.numpy.load_file(missing))
    error = outcome(lambda: CKPTZ.torch.load_file(missing))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.filename) == (2, str(missing))


def model(*names: str) -> torch.nn.Module:
    module = torch.nn.Module()
    for name in names:
        module.register_buffer(name, torch.zeros(2, 3) if name == "a" else torch.zeros(2))
    return module


@pytest.mark.parametrize(
    "names", [("a", "b", "c", "d"), (), ("a", "c")], ids=["missing", "unexpected", "both"]
)
def test_errors_of_models_that_do_not_fit(folder: Path, names: tuple[str, ...]) -> None:
    check(lambda library: library.torch.load_model(model(*names), folder / f"{library}.file"))


SLANTED = torch.ones(3, 4).T
SHARED = torch.zeros(10)
REFUSED = {
    "list": [torch.ones(1)],
    "number": {"x": 1},
    "sparse": {"x": torch.eye(3).to_sparse(), "y": torch.ones(1), "z": torch.eye(2).to_sparse()},
    "meta": {"x": torch.empty(3, device="meta")},
    "slanted": {"x": SLANTED},
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_of_tensors_that_cannot_be_saved(folder: Path, name: str) -> None:
    check(lambda library: library.torch.save_file(REFUSED[name], folder / "out"))
    check(lambda library: library.torch.save(REFUSED[name]))
    assert not (folder / "out").exists()


def test_errors_of_values_that_are_not_arrays(folder: Path) -> None:
    check(lambda library: library.numpy.save_file({"x": 1}, folder / "out"))


def test_errors_of_tensors_that_share_memory(folder: Path) -> None:
    check(lambda library: library.torch.save_file({"x": SHARED, "y": SHARED}, folder / "out"), "them again:")
    parts = torch.nn.Module()
    parts.register_buffer("x", SHARED[:6])
    parts.register_buffer("y", SHARED[4:])
    check(lambda library: library.torch.save_model(parts, folder / "out"), "saving amongst:")


def test_errors_of_layouts_without_force_contiguous(folder: Path) -> None:
    slanted = torch.nn.Module()
    slanted.register_buffer("x", SLANTED)
    check(lambda library: library.torch.save_model(slanted, folder / "out", force_contiguous=False))
