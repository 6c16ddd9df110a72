"""Folders as large as models are: seconds, CPU, memory and disk of `ckptz compress` and `ckptz restore`.

    python -m bench.product.large [--gib N] [--ranks-gib N] [--folder DIR]

A Hugging Face folder of bf16 shards in the shapes of a 7 B model (4096 wide, 11008 inside, 32,000 words),
with as many layers as fill it; the same a step later, as a delta; and a folder that 8 ranks have written by
`torch.distributed.checkpoint`. Values are normal numbers times a scale for each row that is itself
log-normal, so that exponents have the entropy of real weights. They are taken from a pool of 16.8 million
at a place of its own for each piece, for drawing all would take longer than all else; no row's scale comes
twice, so neither do mantissas. A step later each value has moved by 2e-6 times a normal number before it is
rounded to bf16, as at small learning rates.

Input files are dropped from the page cache before each command. *disk* is what copying as many bytes takes,
measured on a shard; *codec* is the command's own user CPU seconds by jobs: whatever is slower bounds it.
What was restored is compared with what was compressed, and each stage deletes what no other needs: at most
twice the folder is on the disk.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.core.measure import Row, machine, parser_of, save_rows, table, timed, verdict
from bench.core.report import finish
from bench.product.memory import LIMIT_GIB, bare_interpreter, watch, write_pieces
from ckptz.formats.inputs import open_input

WIDTH, INNER, VOCABULARY = 4096, 11008, 32_000
POOL, PIECE = 1 << 24, 1 << 22  # elements
SPREAD, MOVED = 0.02, 2e-6
SHARD_GIB, N_RANKS, COPIED = 4.0, 8, 1 << 31
MOST: Final = 1.3  # times the slower of disk and codec
CKPTZ: Final = str(Path(sys.executable).with_name("ckptz"))

Shapes = Mapping[str, tuple[int, ...]]


# --- inputs -------------------------------------------------------------------------------------


def shapes(n_bytes: float) -> dict[str, tuple[int, ...]]:
    """Tensors of a model in bf16 with as many layers as fill so many bytes, and at least one."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    last = {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    attention = {f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
    mlp = {f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    layer = {**attention, **mlp, "mlp.down_proj.weight": (WIDTH, INNER), "input_layernorm.weight": (WIDTH,)}
    n_layers = max(1, round((n_bytes / 2 - _size({**found, **last})) / _size(layer)))
    for i in range(n_layers):
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | last


def _size(tensors: Shapes) -> int:
    return sum(map(math.prod, tensors.values()))


def values(index: int, n: int, row: int, *, is_moved: bool) -> Iterator[NDArray[np.uint16]]:
    """The bf16 bit patterns of `n` elements of a tensor in pieces of whole rows."""
    rng, step = np.random.default_rng(index), PIECE // row * row
    for begin in range(0, n, step):
        size = min(step, n - begin)
        place, other = (int(at) for at in rng.integers(POOL - size, size=2))
        scale = SPREAD * torch.from_numpy(np.exp2(0.5 * rng.standard_normal(-(-size // row), np.float32)))
        drawn = pool()[place : place + size].view(-1, row) * scale[:, None]
        if is_moved:
            drawn.add_(pool()[other : other + size].view(-1, row), alpha=MOVED)
        yield drawn.bfloat16().view(torch.uint16).numpy().ravel()


_pool: list[torch.Tensor] = []


def pool() -> torch.Tensor:
    """Normal numbers, [POOL], drawn once a process."""
    if not _pool:
        _pool.append(torch.from_numpy(np.random.default_rng(0).standard_normal(POOL, np.float32)))
    return _pool[0]


def write_folder(folder: Path, tensors: Shapes, *, is_moved: bool) -> None:
    """A folder of shards of at most SHARD_GIB, or of a quarter of the model."""
    folder.mkdir()
    most = min(SHARD_GIB * 2**30, 2 * _size(tensors) / 4)
    shards, n_bytes = [dict[str, tuple[int, ...]]()], 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        if shards[-1] and n_bytes + size > most:
            shards.append({})
            n_bytes = 0
        shards[-1][name] = shape
        n_bytes += size
    order = {name: i for i, name in enumerate(tensors)}
    for i, own in enumerate(shards):
        path = folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        drawn = (
            piece
            for name, shape in own.items()
            for piece in values(order[name], math.prod(shape), shape[-1], is_moved=is_moved)
        )
        write_pieces(path, own, "BF16", drawn)


def write_ranks(folder: Path, tensors: Shapes) -> None:
    """A folder that N_RANKS processes write, each its rows of every tensor."""
    context = multiprocessing.get_context("spawn")
    place = folder.with_suffix(".store")
    ranks = [context.Process(target=_write_rank, args=(i, folder, place, tensors)) for i in range(N_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    place.unlink(missing_ok=True)
    if any(rank.exitcode for rank in ranks):
        raise SystemExit("a rank has failed")


def _write_rank(rank: int, folder: Path, place: Path, tensors: Shapes) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(place), N_RANKS), rank=rank, world_size=N_RANKS)
    mesh, state = init_device_mesh("cpu", (N_RANKS,)), {}
    for i, (name, shape) in enumerate(tensors.items()):
        local = (shape[0] // N_RANKS, *shape[1:])
        drawn = list(values(N_RANKS * i + rank, math.prod(local), local[-1], is_moved=False))
        own = torch.from_numpy(np.concatenate(drawn)).view(torch.bfloat16).view(local)
        state[name] = DTensor.from_local(own, mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def digest(path: Path) -> str:
    """A hash of all tensors of a folder, by name."""
    opened, found = open_input(path), xxhash.xxh3_128()
    for name in sorted(opened.tensors):
        source = opened.tensors[name]
        n = source.dtype.n_units(source.shape)
        found.update(name.encode())
        for begin in range(0, n, PIECE):
            found.update(np.ascontiguousarray(source.units(begin, min(begin + PIECE, n))).data)
    opened.close()
    return found.hexdigest()


# --- measuring ----------------------------------------------------------------------------------


def files_in(path: Path) -> list[Path]:
    """A file, or all files of a folder."""
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]


def on_disk(*paths: Path) -> int:
    """Bytes of files and folders, hard links once."""
    found = [file.stat() for path in paths for file in files_in(path)]
    return sum({one.st_ino: one.st_size for one in found}.values())


def forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    os.sync()
    for file in (file for path in paths for file in files_in(path)):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_speed(source: Path) -> float:
    """Bytes a second that are read and written together, by a copy of a file that is forced to the disk."""
    size, target = min(source.stat().st_size, COPIED), source.with_suffix(".copy")
    forget([source])

    def copy() -> None:
        with source.open("rb") as read, target.open("wb") as written:
            for _ in range(0, size, 1 << 24):
                written.write(read.read(1 << 24))
            written.flush()
            os.fsync(written.fileno())

    seconds = timed(copy)
    target.unlink()
    return 2 * size / seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """The limits that all commands are judged by.

    Attributes:
        disk: bytes a second, read and written together.
        own: bytes of anonymous memory that a bare interpreter has.
    """

    disk: float
    own: int

    def run(self, what: str, jobs: int, raw: int, read: Sequence[Path], target: Path, *command: Any) -> Row:
        """Run a command and cost it."""
        forget(read)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        watched = watch([CKPTZ, *map(str, command), "-o", str(target), "--jobs", str(jobs), "--quiet"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        moved = on_disk(*read, target)
        bound, peak = max(moved / self.disk, user / jobs), watched.peak - self.own
        is_met = watched.seconds <= MOST * bound and peak < LIMIT_GIB * 2**30
        row = {
            "command": what,
            "jobs": jobs,
            "raw GiB": f"{raw / 2**30:.2f}",
            "file GiB": f"{(moved - on_disk(*read)) / 2**30:.2f}",
            "seconds": f"{watched.seconds:.1f}",
            "MB/s": round(raw / watched.seconds / 1e6),
            "disk s": f"{moved / self.disk:.1f}",
            "codec s": f"{user / jobs:.1f}",
            "of the slower": f"{watched.seconds / bound:.2f}",
            "user s": f"{user:.1f}",
            "system s": f"{system:.1f}",
            "peak anonymous GiB": f"{peak / 2**30:.3f}",
            "target": f"<= {MOST}, < {LIMIT_GIB:g} GiB",
            "verdict": verdict(is_met),
        }
        print(row, flush=True)
        return row


def compared(
    bench: Bench, what: str, source: Path, packed: Path, base: Path | None, jobs: Sequence[int]
) -> Iterator[Row]:
    """Compress a folder, which is deleted, and restore it; `packed` stays."""
    raw, restored = on_disk(source), source.with_name("restored")
    more, bases = ([], []) if base is None else (["--base", base], [base])
    to = ["--to", "dcp"] if (source / ".metadata").exists() else []
    for i, n in enumerate(jobs):
        if i:
            packed.unlink() if packed.is_file() else shutil.rmtree(packed)
        yield bench.run(f"{what}, compress", n, raw, [source, *bases], packed, "compress", source, *more)
    wanted = digest(source)
    shutil.rmtree(source)
    for n in jobs:
        yield bench.run(f"{what}, restore", n, raw, [packed, *bases], restored, "restore", packed, *to)
        if digest(restored) != wanted:
            raise AssertionError(f"{what}: what was restored differs")
        shutil.rmtree(restored)


def measured(folder: Path, n_bytes: float, n_ranks_bytes: float) -> Iterator[Row]:
    """A row for each command."""
    tensors = shapes(n_bytes)
    write_folder(folder / "model", tensors, is_moved=False)
    bench = Bench(disk_speed(next((folder / "model").glob("*-00001-*"))), bare_interpreter())
    print(f"disk: {bench.disk / 1e6:.0f} MB/s read and written", flush=True)
    yield from compared(bench, "folder", folder / "model", folder / "base", None, (1, 2))
    write_folder(folder / "later", tensors, is_moved=True)
    base = folder / "base" / "model.ckptz"
    yield from compared(bench, "delta", folder / "later", folder / "delta", base, (1, 2))
    shutil.rmtree(folder / "base")
    shutil.rmtree(folder / "delta")
    write_ranks(folder / "ranks", shapes(n_ranks_bytes))
    yield from compared(bench, "8 ranks", folder / "ranks", folder / "ranks.ckptz", None, (1, 2))


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--gib", type=float, default=16.0, help="of the folder; others keep no results")
    parser.add_argument("--ranks-gib", type=float, default=4.0, help="of what the ranks write")
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptz-large-", dir=options.folder) as name:
        if shutil.disk_usage(name).free < 2.0 * 2**30 * options.gib:
            parser.error(f"{name}: less than {2 * options.gib:.0f} GiB free; use --folder")
        subprocess.run([CKPTZ, "warm-up", "--quiet"], check=True)
        rows = list(measured(Path(name), options.gib * 2**30, options.ranks_gib * 2**30))
    if options.gib != 16:
        print(table(rows))
        return
    save_rows("large", rows)
    finish("large", machine(), rows)


if __name__ == "__main__":
    main()
