"""Nested states as torch saves them, drawn at random: containers, keys, leaves, tensors that share memory."""

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

# Quantized ones are refused, and those of less than a byte torch itself cannot save.
NOT_SAVED = re.compile(r"torch\.(q|u?int[1-7]$)")
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not NOT_SAVED.match(str(d))}, key=str
)


def is_untyped(dtype: Any) -> bool:
    """Whether torch saves tensors of this type without their memory's type, so that types may share one."""
    return isinstance(torch.empty(0, dtype=dtype).__reduce_ex__(2)[1][0], torch.UntypedStorage)


UNTYPED = [torch.uint8, *filter(is_untyped, DTYPES)]
MAX_BYTES = 96


class UntypedPickler(pickle.Pickler):
    """Writes tensors in the form that names their own types, so that any types can share memory.

    Gradients are left out: torch fails to load them in this form.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        place = (value.storage_offset(), tuple(value.shape), value.stride(), False)
        rebuild = torch._utils._rebuild_tensor_v3  # torch has no public name
        return rebuild, (value.untyped_storage(), *place, OrderedDict(), value.dtype, {})


def save_untyped(state: Any, path: Path) -> None:
    """A file that torch reads and never writes: tensors of several types in one memory."""
    torch.save(state, path, pickle_module=SimpleNamespace(Pickler=UntypedPickler, __name__="untyped"))


# --- drawing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where tensor number `n` of the pool goes."""

    n: int


@st.composite
def tensors(draw: st.DrawFn, memory: Any, dtypes: list[Any]) -> Any:
    """A window into `memory`: any shape, strides (0 and overlapping ones too) and offset that stay within."""
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
    made = torch.empty(0, dtype=dtype).set_(memory, offset, tuple(shape), tuple(strides))
    # torch cannot load tensors without a typed storage that need a gradient.
    is_real = (dtype.is_floating_point or dtype.is_complex) and dtype not in UNTYPED
    needs_grad = is_real and draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        return torch.nn.Parameter(made, needs_grad)
    return made.requires_grad_(needs_grad)


@st.composite
def pools(draw: st.DrawFn, *, mixed: bool = False) -> list[Any]:
    """Tensors in one to three memories; types share one only where torch can save that, or if `mixed`."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        families = [DTYPES] if mixed else [UNTYPED, UNTYPED, *([dtype] for dtype in DTYPES)]
        dtypes = draw(st.sampled_from(families))
        n_bytes = draw(st.sampled_from([0, 0, 16, 48, MAX_BYTES]))
        bits = list(draw(st.binary(min_size=n_bytes, max_size=n_bytes)))
        bits = [byte % 2 for byte in bits] if torch.bool in dtypes else bits  # others are no bool
        memory = torch.tensor(bits, dtype=torch.uint8).untyped_storage()
        found += draw(st.lists(tensors(memory, dtypes), min_size=1, max_size=3))
    return found


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
    """An OrderedDict, with the attribute of a module's state if there is one."""
    made = OrderedDict(items)
    if metadata is not None:
        vars(made)["_metadata"] = metadata
    return made


def states(n_tensors: int) -> st.SearchStrategy[Any]:
    """Skeletons of states; a `Slot` stands for each tensor."""
    slots = st.integers(0, n_tensors - 1).map(Slot)

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(KEYS, inner, max_size=4)
        lists = st.lists(inner, max_size=4)
        return dicts | lists | lists.map(tuple) | st.builds(ordered, dicts, st.none() | inner)

    return st.recursive(slots | slots | ATOMS | HUGE, nested, max_leaves=12)


def filled(node: Any, pool: list[Any]) -> Any:
    """The state of a skeleton."""
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
    """A dict of any values, and the tensors that stand for its slots."""

    skeleton: dict[Any, Any]
    pool: list[Any]

    @property
    def state(self) -> dict[Any, Any]:
        return filled(self.skeleton, self.pool)

    def __repr__(self) -> str:  # torch cannot show tensors of every type
        return f"{self.skeleton} of {[describe(tensor) for tensor in self.pool]}"


def describe(tensor: Any) -> str:
    """Type, geometry and memory of a tensor."""
    memory = tensor.untyped_storage()
    geometry = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
    kind = f"{type(tensor).__name__}{' with grad' * tensor.requires_grad}"
    return f"{kind}({tensor.dtype}, {geometry} in {memory.nbytes()} bytes at {memory.data_ptr():#x})"


@st.composite
def kept_states(draw: st.DrawFn, *, mixed: bool = False) -> Drawn:
    """A state of which everything can be kept; each of its tensors is used once or more."""
    pool = draw(pools(mixed=mixed))
    skeleton = draw(st.dictionaries(KEYS, states(len(pool)), min_size=1, max_size=5))
    return Drawn(skeleton | {f"t{n}": Slot(n) for n in range(len(pool))}, pool)


@st.composite
def spoilt_states(draw: st.DrawFn, spoils: st.SearchStrategy[Any]) -> Drawn:
    """A state with one value somewhere that cannot be kept."""
    drawn, spoilt = draw(kept_states()), draw(spoils)
    for wrap in draw(st.lists(st.sampled_from([list, tuple, dict, OrderedDict]), max_size=3)):
        spoilt = wrap([spoilt] if wrap in (list, tuple) else [("in", spoilt)])
    items = list(drawn.skeleton.items())
    items.insert(draw(st.integers(0, len(items))), ("spoilt", spoilt))
    return Drawn(dict(items), drawn.pool)


@st.composite
def dcp_states(draw: st.DrawFn) -> Drawn:
    """A state as `torch.distributed.checkpoint` saves it: dicts with names, lists, values, tensors."""
    pool = draw(pools())
    slots = st.integers(0, len(pool) - 1).map(Slot)
    values = (
        slots | slots | SINGLES.filter(lambda value: type(value) not in (torch.dtype, bytes)) | FLOATS | TEXT
    )
    names = TEXT.filter(bool)
    nested = st.recursive(values, lambda inner: st.dictionaries(names, inner) | st.lists(inner), max_leaves=8)
    return Drawn(draw(st.dictionaries(names, nested, min_size=1, max_size=4)), pool)


# --- comparing --------------------------------------------------------------------------------------------


def bits_of(tensor: Any) -> bytes:
    """The elements in C order, bit for bit."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    width = tensor.element_size()
    steps = [step * width for step in tensor.stride()]
    if not tensor.numel():
        return b""
    return np.ndarray(tensor.shape, f"V{width}", memory, tensor.storage_offset() * width, steps).tobytes()


def is_dense(tensor: Any) -> bool:
    """Whether the elements fill their memory without gaps or overlap."""
    filled = 1
    for step, n in sorted(steps_of(tensor)):
        if step != filled:
            return False
        filled *= n
    return tensor.numel() > 0


def steps_of(tensor: Any) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that have one."""
    return [(step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def form(value: Any, found: list[Any]) -> Any:
    """What two equal states have in common, tensors' places in memory aside; adds its tensors to `found`."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        found.append(value)
        return kind, value.dtype, value.shape, bits_of(value), value.requires_grad
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, Namespace):
        return kind, form(vars(value), found)
    if isinstance(value, dict):
        items = [(form(key, found), form(item, found)) for key, item in value.items()]
        more = getattr(value, "default_factory", None), form(getattr(value, "__dict__", None), found)
        return kind, items, more
    if kind in (list, tuple):
        return kind, [form(item, found) for item in value]
    return kind, struct.pack("<d", value) if isinstance(value, float) else value


def place_of(tensor: Any) -> tuple[Any, ...]:
    """Where a tensor lies in its memory; two of different places may show the same elements."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def reach(tensor: Any) -> tuple[int, int]:
    """First byte in memory, and the byte after the last one; the same twice if there is none."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum((n - 1) * step for n, step in steps) + 1 if tensor.numel() else 0
    return begin, begin + span * tensor.element_size()


def overlaps(found: list[Any]) -> Iterator[tuple[int, int, int]]:
    """(number, number, bytes between their beginnings) of all tensors that lie in the same memory."""
    places = [reach(tensor) for tensor in found]
    for i, (begin, end) in enumerate(places):
        for j, (other, last) in enumerate(places[:i]):
            if max(begin, other) < min(end, last):
                yield i, j, begin - other


def assert_same_state(actual: Any, expected: Any) -> None:
    """Hold types, keys and their order, values to the bit, flags, strides, and who shares memory, equal."""
    found: list[Any] = []
    wanted: list[Any] = []
    assert form(actual, found) == form(expected, wanted)
    shared = list(overlaps(wanted))
    assert list(overlaps(found)) == shared
    seen_apart = {i for pair in shared if len({place_of(wanted[i]) for i in pair[:2]}) == 2 for i in pair[:2]}
    for i, tensor in enumerate(wanted):
        if is_dense(tensor) or i in seen_apart:
            assert steps_of(found[i]) == steps_of(tensor)
