"""Random nested states as torch saves them: containers, keys, leaves, tensors that share memory."""

import math
import pickle
import re
import struct
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

# Quantized dtypes are refused, and torch itself cannot save dtypes of less than a byte.
NOT_SAVED = re.compile(r"torch\.(q|u?int[1-7]$)")
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not NOT_SAVED.match(str(d))}, key=str
)


def is_untyped(dtype: Any) -> bool:
    """Return whether torch saves tensors of a dtype with an untyped storage, which dtypes may share."""
    return isinstance(torch.empty(0, dtype=dtype).__reduce_ex__(2)[1][0], torch.UntypedStorage)


UNTYPED = [torch.uint8, *filter(is_untyped, DTYPES)]
MAX_BYTES = 96


class UntypedPickler(pickle.Pickler):
    """A pickler that stores the dtype with each tensor, so that tensors of any dtypes can share memory.

    Gradients are left out: torch fails to load them in this form.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        layout = (value.storage_offset(), tuple(value.shape), value.stride(), False)
        rebuild = torch._utils._rebuild_tensor_v3  # torch has no public name
        return rebuild, (value.untyped_storage(), *layout, OrderedDict(), value.dtype, {})


def save_untyped(state: Any, path: Path) -> None:
    """Save a file that torch reads but never writes: tensors of several dtypes in one memory."""
    torch.save(state, path, pickle_module=SimpleNamespace(Pickler=UntypedPickler, __name__="untyped"))


# --- strategies -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A placeholder of tensor number `n` of the pool."""

    n: int


@st.composite
def tensors(draw: st.DrawFn, memory: Any, dtypes: list[Any]) -> Any:
    """Draw a view of `memory`: any shape, strides (also 0 and overlapping ones) and offset within it."""
    dtype = draw(st.sampled_from(dtypes))
    room = memory.nbytes() // dtype.itemsize
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    if draw(st.booleans()):
        strides = [math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape))]
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
    if span > room:
        shape, strides, span = [room], [1], room
    offset = draw(st.integers(0, room - span))
    tensor = torch.empty(0, dtype=dtype).set_(memory, offset, tuple(shape), tuple(strides))
    # torch cannot load tensors without a typed storage that need a gradient.
    is_real = (dtype.is_floating_point or dtype.is_complex) and dtype not in UNTYPED
    needs_grad = is_real and draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        return torch.nn.Parameter(tensor, needs_grad)
    return tensor.requires_grad_(needs_grad)


@st.composite
def pools(draw: st.DrawFn, *, mixed: bool = False) -> list[Any]:
    """Draw tensors in one to three memories; dtypes share one only if torch can save that, or if `mixed`."""
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        families = [DTYPES] if mixed else [UNTYPED, UNTYPED, *([dtype] for dtype in DTYPES)]
        dtypes = draw(st.sampled_from(families))
        n_bytes = draw(st.sampled_from([0, 0, 16, 48, MAX_BYTES]))
        bits = list(draw(st.binary(min_size=n_bytes, max_size=n_bytes)))
        bits = [byte % 2 for byte in bits] if torch.bool in dtypes else bits  # other bytes are no valid bool
        memory = torch.tensor(bits, dtype=torch.uint8).untyped_storage()
        drawn += draw(st.lists(tensors(memory, dtypes), min_size=1, max_size=3))
    return drawn


NAMES = ["a", "b", "a.b", "b~2", "a.b~2", "key", "", "0", "__metadata__", "__ckptz__.index"]
NAMES += ["\u00e9", "e\u0301", "\U0001f600", "\0"]
TEXT = st.sampled_from(NAMES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
SIZES = st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=3).map(torch.Size)
# torch reads no integers over 255 bytes, and no empty bytes, with weights_only=True.
HUGE = st.integers(-(2**70), 2**70) | st.sampled_from([2**2000, -(2**2000), 2**53, -(2**53), 2**63])
FLOATS = st.floats() | st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("<d", bits)[0])
SINGLES = st.none() | st.booleans() | st.binary(min_size=1, max_size=4) | st.sampled_from(DTYPES)
ATOMS = SINGLES | TEXT | FLOATS | SIZES
KEY_INTS = st.integers(-(2**64) + 1, 2**64 - 1) | st.integers(-2, 3)
KEY_ATOMS = TEXT | TEXT | KEY_INTS | ATOMS.filter(lambda value: value == value)
KEYS = KEY_ATOMS | st.lists(KEY_ATOMS, max_size=4).map(tuple)


def ordered(items: dict[Any, Any], metadata: Any) -> Any:
    """Return an OrderedDict, with the `_metadata` of a module's state if there is any."""
    state = OrderedDict(items)
    if metadata is not None:
        vars(state)["_metadata"] = metadata
    return state


def states(n_tensors: int) -> st.SearchStrategy[Any]:
    """Return a strategy for skeletons of states, in which a `Slot` stands for each tensor."""
    slots = st.integers(0, n_tensors - 1).map(Slot)

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(KEYS, inner, max_size=4)
        lists = st.lists(inner, max_size=4)
        return dicts | lists | lists.map(tuple) | st.builds(ordered, dicts, st.none() | inner)

    return st.recursive(slots | slots | ATOMS | HUGE, nested, max_leaves=12)


def filled(node: Any, pool: list[Any]) -> Any:
    """Return a copy of a skeleton with the tensors of the pool in place of slots."""
    if isinstance(node, Slot):
        return pool[node.n]
    if type(node) in (list, tuple):
        return type(node)(filled(item, pool) for item in node)
    if type(node) in (dict, OrderedDict):
        items = {key: filled(value, pool) for key, value in node.items()}
        if type(node) is OrderedDict:
            return ordered(items, filled(vars(node).get("_metadata"), pool))
        return items
    return node


@dataclass(frozen=True, repr=False)
class Drawn:
    """A dict of any values, and the tensors for its slots."""

    skeleton: dict[Any, Any]
    pool: list[Any]

    @property
    def state(self) -> dict[Any, Any]:
        return filled(self.skeleton, self.pool)

    def __repr__(self) -> str:  # torch cannot show tensors of every type
        return f"{self.skeleton} of {[describe(tensor) for tensor in self.pool]}"


def describe(tensor: Any) -> str:
    """Return dtype, geometry and memory of a tensor as text."""
    memory = tensor.untyped_storage()
    geometry = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
    kind = f"{type(tensor).__name__}{' with grad' * tensor.requires_grad}"
    return f"{kind}({tensor.dtype}, {geometry} in {memory.nbytes()} bytes at {memory.data_ptr():#x})"


@st.composite
def kept_states(draw: st.DrawFn, *, mixed: bool = False) -> Drawn:
    """Draw a state that can be saved as it is; each tensor of its pool is used at least once."""
    pool = draw(pools(mixed=mixed))
    skeleton = draw(st.dictionaries(KEYS, states(len(pool)), min_size=1, max_size=5))
    return Drawn(skeleton | {f"t{n}": Slot(n) for n in range(len(pool))}, pool)


@st.composite
def spoilt_states(draw: st.DrawFn, spoils: st.SearchStrategy[Any]) -> Drawn:
    """Draw a state with one value somewhere that cannot be saved."""
    drawn, spoilt = draw(kept_states()), draw(spoils)
    for wrap in draw(st.lists(st.sampled_from([list, tuple, dict, OrderedDict]), max_size=3)):
        spoilt = wrap([spoilt] if wrap in (list, tuple) else [("in", spoilt)])
    items = list(drawn.skeleton.items())
    items.insert(draw(st.integers(0, len(items))), ("spoilt", spoilt))
    return Drawn(dict(items), drawn.pool)


@st.composite
def dcp_states(draw: st.DrawFn) -> Drawn:
    """Draw a state as `torch.distributed.checkpoint` saves it: dicts with names, lists, values, tensors."""
    pool = draw(pools())
    slots = st.integers(0, len(pool) - 1).map(Slot)
    values = (
        slots | slots | SINGLES.filter(lambda value: type(value) not in (torch.dtype, bytes)) | FLOATS | TEXT
    )
    names = TEXT.filter(bool)
    nested = st.recursive(values, lambda inner: st.dictionaries(names, inner) | st.lists(inner), max_leaves=8)
    return Drawn(draw(st.dictionaries(names, nested, min_size=1, max_size=4)), pool)


# --- comparison -------------------------------------------------------------------------------------------


def bits_of(tensor: Any) -> bytes:
    """Return the bytes of the elements in C order."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    width = tensor.element_size()
    steps = [step * width for step in tensor.stride()]
    if not tensor.numel():
        return b""
    return np.ndarray(tensor.shape, f"V{width}", memory, tensor.storage_offset() * width, steps).tobytes()


def is_dense(tensor: Any) -> bool:
    """Return whether the elements fill their memory without gaps or overlap."""
    filled = 1
    for step, n in sorted(steps_of(tensor)):
        if step != filled:
            return False
        filled *= n
    return tensor.numel() > 0


def steps_of(tensor: Any) -> list[tuple[int, int]]:
    """Return (stride, size) of each dimension with more than one element."""
    return [(step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def form(value: Any, tensors_seen: list[Any]) -> Any:
    """Return a comparable form of a state without the addresses of tensors, which go to `tensors_seen`."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors_seen.append(value)
        return kind, value.dtype, value.shape, bits_of(value), value.requires_grad
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, Namespace):
        return kind, form(vars(value), tensors_seen)
    if isinstance(value, dict):
        items = [(form(key, tensors_seen), form(item, tensors_seen)) for key, item in value.items()]
        attributes = (
            getattr(value, "default_factory", None),
            form(getattr(value, "__dict__", None), tensors_seen),
        )
        return kind, items, attributes
    if kind in (list, tuple):
        return kind, [form(item, tensors_seen) for item in value]
    return kind, struct.pack("<d", value) if isinstance(value, float) else value


def place_of(tensor: Any) -> tuple[Any, ...]:
    """Return the place of a tensor in its memory; views at different places may have the same elements."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def reach(tensor: Any) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last; equal if it is empty."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum((n - 1) * step for n, step in steps) + 1 if tensor.numel() else 0
    return begin, begin + span * tensor.element_size()


def overlaps(tensors: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (number, number, distance of their first bytes) of all pairs of tensors whose memory overlaps."""
    ranges = [reach(tensor) for tensor in tensors]
    for i, (begin, end) in enumerate(ranges):
        for j, (other, last) in enumerate(ranges[:i]):
            if max(begin, other) < min(end, last):
                yield i, j, begin - other


def assert_same_state(actual: Any, expected: Any) -> None:
    """Require equal types, order of keys, values to the bit, flags, strides and shared memory."""
    actual_tensors: list[Any] = []
    expected_tensors: list[Any] = []
    assert form(actual, actual_tensors) == form(expected, expected_tensors)
    shared = list(overlaps(expected_tensors))
    assert list(overlaps(actual_tensors)) == shared
    seen_apart = {
        i for pair in shared if len({place_of(expected_tensors[i]) for i in pair[:2]}) == 2 for i in pair[:2]
    }
    for i, tensor in enumerate(expected_tensors):
        if is_dense(tensor) or i in seen_apart:
            assert steps_of(actual_tensors[i]) == steps_of(tensor)
