"""Every writer with every reader: dtype x shape x method x base x effort.

A tensor without a recorded error is bit-identical to the original; the others are within their recorded
errors. Every reader returns the same values.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptz
import ckptz.numpy
import ckptz.torch
from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy, KMeans
from ckptz.errors import DTypeError
from ckptz.format.dtypes import DTYPES, dtype_of
from ckptz.format.sources import PATTERN_TYPES
from ckptz.state.arrays import numpy_dtype
from ckptz.state.torch import stored_type, torch_dtype
from ckptz.store.resolve import open_checkpoint
from tests.support.cli_support import Row, Rows, content_of, write_plain
from tests.support.cli_support import ckptz as command

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
METHODS = {
    "lossless": LOSSLESS,
    "kmeans": KMeans(levels=4, min_elements=1),
    "pruned": KMeans(levels=8, prune=0.3, protect=0.01, min_elements=1),
    "grid": Grid(min_elements=1),
}
BASES = ("none", "plain", "lossless", "kmeans", "grid")
EFFORTS = ("fast", "default", "small")
# Bit patterns that arithmetic may change: NaN payloads, -0, infinities, subnormals.
SPECIAL = {
    "F32": [0x7FC00001, 0xFF800001, 0x80000000, 0x7F800000, 0x00000001],
    "BF16": [0x7FC1, 0xFF81, 0x8000, 0x7F80, 0x0001],
    "F16": [0x7E01, 0xFC01, 0x8000, 0x7C00, 0x0001],
}

# --- states -------------------------------------------------------------------------------------------


def values(dtype: str, n: int, kind: str, rng: np.random.Generator) -> bytes:
    """Return `n` values as bytes: normal weights, five repeated bytes, SPECIAL patterns, or random bits."""
    types = PATTERN_TYPES[DTYPES[dtype].pattern_bytes]
    if kind == "weights" and dtype == "BF16":
        return (rng.normal(0, 0.05, n).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    if kind == "weights" and dtype in FLOATS:
        return rng.normal(0, 0.05, n).astype(FLOATS[dtype]).tobytes()
    if kind == "special" and dtype in SPECIAL:
        return rng.choice(np.array(SPECIAL[dtype], types), n).tobytes()
    n_bytes = -(-n * DTYPES[dtype].bits // 8)
    raw: bytes = rng.integers(0, 2 if dtype == "BOOL" else 256, n_bytes, np.uint8).tobytes()
    return (raw[:5] * n_bytes)[:n_bytes] if kind == "few" else raw


@st.composite
def rows_of(draw: st.DrawFn) -> dict[str, Row]:
    """Draw tensors of all dtypes and shapes; dtypes of less than a byte have multiples of 8 values."""
    names = st.text(min_size=1, max_size=8).filter(str.isprintable)
    rows = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)) | st.sampled_from(["F32", "BF16"]))]
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 5, 24, 70]), max_size=3))
        if dtype.bits % 8:
            shape = [8, *shape]
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        kind = draw(st.sampled_from(["weights", "weights", "special", "few", "any"]))
        rows[name] = (dtype.name, tuple(shape), values(dtype.name, math.prod(shape), kind, rng))
    return rows


def changed(rows: Rows, kind: int) -> dict[str, Row]:
    """Return tensors a step later, with patterns that grow by at most 0, 1, 2, 9 or 255 for `kind` 0 to 4."""
    rows_after = {}
    for name, (dtype, shape, data) in rows.items():
        flat = np.frombuffer(data, PATTERN_TYPES[DTYPES[dtype].pattern_bytes])
        rng, most = np.random.default_rng(kind), (0, 1, 2, 9, 255)[kind]
        change = rng.integers(0, most + 1, flat.size).astype(flat.dtype)
        rows_after[name] = (dtype, shape, (flat ^ change & 1 if dtype == "BOOL" else flat + change).tobytes())
    return rows_after


# --- writers and readers --------------------------------------------------------------------------------


def tensor_of(row: Row) -> torch.Tensor:
    dtype, shape, data = row
    raw = torch.tensor(np.frombuffer(bytearray(data), np.uint8))
    return raw.view(torch_dtype(dtype_of(dtype))).reshape(shape)


def row_of(dtype: str, shape: Any, value: Any) -> Row:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return dtype, tuple(shape), value.tobytes()


def in_torch(rows: Rows) -> dict[str, torch.Tensor]:
    return {name: tensor_of(row) for name, row in rows.items()}


def in_numpy(rows: Rows) -> dict[str, Any]:
    return {
        name: np.frombuffer(data, numpy_dtype(dtype_of(dtype))).reshape(shape)
        for name, (dtype, shape, data) in rows.items()
    }


def by_verb(rows: Rows, path: Path, **options: Any) -> None:
    plain = write_plain(path.with_suffix(".safetensors"), rows, {"step": "7", "user": "ü\n"})
    ckptz.compress(plain, path, force=True, **options)


def by_command(rows: Rows, path: Path, *, base: Path | None, effort: str, jobs: int, **options: Any) -> None:
    if options["config"] is not LOSSLESS:
        by_verb(rows, path, base=base, effort=effort, jobs=jobs, **options)
        return
    plain = write_plain(path.with_suffix(".safetensors"), rows, {"step": "7"})
    against = () if base is None else ("--base", base)
    command("compress", plain, "-o", path, *against, "--effort", effort, "--jobs", jobs, "--force")


def as_bytes(rows: Rows, path: Path, *, base: Path | None, **options: Any) -> None:
    del base  # `save` has no base
    path.write_bytes(ckptz.torch.save(in_torch(rows), {"user": "ü\n"}, **options))


WRITERS: dict[str, Callable[..., None]] = {
    "verb": by_verb,
    "command": by_command,
    "torch": lambda rows, path, **options: ckptz.torch.save_file(in_torch(rows), path, {"a": "b"}, **options),
    "numpy": lambda rows, path, **options: ckptz.numpy.save_file(in_numpy(rows), path, {"a": "b"}, **options),
    "bytes": as_bytes,
}


def sliced(path: Path, framework: str) -> dict[str, Row]:
    """Read each tensor as two slices of its first axis, and join them."""
    rows = {}
    with ckptz.safe_open(path, framework) as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            shape, dtype = part.get_shape(), part.get_dtype()
            half = shape[0] // 2 if shape else 0
            # Empty strict slices are errors.
            parts = [part[:half], part[half:]] if half and math.prod(shape) else [file.get_tensor(name)]
            rows[name] = (dtype, tuple(shape), b"".join(row_of(dtype, (), piece)[2] for piece in parts))
    return rows


def restored(path: Path, *options: object) -> dict[str, Row]:
    back = path.with_name("back.safetensors")
    command("restore", path, "-o", back, "--force", *options)
    return dict(content_of(back)[0])


def rebased(path: Path) -> dict[str, Row]:
    ckptz.rebase(path, path.with_name("alone.ckptz"), force=True)
    folder = path.with_name("elsewhere")
    folder.mkdir(exist_ok=True)
    return dict(content_of((path.with_name("alone.ckptz")).rename(folder / "alone.ckptz"))[0])


def loaded(load: Callable[[], dict[str, Any]], path: Path) -> dict[str, Row]:
    """Read with a function that strips the prefix "model." from the names of a Checkpointer."""
    kinds = {name: row[:2] for name, row in content_of(path)[0]}
    tensors = {name if name in kinds else f"model.{name}": value for name, value in load().items()}
    return {name: row_of(*kinds[name], value) for name, value in tensors.items()}


ANY_TYPE: dict[str, Callable[[Path], dict[str, Row]]] = {"restore": restored, "rebase": rebased}
READERS: dict[str, Callable[[Path], dict[str, Row]]] = ANY_TYPE | {
    "torch": lambda path: loaded(lambda: ckptz.torch.load_file(path), path),
    "torch, pread": lambda path: loaded(lambda: ckptz.torch.load_file(path, backend="pread"), path),
    "numpy": lambda path: loaded(lambda: ckptz.numpy.load_file(path), path),
    "torch slices": lambda path: sliced(path, "pt"),
    "numpy slices": lambda path: sliced(path, "np"),
}


def is_loadable(row: Row) -> bool:
    """Return whether PyTorch and numpy have the dtype, with one element per value."""
    try:
        return bool(torch_dtype(dtype_of(row[0])) and numpy_dtype(dtype_of(row[0]))) and row[0] != "F4"
    except DTypeError:
        return False


# --- properties -------------------------------------------------------------------------------------------


def recorded_errors(path: Path) -> Iterator[tuple[str, float | None]]:
    with contextlib.closing(open_checkpoint(path)) as opened:
        for entry in opened.container.index.tensors:
            yield entry.name, None if entry.lossy is None else float(entry.lossy.max_abs_error)


def as_float64(row: Row) -> Any:
    dtype, _, data = row
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, FLOATS[dtype]).astype(np.float64)


def check(path: Path, rows: Rows, readers: dict[str, Callable[[Path], dict[str, Row]]]) -> None:
    restored_rows = dict(content_of(path)[0])
    assert {name: row[:2] for name, row in restored_rows.items()} == {
        name: row[:2] for name, row in rows.items()
    }
    for name, limit in recorded_errors(path):
        if limit is None:
            assert restored_rows[name] == rows[name], name
        else:
            assert np.abs(as_float64(restored_rows[name]) - as_float64(rows[name])).max() <= limit, name
    for reader, read in readers.items():
        assert read(path) == restored_rows, reader


ANY = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
N_EXAMPLES = pytest.mark.parametrize("n", [15, pytest.param(1000, marks=pytest.mark.slow)])


@N_EXAMPLES
@pytest.mark.parametrize("writer", WRITERS)
def test_every_reader_reads_the_files_of_every_writer(writer: str, n: int) -> None:
    @settings(max_examples=n, **ANY)
    @given(
        rows=rows_of(),
        change=st.integers(0, 4),
        method=st.sampled_from(sorted(METHODS)),
        base=st.sampled_from(BASES),
        effort=st.sampled_from(EFFORTS),
        jobs=st.integers(1, 2),
    )
    def every_reader(rows: Rows, change: int, method: str, base: str, effort: str, jobs: int) -> None:
        if writer not in ("verb", "command"):
            rows = {name: row for name, row in rows.items() if is_loadable(row)}
        new, base_path = changed(rows, change), None
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if base != "none":
                base_path = write_plain(folder / "step-1.safetensors", rows)
            if base_path is not None and base in METHODS:
                ckptz.compress(base_path, folder / "step-1.ckptz", config=METHODS[base])
                base_path.unlink()
                base_path = folder / "step-1.ckptz"
            path = folder / "step-2.ckptz"
            WRITERS[writer](new, path, base=base_path, config=METHODS[method], effort=effort, jobs=jobs)
            check(path, new, READERS if all(map(is_loadable, rows.values())) else ANY_TYPE)
            if writer in ("verb", "command") and method == "lossless":
                restored(path, "--jobs", jobs)
                original = path.with_suffix(".safetensors").read_bytes()
                assert (folder / "back.safetensors").read_bytes() == original

    every_reader()


class Model(torch.nn.Module):
    """A model of arbitrary tensors; those of floating point are parameters, the others buffers."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        for i, tensor in enumerate(in_torch(rows).values()):
            if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                self.register_parameter(f"weight{i}", torch.nn.Parameter(tensor))
            else:
                self.register_buffer(f"buffer{i}", tensor)

    def rows(self) -> dict[str, Row]:
        return {
            f"model.{name}": row_of(dtype_of_tensor(tensor), tensor.shape, tensor)
            for name, tensor in self.state_dict().items()
        }


def dtype_of_tensor(tensor: torch.Tensor) -> str:
    return stored_type("", tensor)[0].name


@N_EXAMPLES
def test_every_reader_reads_the_files_of_a_checkpointer(n: int) -> None:
    @settings(max_examples=n, **ANY)
    @given(
        rows=rows_of(),
        change=st.integers(0, 4),
        method=st.sampled_from(sorted(METHODS)),
        full_every=st.integers(1, 2),
        effort=st.sampled_from(EFFORTS),
    )
    def every_reader(rows: Rows, change: int, method: str, full_every: int, effort: Any) -> None:
        rows = {name: row for name, row in rows.items() if is_loadable(row)}
        first, second = Model(rows), Model(changed(rows, change))
        options: dict[str, Any] = {"config": METHODS[method], "full_every": full_every, "effort": effort}
        with tempfile.TemporaryDirectory() as name:
            folder, keep = Path(name) / "run", KeepPolicy(last=None)
            with Checkpointer(folder, first, background=False, keep=keep, jobs=1, **options) as checkpointer:
                checkpointer.save(1)
                checkpointer.model = second
                checkpointer.save(2)
            for step, model in ((1, first), (2, second)):
                check(folder / f"step-{step:08}.ckptz", model.rows(), READERS)
            back = Model(rows)
            with Checkpointer(folder, back) as checkpointer:
                assert checkpointer.restore_latest() == 2
            assert back.rows() == second.rows()
            assert restored_step(folder, 2) == second.rows()

    every_reader()


def restored_step(folder: Path, step: int) -> dict[str, Row]:
    command("restore", f"{folder}@{step}", "-o", folder.parent / "back.safetensors", "--to", "safetensors")
    return dict(content_of(folder.parent / "back.safetensors")[0])
