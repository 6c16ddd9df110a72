"""`get_slice(...)[index]`: PyTorch's rules with "pt", and the strict rules of safetensors otherwise."""

import warnings
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
    Library,
    agrees,
    is_error,
    make,
    outcome,
    same,
    shapes,
)

S = slice
LARGE = make(torch.bfloat16, 3, 700, 1000)  # three chunks that end within rows


def each(outcome: type[Exception] | None, *indexes: Any) -> list[tuple[Any, type[Exception] | None]]:
    return [(index, outcome) for index in indexes]


# (index, error) for a tensor of shape [2, 3, 4] under the strict rules of safetensors; None: the elements
# that numpy selects.
INDEXES = [
    *each(None, 0, 1, -1, -2, np.int64(1), np.uint8(1), np.array(1), torch.tensor(1)),
    *each(SafetensorError, 2, -3, 99, 1 << 31, -(1 << 31) - 1, 10**30),
    *each(SafetensorError, 1.0, "a", b"a", np.float32(1), np.bool_(True), {0}, {}, range(2)),
    *each(None, S(None), S(1, None), S(None, 1), S(0, 2), S(0, 0), S(1, 1), S(0, 2, 2)),
    *each(None, S(None, None, 2), S(None, None, 5), S(0, 1, 1 << 40), S(np.int64(1), None)),
    *each(SafetensorError, S(None, None, 0), S(None, None, -1), S(5, 9), S(2, None)),
    *each(SafetensorError, S(2, 2), S(0, 3), S(0, 99), S(0, (1 << 64) - 1)),
    *each(OverflowError, S(-1, None), S(None, -1), S(-9, None), S(None, -9), S(-2, -1)),
    *each(OverflowError, S(0, 10**30), S(-(10**30), None), S(None, None, 10**30)),
    *each(TypeError, S("a", None), S(None, "a"), S(1.0, None), S(None, None, "a")),
    *each(None, (), ..., (0,), (0, 1), (0, 1, 2), (1, -1, -1), (0, ...), (..., 0)),
    *each(None, (0, ..., 1), (0, 0, 0, ...), (..., 0, 0, 0), (S(None), 1), (S(1, 2), 0)),
    *each(None, (S(None), S(1, 3), S(None, None, 2)), (0, 0, S(0, 1)), (S(None),) * 3),
    *each(None, (S(None, None, 3), S(None, None, 2), S(None, None, 3)), (S(0, 0), 0)),
    *each(None, (S(None), S(None), S(0, 0)), (..., S(1, 3)), (S(1, 1), S(1, 1))),
    *each(SafetensorError, (0, 5), (0, -9), (0, 1, 2, 0), (S(None),) * 4, (..., 0, 0, 0, 0)),
    *each(SafetensorError, (..., ...), (0, ..., ...), (..., S(5, None)), (S(0, 1), S(0, 9))),
    *each(SafetensorError, (S(None), S(None, None, -1)), (0, 0, 0, -1), (0, 0, 0, S(0, 5))),
    *each(SafetensorError, None, (None, 0), (0, None), (S(None), None, ...), (..., None)),
    *each(SafetensorError, [0], [0, 1], [True, False], [0, 5], [[0, 1]], [None], [...]),
    *each(SafetensorError, ([0, 1], 0), (0, [0, 1]), ([],), ((0, 1),), ((0, 1), 0)),
    *each(SafetensorError, [S(0, 1)], [0, S(0, 1)], ([0, 1], S(None), [0, 1])),
    *each(SafetensorError, torch.tensor([0, 1]), torch.tensor([]), torch.tensor([0, 7])),
    *each(SafetensorError, torch.tensor([True, False]), torch.tensor([0.0, 1.0])),
    *each(SafetensorError, torch.ones(2, 3, 4, dtype=torch.bool), torch.tensor([True] * 3)),
    *each(SafetensorError, torch.tensor([-1, -2]), torch.tensor([[0], [1]])),
    *each(SafetensorError, torch.tensor([0, 1], dtype=torch.int32), np.array([1, 0])),
    *each(SafetensorError, np.array([True, False]), (torch.tensor([0, 1]), S(None), 0)),
    *each(SafetensorError, (S(0, 1), [2, 0]), (S(None), ..., torch.tensor([0, 1]))),
    *each(OverflowError, (5, S(-1, None)), (0, 0, 0, S(-1, None)), (S(-1, None), None)),
    *each(SafetensorError, (-9, S(-1, None)), (None, S(-1, None)), (S(-1, None), ..., ...)),
]
# Booleans are positions under the strict rules and masks under PyTorch's.
BOOLEANS: list[Any] = [True, False, (True, 0), (0, True), (True, False)]
NAMES = sorted(shapes())


@pytest.fixture(scope="module", params=LIBRARIES, ids=str)
def library_and_file(request: Any, tmp_path_factory: Any) -> tuple[Library, Path]:
    """Return a library and a file that it wrote."""
    library: Library = request.param
    path = tmp_path_factory.mktemp("slices") / "file"
    library.torch.save_file(shapes() | {"large": LARGE}, path)
    return library, path


def read_slice(library: Library, path: Path, name: str, index: Any, *arguments: Any, **options: Any) -> Any:
    """Return the slice of a tensor of the file, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch deprecates some of the indexes
        return outcome(lambda: library.safe_open(path, *arguments, **options).get_slice(name)[index])


def index_in_memory(tensor: Any, index: Any) -> Any:
    """Return the slice of a tensor in memory, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(lambda: tensor[index])


def name_of(index: Any) -> str:
    return repr(index).replace("slice", "S").replace(" ", "").replace("None", "_").replace("\n", "")


@pytest.mark.parametrize("name", ["box", "half", "point", "empty", "phase"])
def test_pytorch_slices_index_as_pytorch_does(library_and_file: tuple[Library, Path], name: str) -> None:
    def is_right(index: Any) -> bool:
        expected = index_in_memory(shapes()[name], index)
        return agrees(
            read_slice(*library_and_file, name, index, "pt"),
            type(expected) if is_error(expected) else expected,
        )

    assert not [index for index in [i for i, _ in INDEXES] + BOOLEANS if not is_right(index)]


@pytest.mark.parametrize("mode", ["np", "np pread", "pt pread"])
def test_strict_slices(library_and_file: tuple[Library, Path], mode: str) -> None:
    framework, *backend = mode.split()
    box, options = shapes()["box"].numpy(), {"backend": backend[0]} if backend else {}

    def is_right(index: Any, error: type[Exception] | None) -> bool:
        expected = np.asarray(index_in_memory(box, index)) if error is None else error
        if framework == "pt" and error is None:
            expected = torch.from_numpy(np.ascontiguousarray(expected).reshape(expected.shape))
        return agrees(read_slice(*library_and_file, "box", index, framework, **options), expected)

    assert not [index for index, error in INDEXES if not is_right(index, error)]


@pytest.mark.parametrize("index", BOOLEANS, ids=name_of)
def test_booleans_are_positions_in_strict_slices(library_and_file: tuple[Library, Path], index: Any) -> None:
    numbers = tuple(map(int, index)) if isinstance(index, tuple) else int(index)
    assert agrees(read_slice(*library_and_file, "box", index, "np"), shapes()["box"].numpy()[numbers])


@pytest.mark.parametrize(
    ("index", "n"), [((), 0), (0, -1), (-1, -1), (S(None), -1), (..., -1), ([], -1), ((0, ...), -1)], ids=str
)
def test_strict_slices_of_an_empty_tensor(library_and_file: tuple[Library, Path], index: Any, n: int) -> None:
    expected = shapes()["empty"].numpy() if n == 0 else SafetensorError
    assert agrees(read_slice(*library_and_file, "empty", index, "np"), expected)


@pytest.mark.parametrize("index", [(), ..., 0, -1, S(None), (0, 0), (..., 0), []], ids=str)
def test_strict_slices_of_a_scalar(library_and_file: tuple[Library, Path], index: Any) -> None:
    expected = shapes()["point"].numpy() if index in ((), ...) else SafetensorError
    assert agrees(read_slice(*library_and_file, "point", index, "np"), expected)


LARGE_INDEXES = [
    *(0, -1, 2, S(None), S(1, None), S(None, None, 2), (1, 348), (1, 348, S(576, 577)), (..., 999)),
    *((S(None), S(340, 360)), (1, S(345, 355, 3), S(None, None, 7)), (S(None), 699, 999), (..., S(0, 0))),
    *((S(None), S(None), S(None, 500)), (S(None), S(None), 0), (S(0, 3, 2), S(1, 699, 2), S(3, 999, 13))),
    *(
        (2, S(698, 700)),
        (S(0, 1), S(699, 700), S(999, 1000)),
        (1, S(None, None, 350)),
        (0, ..., S(999, 1000)),
    ),
]


@pytest.mark.parametrize("index", LARGE_INDEXES, ids=name_of)
@pytest.mark.parametrize("mode", ["pt", "pt pread"])
def test_slices_across_chunks(library_and_file: tuple[Library, Path], mode: str, index: Any) -> None:
    framework, *backend = mode.split()
    options = {"backend": backend[0]} if backend else {}
    if backend and index == -1:
        index = 2
    assert agrees(read_slice(*library_and_file, "large", index, framework, **options), LARGE[index])


@pytest.mark.parametrize(
    "index",
    [
        *([2, 0], [1], [-1, -1], torch.tensor([2, 2, 0]), np.array([1, 0]), torch.tensor([[0, 2], [1, 1]])),
        *(torch.tensor([True, False, True]), np.array([False, True, False]), (torch.tensor([0, 2]), 5)),
        *((S(None), [3, 699]), (S(1, None), [0, 1], S(5, 9)), (2, [0, 699]), ([0, 2], S(None), [1, 999])),
        *((None, [1], 5), (..., [0, 999]), (torch.tensor(1), [4]), (S(2, 2), [0]), (True, 0, [3])),
        *(torch.zeros(3, 700, dtype=torch.bool).fill_diagonal_(True), (S(None), torch.arange(700) % 2 == 0)),
    ],
    ids=name_of,
)
def test_lists_and_tensors_as_indexes_across_chunks(
    library_and_file: tuple[Library, Path], index: Any
) -> None:
    assert agrees(read_slice(*library_and_file, "large", index, "pt"), LARGE[index])


def test_a_default_device_does_not_move_slices(tmp_path: Path) -> None:
    CKPTZ.torch.save_file(shapes(), tmp_path / "file")
    with torch.device("meta"):  # as in code that builds a large model
        handle = CKPTZ.safe_open(tmp_path / "file", "pt")
        tensors = handle.get_tensor("box"), handle.get_slice("box")[1:], handle.get_slice("box")[[1, 0]]
    box = shapes()["box"]
    assert same(tensors, (box, box[1:], box[[1, 0]]))


@pytest.mark.parametrize("index", [0, ..., S(0, 2), (0, 1)], ids=name_of)
def test_slices_of_packed_f4_index_the_packed_tensor(tmp_path: Path, index: Any) -> None:
    packed = make(torch.uint8, 3, 2).view(torch.float4_e2m1fn_x2)
    CKPTZ.torch.save_file({"x": packed}, tmp_path / "file")
    handle = CKPTZ.safe_open(tmp_path / "file", "pt")
    assert handle.get_slice("x").get_shape() == [3, 4]
    assert same(handle.get_slice("x")[index], packed[index])


@pytest.mark.parametrize("save", [CKPTZ.torch.save_file, SAFETENSORS.torch.save_file])
def test_packed_f4_without_a_dimension_is_refused(tmp_path: Path, save: Any) -> None:
    with pytest.raises(SafetensorError):
        save({"x": make(torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "file")


@pytest.mark.parametrize("index", [S(1, 0), (S(None), S(2, 1)), (S(1, 0), 0), S(1, 0, 2)], ids=name_of)
def test_reversed_bounds_are_an_error_in_strict_slices(tmp_path: Path, index: Any) -> None:
    CKPTZ.torch.save_file(shapes(), tmp_path / "file")
    with pytest.raises(SafetensorError, match="ends before it begins"):
        CKPTZ.safe_open(tmp_path / "file", "np").get_slice("box")[index]


def test_strided_slices_are_contiguous_and_own_only_their_elements(tmp_path: Path) -> None:
    CKPTZ.torch.save_file(shapes(), tmp_path / "file")
    part = CKPTZ.safe_open(tmp_path / "file", "pt").get_slice("box")[:, 1, ::2]
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * 4
    assert SAFETENSORS.torch.save({"part": part})
