"""Files that are replaced, deleted or written to while a handle has them open."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz.errors import FormatError, MissingBaseError
from tests.support.api_support import CKPTZ, LIBRARIES, Library, make, same

OLD = {"x": make(torch.float32, 1500, 1001), "y": torch.arange(6)}  # x has two chunks
NEW = {"x": make(torch.float32, 1500, 1001, seed=1), "y": torch.arange(6) * 2}


def save_over(library: Library, path: Path) -> None:
    """Save new tensors to the same path with the library's own `save_file`."""
    library.torch.save_file(NEW, path)


def move_over(library: Library, path: Path) -> None:
    library.torch.save_file(NEW, path.with_name("new.file"))
    os.replace(path.with_name("new.file"), path)


def delete(_: Library, path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("change", [save_over, move_over, delete], ids=lambda change: change.__name__)
def test_a_handle_keeps_the_file_that_it_opened(
    library: Library, change: Callable[[Library, Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "x.file"
    library.torch.save_file(OLD, path)
    for framework in ("pt", "np"):
        with library.safe_open(path, framework) as handle:
            part = handle.get_slice("x")
            change(library, path)
            assert same(torch.as_tensor(handle.get_tensor("y")), OLD["y"])
            assert same(torch.as_tensor(part[1400:, 3]).contiguous(), OLD["x"][1400:, 3].contiguous())
        if path.exists():
            assert same(library.torch.load_file(path), {name: NEW[name] for name in ("y", "x")})
            library.torch.save_file(OLD, path)
        else:
            with pytest.raises(FileNotFoundError):
                library.safe_open(path, framework)
            library.torch.save_file(OLD, path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def write_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 9 // 10)
        file.write(bytes(1000))


@pytest.mark.parametrize("change", [cut, empty, write_over], ids=lambda change: change.__name__)
def test_a_file_that_is_overwritten_in_place_raises_an_error(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "x.ckptz"
    CKPTZ.torch.save_file(OLD, path)
    with CKPTZ.safe_open(path, "pt") as handle:
        part = handle.get_slice("x")
        assert same(part[0], OLD["x"][0])
        change(path)
        for read in (handle.get_tensors, lambda: handle.get_tensor("x"), lambda: part[1400:]):
            with pytest.raises(FormatError, match=r"^[^\n]*x\.ckptz[^\n]*$"):
                read()


Change = Callable[[Path], Any]


@pytest.mark.parametrize(
    "change", [Path.unlink, lambda path: save_over(CKPTZ, path)], ids=["gone", "replaced"]
)
def test_a_delta_keeps_the_base_that_it_was_opened_with(change: Change, tmp_path: Path) -> None:
    CKPTZ.torch.save_file(OLD, tmp_path / "base.ckptz")
    tuned = {**OLD, "x": OLD["x"].clone()}
    tuned["x"][::7] *= 1.5
    CKPTZ.torch.save_file(tuned, tmp_path / "delta.ckptz", base=tmp_path / "base.ckptz")
    with CKPTZ.safe_open(tmp_path / "delta.ckptz", "pt") as handle:
        change(tmp_path / "base.ckptz")
        assert same(handle.get_slice("x")[...], tuned["x"])
    with pytest.raises(MissingBaseError, match=r"base\.ckptz"):
        CKPTZ.safe_open(tmp_path / "delta.ckptz", "pt")


@pytest.mark.parametrize("change", [cut, write_over], ids=lambda change: change.__name__)
def test_a_base_that_is_overwritten_in_place_is_named_in_the_error(change: Change, tmp_path: Path) -> None:
    CKPTZ.torch.save_file(OLD, tmp_path / "base.ckptz")
    CKPTZ.torch.save_file(
        {**OLD, "x": OLD["x"] * 1.01}, tmp_path / "delta.ckptz", base=tmp_path / "base.ckptz"
    )
    with CKPTZ.safe_open(tmp_path / "delta.ckptz", "pt") as handle:
        change(tmp_path / "base.ckptz")
        with pytest.raises(FormatError, match=r"base\.ckptz"):
            handle.get_tensor("x")
