"""The methods of the demo's table. A new method is one more entry of `METHODS`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard
from demo_training import is_same_state
from safetensors.torch import load_file

from ckptz.convert.compress import CompressOptions, compress_files
from ckptz.convert.restore import restore_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to store a run.

    Attributes:
        name: of the row, and of the folder.
        is_lossless: whether restored states must equal the originals to the bit.
        compress: files of the run in order of steps, and a folder -> compressed files, in the same order.
        restore: compressed file, path -> writes a plain safetensors file there.
    """

    name: str
    is_lossless: bool
    compress: Callable[[Sequence[Path], Path], list[Path]]
    restore: Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What a method made of a run.

    Attributes:
        n_bytes: of each checkpoint on disk.
        ratio: bytes of fp32 weights and both moments of the run over bytes on disk.
        compress_rate: MB/s of the original files, reading and writing included.
        restore_rate: the same.
        n_bit_equal: restored checkpoints that equal their originals to the bit.
    """

    n_bytes: list[int]
    ratio: float
    compress_rate: float
    restore_rate: float
    n_bit_equal: int


def compress_chain(plain: Sequence[Path], folder: Path) -> list[Path]:
    """Losslessly; the first checkpoint stands alone, each further one is a delta to the one before it."""
    reports = compress_files(plain, folder, CompressOptions(chain=True))
    return [Path(report.output) for report in reports]


def restore(packed: Path, out: Path) -> None:
    """Back to a plain file; the chain is found beside the delta."""
    restore_file(packed, out)


METHODS = (Method(name="ckptz lossless", is_lossless=True, compress=compress_chain, restore=restore),)


def warm_up(method: Method, plain: Sequence[Path], folder: Path) -> float:
    """Seconds of the first use on the first two files; compiles what is not compiled yet."""
    begin = time.perf_counter()
    packed = method.compress(plain[:2], folder)
    method.restore(packed[-1], folder / "warm-up.safetensors")
    seconds = time.perf_counter() - begin
    for path in (*packed, folder / "warm-up.safetensors"):
        path.unlink()
    return seconds


def restored_path(path: Path, folder: Path) -> Path:
    """Where `store` restores the checkpoint that was saved as `path`."""
    return folder / f"{path.stem}.restored.safetensors"


def store(method: Method, plain: Sequence[Path], folder: Path, state_bytes: int) -> Storage:
    """Compress a run, restore all of it, and compare every restored file with its original."""
    original_mb = sum(path.stat().st_size for path in plain) / 1e6
    begin = time.perf_counter()
    packed = method.compress(plain, folder)
    compressed_at = time.perf_counter()
    for original, path in zip(plain, packed, strict=True):
        method.restore(path, restored_path(original, folder))
    end = time.perf_counter()
    n_bytes = [path.stat().st_size for path in packed]
    return Storage(
        n_bytes=n_bytes,
        ratio=state_bytes * len(plain) / sum(n_bytes),
        compress_rate=original_mb / (compressed_at - begin),
        restore_rate=original_mb / (end - compressed_at),
        n_bit_equal=sum(is_same_state(load_file(p), load_file(restored_path(p, folder))) for p in plain),
    )


def zstd_for_scale(plain: Sequence[Path]) -> tuple[int, float]:
    """(bytes, MB/s) of zstd level 3 on the same files, in memory, on all cores."""
    compressor = zstandard.ZstdCompressor(level=3, threads=-1)
    contents = [path.read_bytes() for path in plain]
    begin = time.perf_counter()
    n_bytes = sum(len(compressor.compress(content)) for content in contents)
    return n_bytes, sum(map(len, contents)) / 1e6 / (time.perf_counter() - begin)
