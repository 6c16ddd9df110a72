"""Shared code of the tests of weight sync: states that change a little, and their comparison."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptz.codec.lossless import Lossless
from ckptz.sync import Publisher
from ckptz.torch import save_file

SPARSE = Lossless(sparse=True)
State = dict[str, torch.Tensor]
Array = np.ndarray[Any, Any]
N = 3000

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def a_state(seed: int = 0, n: int = N) -> State:
    """Return one tensor of each dtype that a training state may have, and some of odd shapes."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(n, generator=generator)
    state = {str(dtype).removeprefix("torch."): (raw * 20).to(dtype).reshape(-1, 10) for dtype in DTYPES}
    return state | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 7), "frozen": torch.ones(n)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def cloned(state: Mapping[str, torch.Tensor]) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two states have the same names and bits."""
    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def moved(state: State, seed: int, share: float = 0.02) -> State:
    """Copy a state with another bit in a share of the elements; "frozen" is not changed."""
    rng = np.random.default_rng(seed)
    out = cloned(state)
    for name, tensor in out.items():
        if name == "frozen" or not tensor.numel():
            continue
        patterns = bits(tensor).numpy().reshape(tensor.numel(), -1)
        positions = np.flatnonzero(rng.random(len(patterns)) < share)
        flipped = 1 if tensor.dtype == torch.bool else 1 << rng.integers(0, 3)
        patterns[positions, 0] ^= np.uint8(flipped)
        out[name] = torch.from_numpy(patterns).reshape(-1).view(tensor.dtype).reshape(tensor.shape)
    return out


def a_pair(folder: Path, share: float = 0.02) -> tuple[State, State, Path]:
    """Two states, the file of the first, and the delta between them, in one folder."""
    first = a_state()
    second = moved(first, 1, share)
    save_file(first, folder / "first.ckptz")
    save_file(second, folder / "second.ckptz", base=folder / "first.ckptz", config=SPARSE)
    return first, second, folder / "second.ckptz"


@contextmanager
def untouched(state: State) -> Iterator[None]:
    """Require that the block raises an error and leaves every bit of the state unchanged."""
    before = cloned(state)
    yield
    assert same(before, state)


def refused(error: type[Exception], match: str) -> Any:
    """Require that the block raises an error whose message is one line."""
    return pytest.raises(error, match=rf"(?s)\A(?=[^\n]*\Z).*{match}")


def published(
    folder: str | Path, n_steps: int, first: int = 0, state: State | None = None, **options: Any
) -> list[State]:
    """Publish a run of `n_steps` steps in a folder, and return the state of each."""
    publisher, states = Publisher(folder, **options), [state or a_state()]
    for step in range(first, first + n_steps):
        if step > first:
            states.append(moved(states[-1], step))
        publisher.publish(states[-1], step)
    return states


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
