"""Other compressors, run by a worker process in a separate virtual environment.

`Peers` creates bench/.cache/peers-venv with pinned versions on first use, runs this module in it, and sends
requests over a pipe. The worker keeps the inputs and times its own calls, so that the caller can alternate
between ckptz and the peers. The peers import numpy, torch and other packages from the caller's environment
through a .pth file, because a second copy of torch takes two gigabytes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from bench.core.measure import BENCH, CACHE

PINS: Final = (
    *("zipnn==0.5.4", "z4ai==0.2.0", "openzl==0.3.0", "bigsmall==4.0.0", "lmzip==1.3.0"),
    "moonclip==0.3.1",
)
# Packages that BigSmall imports and that the caller's environment does not have.
BIGSMALL_PINS: Final = (
    *("blosc2==4.14.1", "constriction==0.5.0", "ndindex==1.10.1", "msgpack==1.2.4", "numexpr==2.14.2"),
    *("tqdm==4.70.1", "httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0", "anyio==4.16.0", "idna", "certifi"),
    "huggingface-hub==2.4.0",
)

Array = NDArray[Any]


# --- the caller's side --------------------------------------------------------------------------


def environment() -> Path:
    """Return the interpreter of the environment, which is created if it is missing or has other pins."""
    folder = CACHE / "peers-venv"
    python, stamp = folder / "bin" / "python", folder / "pins.txt"
    wanted = "\n".join((*PINS, *BIGSMALL_PINS, sys.version))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making {folder} with {', '.join(PINS)}", file=sys.stderr)
    venv.EnvBuilder(clear=True, with_pip=True).create(folder)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", *PINS, *BIGSMALL_PINS], check=True
    )
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "caller.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    stamp.write_text(wanted)
    return python


class Peers:
    """A worker process in the environment of the peers; use it in a `with` block."""

    def __init__(self) -> None:
        command = [environment(), "-m", "bench.core.peers"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=BENCH.parent, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, method: str, **arguments: object) -> Any:
        """Call a method of the worker and return its result.

        Raises:
            RuntimeError: the worker ended; its error is on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended during {method!r}; its error is printed above")
        return json.loads(answer)

    def versions(self) -> dict[str, str]:
        """Return the version of each peer; z4ai is marked if its compiled coder is missing."""
        return self.ask("versions")  # type: ignore[no-any-return]

    def load(self, name: str, array: Array) -> None:
        """Send an input array to the worker, which keeps it by name."""
        with tempfile.NamedTemporaryFile(prefix="ckptz-peers-", suffix=".npy") as file:
            np.save(file, array)
            file.flush()
            self.ask("load", name=name, path=file.name)

    def compress(self, tool: str, name: str, **options: object) -> tuple[float, int]:
        """Compress input `name` and return (seconds, bytes); the worker keeps the compressed data."""
        seconds, n_bytes = self.ask("compress", tool=tool, name=name, options=options)
        return seconds, n_bytes

    def decompress(self, tool: str, name: str, **options: object) -> float:
        """Decompress the last result of `compress` and return the seconds; the worker checks the values."""
        return self.ask("decompress", tool=tool, name=name, options=options)  # type: ignore[no-any-return]

    def bigsmall_bytes(self, source: Path) -> int:
        """Return the bytes of a safetensors file compressed by BigSmall; the worker checks the round trip."""
        return self.ask("bigsmall_bytes", source=str(source))  # type: ignore[no-any-return]

    def lmzip(self, source: Path) -> tuple[float, float, int]:
        """Return CPU seconds of lmzip to pack and to unpack a file on one thread, and the packed bytes."""
        return tuple(self.ask("lmzip", source=str(source)))  # type: ignore[return-value]

    def moonclip(self, before: Path, after: Path) -> list[tuple[float, float, int]]:
        """Return CPU seconds of moonclip to save and to load each of two states on one thread, and its bytes.

        The states are the tensors of two safetensors files; the second is saved as a delta to the first.
        """
        return [tuple(row) for row in self.ask("moonclip", before=str(before), after=str(after))]

    def pack_file(self, source: Path, target: Path) -> None:
        """Compress a safetensors file tensor by tensor, as the command-line script of ZipNN does."""
        self.ask("pack_file", source=str(source), target=str(target))

    def load_file(self, path: Path, source: Path) -> float:
        """Return the seconds of ZipNN's loader for all tensors of a file; the worker compares the values."""
        return self.ask("load_file", path=str(path), source=str(source))  # type: ignore[no-any-return]


# --- the worker's side, inside the peers' environment -------------------------------------------


class _ZipNN:
    """One blob of `dtype` ("float32", "bfloat16"), timed in CPU seconds, which other programs affect less."""

    def compress(self, data: Array, dtype: str, threads: int) -> tuple[float, Any, int]:
        import zipnn  # only installed in the peers' environment

        coder = zipnn.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=threads)
        source = bytearray(data.tobytes())  # a copy, because ZipNN reorders its input in place
        begin = time.process_time()
        blob = coder.compress(source)
        return time.process_time() - begin, (coder, blob), len(blob)

    def decompress(self, state: Any, data: Array, **_: object) -> tuple[float, Any]:
        coder, blob = state
        begin = time.process_time()
        out = coder.decompress(blob)
        return time.process_time() - begin, out


class _Z4ai:
    """Deltas of bf16 models to `base`, of all elements (`ends` is [n]) or of each tensor, on all cores."""

    def compress(self, data: Array, base: str, ends: list[int]) -> tuple[float, Any, int]:
        import z4ai  # only installed in the peers' environment

        parts, bases = _split(data, ends), _split(_inputs[base], ends)
        begin = time.perf_counter()
        blobs = [z4ai.compress_delta(a, b, dtype="bf16") for a, b in zip(parts, bases, strict=True)]
        return time.perf_counter() - begin, (blobs, bases), sum(map(len, blobs))

    def decompress(self, state: Any, data: Array, **_: object) -> tuple[float, Any]:
        import z4ai  # only installed in the peers' environment

        blobs, bases = state
        begin = time.perf_counter()
        parts = [z4ai.decompress_delta(blob, base) for blob, base in zip(blobs, bases, strict=True)]
        return time.perf_counter() - begin, b"".join(parts)


class _OpenZL:
    """One blob of `dtype`, timed in CPU seconds of one thread, with OpenZL's checksums of content and blob.

    Floats are split into exponents, coded by FSE, and sign-fraction bits, stored. With a `base`, the XOR of
    the bit patterns is compressed, and sign-fraction bits are entropy coded too.
    """

    def compress(self, data: Array, dtype: str, base: str | None = None) -> tuple[float, Any, int]:
        from openzl import ext as zl  # only installed in the peers' environment

        nodes, graphs = zl.nodes, zl.graphs
        node = nodes.BFloat16Deconstruct() if dtype == "bfloat16" else nodes.Float32Deconstruct()
        compressor = zl.Compressor()
        sign_frac = graphs.Store() if base is None else graphs.Entropy()
        graph = node(compressor, sign_frac=sign_frac, exponent=graphs.Fse())
        compressor.select_starting_graph(graph)
        context = zl.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        for checksum in (zl.CParam.ContentChecksum, zl.CParam.CompressedChecksum):
            context.set_parameter(checksum, 1)
        patterns = data.view(f"u{data.itemsize}")
        begin = time.process_time()
        if base is not None:
            patterns = patterns ^ _inputs[base].view(patterns.dtype)
        blob = context.compress([zl.Input(zl.Type.Numeric, patterns)])
        return time.process_time() - begin, (blob, base), len(blob)

    def decompress(self, state: Any, data: Array) -> tuple[float, Any]:
        from openzl import ext as zl  # only installed in the peers' environment

        context = zl.DCtx()
        for checksum in (zl.DParam.CheckContentChecksum, zl.DParam.CheckCompressedChecksum):
            context.set_parameter(checksum, 1)
        blob, base = state
        begin = time.process_time()
        (output,) = context.decompress(blob)
        out = output.content.as_nparray()
        if base is not None:
            out = out ^ _inputs[base].view(out.dtype)
        return time.process_time() - begin, out


class _OpenZLEach(_OpenZL):
    """One OpenZL blob for each tensor; `ends` are the end offsets of the tensors in the input."""

    def compress(self, data: Array, dtype: str, ends: list[int]) -> tuple[float, Any, int]:
        blobs = [super(_OpenZLEach, self).compress(part, dtype) for part in np.split(data, ends[:-1])]
        return (
            sum(seconds for seconds, *_ in blobs),
            [state for _, state, _ in blobs],
            sum(n for *_, n in blobs),
        )

    def decompress(self, state: Any, data: Array) -> tuple[float, Any]:
        parts = [super(_OpenZLEach, self).decompress(blob, data) for blob in state]
        return sum(seconds for seconds, _ in parts), np.concatenate([out for _, out in parts])


_TOOLS: Final[dict[str, Any]] = {
    "zipnn": _ZipNN(),
    "z4ai": _Z4ai(),
    "openzl": _OpenZL(),
    "openzl each": _OpenZLEach(),
}
_inputs: dict[str, Array] = {}
_states: dict[tuple[str, str], Any] = {}


def _split(data: Array, ends: list[int]) -> list[bytes]:
    return [part.tobytes() for part in np.split(data, ends[:-1])]


def _load(name: str, path: str) -> None:
    _inputs[name] = np.load(path)


def _compress(tool: str, name: str, options: dict[str, Any]) -> tuple[float, int]:
    seconds, state, n_bytes = _TOOLS[tool].compress(_inputs[name], **options)
    _states[tool, name] = state
    return seconds, n_bytes


def _decompress(tool: str, name: str, options: dict[str, Any]) -> float:
    data = _inputs[name]
    seconds, out = _TOOLS[tool].decompress(_states[tool, name], data, **options)
    if not np.array_equal(np.frombuffer(out, data.dtype), data):
        raise AssertionError(f"{tool} does not restore {name}")
    return float(seconds)


def _bigsmall_bytes(source: str) -> int:
    import bigsmall  # only installed in the peers' environment
    from safetensors import safe_open

    with tempfile.TemporaryDirectory(prefix="ckptz-peers-") as folder:
        packed, restored = Path(folder, "packed.bs"), Path(folder, "restored.safetensors")
        bigsmall.compress(source, str(packed), progress=False)
        bigsmall.decompress(str(packed), str(restored), progress=False)
        with safe_open(source, "pt") as file, safe_open(restored, "pt") as other:
            if not all(file.get_tensor(name).equal(other.get_tensor(name)) for name in file.keys()):  # noqa: SIM118
                raise AssertionError(f"BigSmall does not restore {source}")
        return packed.stat().st_size


def _lmzip(source: str) -> tuple[float, float, int]:
    import lmz  # only installed in the peers' environment

    with tempfile.TemporaryDirectory(prefix="ckptz-peers-", dir=Path(source).parent) as folder:
        packed, restored = Path(folder, "packed.lmz"), Path(folder, "restored.safetensors")
        begin = time.process_time()
        lmz.compress(source, str(packed), workers=1)
        middle = time.process_time()
        lmz.decompress(str(packed), str(restored), workers=1)
        end = time.process_time()
        if restored.read_bytes() != Path(source).read_bytes():
            raise AssertionError(f"lmzip does not restore {source}")
        return middle - begin, end - middle, packed.stat().st_size


def _moonclip(before: str, after: str) -> list[tuple[float, float, int]]:
    os.environ |= {"MOONCLIP_THREADS": "1", "MOONCLIP_FSYNC": "0"}
    import moonclip  # only installed in the peers' environment
    from safetensors.torch import load_file

    rows: list[tuple[float, float, int]] = []
    with tempfile.TemporaryDirectory(prefix="ckptz-peers-", dir=Path(before).parent) as folder:
        manager = moonclip.CheckpointManager(folder, async_save=False)
        for step, path in enumerate((before, after), 1):
            state = load_file(path)
            begin = time.process_time()
            snapshot = manager.save(step=step, extra={"state": state})
            middle = time.process_time()
            loaded = moonclip.CheckpointManager(folder, async_save=False).load(snapshot)["extra/state"]
            end = time.process_time()
            if not all(loaded[name].equal(tensor) for name, tensor in state.items()):
                raise AssertionError(f"moonclip does not restore {path}")
            n_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            rows.append((middle - begin, end - middle, n_bytes - sum(n for *_, n in rows)))
    return rows


def _pack_file(source: str, target: str) -> None:
    import torch  # comes with ZipNN
    import zipnn  # only installed in the peers' environment
    from safetensors import safe_open
    from safetensors.torch import save_file
    from zipnn.util_safetensors import METADATA_KEY, build_compressed_tensor_info

    tensors, infos = {}, {}
    with safe_open(source, "pt") as file:
        for name in file.keys():  # noqa: SIM118  # no dict
            tensor = tensors[name] = file.get_tensor(name)
            if tensor.is_floating_point():
                coder = zipnn.ZipNN(input_format="torch", bytearray_dtype=tensor.dtype, method="HUFFMAN")
                blob = coder.compress(tensor.clone())  # a copy, because ZipNN reorders its input in place
                if len(blob) < tensor.nbytes:
                    infos[name] = build_compressed_tensor_info(tensor)
                    tensors[name] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        metadata = {**(file.metadata() or {}), METADATA_KEY: json.dumps(infos)}
    save_file(tensors, target, metadata)


def _load_file(path: str, source: str) -> float:
    import safetensors.torch
    import torch  # comes with ZipNN
    import zipnn  # only installed in the peers' environment

    zipnn.zipnn_safetensors()  # replaces safetensors.torch.safe_open by ZipNN's
    begin = time.perf_counter()
    with safetensors.torch.safe_open(path, "pt", "cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    seconds = time.perf_counter() - begin
    with safetensors.safe_open(source, "pt") as file:
        if not all(torch.equal(tensors[name], file.get_tensor(name)) for name in file.keys()):  # noqa: SIM118
            raise AssertionError(f"ZipNN does not restore {source}")
    return seconds


def _versions() -> dict[str, str]:
    from z4ai import rans  # only installed in the peers' environment

    versions = {pin.split("==")[0]: importlib.metadata.version(pin.split("==")[0]) for pin in PINS}
    if not rans.available():
        versions["z4ai"] += " (without its compiled coder)"
    return versions


_METHODS: Final[dict[str, Callable[..., object]]] = {
    "versions": _versions,
    "load": _load,
    "compress": _compress,
    "decompress": _decompress,
    "bigsmall_bytes": _bigsmall_bytes,
    "lmzip": _lmzip,
    "moonclip": _moonclip,
    "pack_file": _pack_file,
    "load_file": _load_file,
}


def serve() -> None:
    """Answer requests on standard input until it is closed."""
    # Some peers print messages. Only answers go to the real standard output, everything else to stderr.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(_METHODS[method](**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    serve()
