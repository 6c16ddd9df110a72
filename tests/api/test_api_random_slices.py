"""Random indexes: safetensors and ckptz return the same bytes, or raise errors of the same class."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from tests.support.api_support import (
    CKPTZ,
    LIBRARIES,
    SAFETENSORS,
    Library,
    bits,
    is_error,
    make,
    outcome,
    same,
)

SHAPES: dict[str, tuple[int, ...]] = {
    "box": (5, 4, 3),
    "deep": (2, 1, 3, 2, 2),
    "line": (17,),
    "point": (),
    "hollow": (3, 0, 2),
    "rows": (2100, 1001),  # three chunks, cut within rows
    "blocks": (3, 700, 1000),
}
DTYPES = {"rows": torch.bfloat16, "blocks": torch.uint8, "deep": torch.complex64}
TENSORS = {name: make(DTYPES.get(name, torch.float32), *shape) for name, shape in SHAPES.items()}
MODES = {"pt": ("pt", "mmap"), "np": ("np", "mmap"), "pt pread": ("pt", "pread")}


@pytest.fixture(scope="module")
def handles(tmp_path_factory: Any) -> dict[tuple[str, str], Any]:
    """Return open handles by library and a key of MODES."""
    folder: Path = tmp_path_factory.mktemp("random")
    for library in LIBRARIES:
        library.torch.save_file(TENSORS, folder / library.name)
    return {
        (library.name, mode): library.safe_open(folder / library.name, framework, backend=backend)
        for library in LIBRARIES
        for mode, (framework, backend) in MODES.items()
    }


def bounds(n: int, lowest: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(lowest, n + 2)


def slices(n: int, is_strict: bool) -> st.SearchStrategy[slice]:
    lowest = -1 if is_strict else -n - 2
    steps = st.none() | st.integers(1, 4) | st.sampled_from([n + 1, 0, -1])
    return st.builds(slice, bounds(n, lowest), bounds(n, lowest), steps)


def inside(n: int) -> st.SearchStrategy[slice]:
    """Return slices that are valid for both libraries unless `n` is 0."""
    pairs = st.tuples(st.integers(0, max(n - 1, 0)), st.integers(0, n)).map(sorted)
    return st.builds(lambda pair, step: slice(*pair, step), pairs, st.none() | st.integers(1, n + 1))


def positions(n: int) -> st.SearchStrategy[Any]:
    numbers = st.lists(st.integers(-n, max(n - 1, 0)), max_size=4)
    masks = st.lists(st.booleans(), min_size=n, max_size=n) if n < 50 else numbers
    return st.one_of(
        numbers, numbers.map(lambda x: torch.tensor(x, dtype=torch.int64)), masks.map(torch.tensor)
    )


def items(n: int, is_strict: bool) -> st.SearchStrategy[Any]:
    ints = st.integers(-n, max(n - 1, 0))
    plain = [ints, ints.map(np.int64), inside(n), inside(n), st.just(slice(None))]
    odd = st.one_of(st.integers(-n - 1, n), slices(n, is_strict), st.none())
    rare = st.integers(0, 5).flatmap(lambda i: st.one_of(*plain) if i else odd)
    return rare if is_strict else st.one_of(*plain, slices(n, False), odd, positions(n))


@st.composite
def expressions(draw: Any, is_strict: bool) -> tuple[str, Any]:
    """Draw the name of a tensor and an index."""
    name = draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[name]
    n_items = draw(st.integers(0, len(shape)))
    index = [draw(items(n, is_strict)) for n in shape[:n_items]]
    if draw(st.integers(0, 9)) == 0:
        index.append(draw(st.sampled_from([0, slice(None), None])))
    if draw(st.integers(0, 2)) == 0:
        ellipsis_at = draw(st.integers(0, len(index)))
        dims = shape[len(shape) - len(index) + ellipsis_at :] if len(index) <= len(shape) else ()
        index = index[:ellipsis_at] + [...] + [draw(items(n, is_strict)) for n in dims]
    return name, index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index)


def crashes_safetensors(index: Any) -> bool:
    """Return whether a slice ends before it begins, for which safetensors panics: a documented difference."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, slice) and part.stop is not None and (part.start or 0) > part.stop for part in parts
    )


def read_slice(
    handles: dict[tuple[str, str], Any], library: Library, mode: str, name: str, index: Any
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(lambda: handles[library.name, mode].get_slice(name)[index])


def agree(theirs: Any, ours: Any) -> bool:
    if is_error(theirs):
        return isinstance(ours, type(theirs))
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        return theirs.shape == ours.shape and theirs.dtype == ours.dtype and same(bits(theirs), bits(ours))
    return same(theirs, ours)


@pytest.mark.parametrize("mode", ["pt", "np", "pt pread"])
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_random_slices(handles: dict[tuple[str, str], Any], mode: str, times: int) -> None:
    is_strict = mode != "pt"

    @settings(
        max_examples=(40 if is_strict else 120) * times, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(expression=expressions(is_strict=is_strict))
    @example(expression=("blocks", (slice(None), [3, -1], slice(None, None, 999))))
    def check(expression: tuple[str, Any]) -> None:
        name, index = expression
        assume(not (is_strict and crashes_safetensors(index)))
        theirs = read_slice(handles, SAFETENSORS, mode, name, index)
        ours = read_slice(handles, CKPTZ, mode, name, index)
        event(f"{mode}: {type(theirs).__name__}")
        assert agree(theirs, ours), f"{theirs!r}\n{ours!r}"

    check()
