"""Hand-made checkpoints, command lines that run in this process, and what files restore to."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from ckptz.foreign.inputs import Input, open_input
from ckptz.format.sources import CHUNK_VALUES
from ckptz.kernels.cache import NOTICE
from ckptz_cli.main import main
from tests.support.spec_files import CONSTANT, File, Frame, plan

Row = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
Rows = Mapping[str, Row]

NAN_PAYLOADS = np.array([0x7FC00001, 0xFF800123, 0x80000000, 0x7F800000], "<u4")


@dataclass(frozen=True)
class Chain:
    """Two checkpoints of a run: plain files, and a full file with a delta in the same folder."""

    folder: Path

    @property
    def first(self) -> Path:
        return self.folder / "step-1.safetensors"

    @property
    def second(self) -> Path:
        return self.folder / "step-2.safetensors"

    @property
    def full(self) -> Path:
        return self.folder / "step-1.ckptz"

    @property
    def delta(self) -> Path:
        return self.folder / "step-2.ckptz"


@dataclass(frozen=True)
class Run:
    """Exit code and output of a command line, without the notice about compiled kernels."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The only line of standard error, which is an error message."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("ckptz: ")
        return lines[0]

    @property
    def json(self) -> Any:
        """The JSON value on standard output."""
        return json.loads(self.stdout)


def ckptz(*args: object, fails: bool = False) -> Run:
    """Run a command line in this process, and require exit code 0, or another one if `fails`."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    stderr = "".join(line for line in result.stderr.splitlines(True) if NOTICE not in line)
    assert (result.exit_code != 0) == fails, result.output
    return Run(result.exit_code, result.stdout, stderr)


Stream = int | str | Path | None  # a descriptor, a path to open, or None for a closed stream


def forked(
    *arguments: object,
    stdin: Stream = os.devnull,
    stdout: Stream = "",
    stderr: Stream = "",
    before: Callable[[], object] = lambda: None,
) -> subprocess.CompletedProcess[str]:
    """Run a command line in a fork of this process with its own streams, which saves loading modules again.

    The output of streams that are not redirected is returned. `before` is called first in the fork.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        outputs = (out.fileno() if stdout == "" else stdout, err.fileno() if stderr == "" else stderr)
        child = os.fork()
        if child == 0:
            os._exit(_in_fork(arguments, (stdin, *outputs), before))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read().decode(), err.read().decode())


def _in_fork(arguments: Iterable[object], streams: Iterable[Stream], before: Callable[[], object]) -> int:
    """Set up the standard streams as a new interpreter does, run the command, and return the exit code."""
    sys.stdin, sys.stdout, sys.stderr = (_redirect(number, stream) for number, stream in enumerate(streams))
    code: Any = 1
    try:
        before()
        main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        return 120  # as the interpreter does
    return int(code)


def _redirect(number: int, stream: Stream) -> Any:
    """Redirect a standard stream, and return it as a text stream, or None if it is closed."""
    if stream is None:
        os.close(number)
        return None
    if isinstance(stream, str | Path):
        stream = os.open(stream, os.O_WRONLY if number else os.O_RDONLY)
    os.dup2(stream, number)
    return open(number, "w" if number else "r", buffering=1 if number == 2 else -1, closefd=False)


def sets(**settings: object) -> list[str]:
    """Return `--set` options for settings of a method."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def plain_bytes(rows: Rows, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file, written from its specification."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, data) in rows.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in rows.values())


def write_plain(path: Path, rows: Rows, metadata: Mapping[str, str] | None = None) -> Path:
    """Write the bytes of `plain_bytes` to a file."""
    path.write_bytes(plain_bytes(rows, metadata))
    return path


def hf_folder(folder: Path) -> Path:
    """Write a folder as Hugging Face libraries do: two shards, their index, and two other files."""
    (folder / "sub").mkdir(parents=True)
    state = a_state(n=200)
    homes = {name: f"model-0000{1 + (i > 3)}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(homes.values()):
        rows = {name: row for name, row in state.items() if homes[name] == file}
        write_plain(folder / file, rows, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}, indent=1))
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "vocab.txt").write_text("a b c")
    return folder


def bf16(values: np.ndarray) -> np.ndarray:
    """Return the BF16 patterns of F32 values, rounded towards zero."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def a_state(seed: int = 0, drift: float = 0.0, n: int = 3000) -> dict[str, Row]:
    """Return tensors of many dtypes; `drift` changes the weights a little, as training does."""
    rng = np.random.default_rng(seed)
    changes = np.random.default_rng(1000 + int(1e6 * drift))
    weights = rng.normal(0, 0.05, n)
    weights = weights + drift * changes.normal(0, 0.05, n)
    sparse = np.where(rng.random(n) < 0.01, rng.integers(1, 99, n), 0)
    return {
        "layer.weight": ("F32", (n // 50, 50), weights.astype("<f4").tobytes()),
        "layer.half": ("BF16", (n,), bf16(weights).tobytes()),
        "layer.double": ("F64", (n // 10,), weights[: n // 10].astype("<f8").tobytes()),
        "sparse": ("U8", (n,), sparse.astype("u1").tobytes()),
        "counts": ("I64", (3, 4), np.arange(12, dtype="<i8").tobytes()),
        "scalar": ("F16", (), np.float16(1.5).tobytes()),
        "empty": ("F32", (0, 7), b""),
        "odd": ("F32", (4,), NAN_PAYLOADS.tobytes()),
        "zeros": ("I32", (n,), bytes(4 * n)),
    }


def relative_error(restored: np.ndarray, original: np.ndarray) -> float:
    """Return the norm of the error divided by the norm of the original."""
    return float(np.linalg.norm(restored - original) / np.linalg.norm(original))


def tensors_in(path: Path) -> dict[str, Any]:
    """Return what `ckptz inspect --json` reports of each tensor of a file, by name."""
    return {tensor["name"]: tensor for tensor in ckptz("inspect", path, "--json").json["tensors"]}


Content = tuple[list[tuple[str, Row]], dict[str, str] | None]


def content_of(path: Path) -> Content:
    """Return all that a file must restore: its tensors in order with their bytes, and its metadata."""
    with contextlib.closing(open_input(path)) as opened:
        return _content(opened)


def _content(opened: Input) -> Content:
    rows = []
    for name, source in opened.tensors.items():
        patterns = source.patterns(0, source.dtype.n_patterns(source.shape))
        rows.append((name, (source.dtype.name, tuple(source.shape), patterns.tobytes())))
    return rows, None if opened.metadata is None else dict(opened.metadata)


def forge(path: Path, target: Path, edit: Callable[[Any], Any]) -> Path:
    """Copy a `.ckptz` file with an index changed by `edit`, and a matching digest."""
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    begin, end = (8 + n_header + at for at in header["__ckptz__.index"]["data_offsets"])
    index = edit(json.loads(zlib.decompress(raw[begin + 1 : end])))
    packed = b"\x01" + zlib.compress(json.dumps(index).encode())
    return write_index(target, header, raw[8 + n_header : begin], packed)


def write_index(target: Path, header: dict[str, Any], frames: bytes, packed: bytes) -> Path:
    """Write a `.ckptz` file of frames and any packed index."""
    at = len(frames)
    blob = {"dtype": "U8", "shape": [len(packed)], "data_offsets": [at, at + len(packed)]}
    metadata = header["__metadata__"] | {"ckptz.index_sha256": hashlib.sha256(packed).hexdigest()}
    text = json.dumps(header | {"__metadata__": metadata, "__ckptz__.index": blob}).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + frames + packed)
    return target


def temporaries(folder: Path) -> list[Path]:
    """List the temporary files that an interrupted write left in a folder."""
    return sorted(folder.rglob("*.ckptz-tmp"))


def spread(n: int, most: int) -> Iterable[int]:
    """Return at most `most` of the numbers 0..n-1, evenly spaced, with the first and the last."""
    return sorted({round(i * (n - 1) / (most - 1)) for i in range(most)}) if n > most else range(n)


def bomb(path: Path, n_chunks: int) -> Path:
    """Write a valid file with one tensor of zeros: each 22 bytes decode to a MiB."""
    shape = (n_chunks, CHUNK_VALUES)
    frame = Frame(plan(shape=shape), [(CONSTANT, b"\0")], bytes(CHUNK_VALUES), "U8", shape, n_chunks)
    path.write_bytes(File({"zeros": frame}).bytes())
    return path


def flipped(data: bytes, bits: Iterable[int]) -> Iterator[bytes]:
    """Yield copies of `data` with one bit flipped each."""
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def regions_of(raw: bytes) -> dict[str, range]:
    """Return the bit positions of the header, the first frame's header, the streams and the index."""
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    index = header["__ckptz__.index"]["data_offsets"][0] + begin
    n_frame = int.from_bytes(raw[begin : begin + 4], "little")
    return {
        "header": range(8 * begin),
        "frame header": range(8 * begin, 8 * (begin + n_frame)),
        "payload": range(8 * (begin + n_frame), 8 * index),
        "index": range(8 * index, 8 * len(raw)),
    }
