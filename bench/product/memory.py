"""Peak anonymous memory of `ckptz compress` and `ckptz restore` on large files.

    python -m bench.product.memory [--folder DIR] [--ckptz COMMAND] [--scale SHARE]

Two inputs, written piece by piece: one fp32 tensor of 2 GiB, and 20,000 fp32 tensors of 64 KiB; each
compressed and restored alone and as a delta to a file that differs a little. The parent reads RssAnon of
the running command from /proc every few milliseconds, and subtracts what a bare interpreter has, so numpy,
numba and everything else count. Mapped files do not: ckptz reads its inputs by pread. Needs 8 GiB of disk.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from bench.core.measure import RESULTS, Row, machine, parser_of, save_rows, table, verdict
from bench.core.report import finish
from ckptz.dtypes import dtype_of

LIMIT_GIB: Final = 1.0
SAMPLE_SECONDS: Final = 0.003
NEEDED_DISK: Final = 8 << 30
PIECE: Final = 1 << 20  # elements generated at a time
DELTA_SIZE: Final = 1e-3  # of the spread of the weights

Floats = NDArray[np.float32]
Shapes = dict[str, int]


# --- inputs -------------------------------------------------------------------------------------


def shapes(scale: float) -> dict[str, Shapes]:
    """Elements of every tensor, by input."""
    return {
        "one tensor": {"weight": int((1 << 29) * scale)},
        "many tensors": {f"layer.{i}.weight": 1 << 14 for i in range(int(20_000 * scale))},
    }


def _pieces(tensors: Shapes, is_changed: bool) -> Iterator[Floats]:
    for i, n in enumerate(tensors.values()):
        weights, changes = np.random.default_rng(i), np.random.default_rng((1, i))
        for begin in range(0, n, PIECE):
            size = min(PIECE, n - begin)
            piece = weights.standard_normal(size, np.float32)
            if is_changed:
                piece += np.float32(DELTA_SIZE) * changes.standard_normal(size, np.float32)
            yield piece


def write_input(path: Path, tensors: Shapes, is_changed: bool) -> None:
    """A safetensors file of random weights, without holding more than a piece."""
    write_pieces(path, {name: (n,) for name, n in tensors.items()}, "F32", _pieces(tensors, is_changed))


def write_pieces(
    path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: str, pieces: Iterable[NDArray[Any]]
) -> None:
    """A safetensors file of tensors whose values come in pieces, one tensor after another."""
    header, offset, width = {}, 0, dtype_of(dtype).unit_bytes
    for name, shape in tensors.items():
        end = offset + width * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            file.write(piece.data)


def _same_tensors(a: Path, b: Path) -> bool:
    """Whether two safetensors files hold the same bytes; tensors in the same order."""
    with a.open("rb") as first, b.open("rb") as second:
        for file in (first, second):
            file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
        while True:
            left, right = first.read(1 << 24), second.read(1 << 24)
            if left != right:
                return False
            if not left:
                return True


# --- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Watched:
    """A finished command: seconds and RssAnon in bytes of each sample."""

    seconds: float
    times: list[float]
    anonymous: list[int]

    @property
    def peak(self) -> int:
        """The most there was."""
        return max(self.anonymous)


def _rss_anon(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0  # the process has ended and has no memory left


def watch(command: Sequence[str]) -> Watched:
    """Run a command to its end and sample its memory."""
    begin = time.perf_counter()
    times, anonymous = [0.0], [0]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        times.append(time.perf_counter() - begin)
        anonymous.append(_rss_anon(process.pid))
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}")
    return Watched(time.perf_counter() - begin, times, anonymous)


def bare_interpreter() -> int:
    """RssAnon of an interpreter that has imported nothing."""
    return watch([sys.executable, "-c", "import time; time.sleep(0.5)"]).peak


# --- cases --------------------------------------------------------------------------------------


def cases(ckptz: Sequence[str], folder: Path, tensors: Shapes) -> Iterator[tuple[str, Path, Watched]]:
    """Run all commands on one input; yields (what, file written, memory)."""
    base, current = folder / "base.safetensors", folder / "current.safetensors"
    packed, restored = folder / "current.ckptz", folder / "restored.safetensors"
    write_input(base, tensors, is_changed=False)
    write_input(current, tensors, is_changed=True)
    for kind, more in (("alone", []), ("delta", ["--base", str(base)])):
        yield (
            f"{kind}, compress",
            packed,
            watch([*ckptz, "compress", "--force", str(current), "-o", str(packed), *more]),
        )
        yield f"{kind}, restore", restored, watch([*ckptz, "restore", str(packed), "-o", str(restored)])
        if not _same_tensors(current, restored):
            raise AssertionError(f"{kind}: the restored file holds other bytes")
        restored.unlink()
        packed.unlink()
    base.unlink()
    current.unlink()


def rows_of(name: str, tensors: Shapes, own: int, runs: Sequence[tuple[str, int, Watched]]) -> list[Row]:
    """One row a command."""
    raw = 4 * sum(tensors.values())
    return [
        {
            "input": name,
            "command": what,
            "raw GiB": f"{raw / 2**30:.2f}",
            "file GiB": f"{size / 2**30:.2f}",
            "peak anonymous GiB": f"{(watched.peak - own) / 2**30:.3f}",
            "seconds": f"{watched.seconds:.1f}",
            "MB/s with files": round(raw / watched.seconds / 1e6),
            "target": f"< {LIMIT_GIB} GiB",
            "verdict": verdict(watched.peak - own < LIMIT_GIB * 2**30),
        }
        for what, size, watched in runs
    ]


def measure(ckptz: Sequence[str], folder: Path, scale: float) -> tuple[list[Row], dict[str, Watched]]:
    """All rows, and the curves for the picture."""
    rows: list[Row] = []
    curves: dict[str, Watched] = {}
    own = bare_interpreter()
    for name, tensors in shapes(scale).items():
        runs = []
        for what, path, watched in cases(ckptz, folder, tensors):
            runs.append((what, path.stat().st_size, watched))
            curves[f"{name}, {what}"] = watched
            print(f"{name}, {what}: {watched.peak / 2**30:.3f} GiB", file=sys.stderr, flush=True)
        rows += rows_of(name, tensors, own, runs)
    return rows, curves


# --- picture and command line -------------------------------------------------------------------


def draw(curves: dict[str, Watched]) -> None:
    """results/memory.png: RssAnon while the commands run."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (name, watched) in enumerate(curves.items()):
        gib = [n_bytes / 2**30 for n_bytes in watched.anonymous]
        axes.plot(watched.times, gib, "--" if name.startswith("many") else "-", color=f"C{i % 4}", label=name)
    axes.axhline(LIMIT_GIB, color="black", linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="anonymous memory, GiB", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(RESULTS / "memory.png", dpi=120)


def main() -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    parser.add_argument("--ckptz", help="command line to test (default: ckptz beside this Python)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the full size; others keep no results"
    )
    options = parser.parse_args()
    ckptz = shlex.split(options.ckptz) if options.ckptz else [str(Path(sys.executable).with_name("ckptz"))]
    with tempfile.TemporaryDirectory(prefix="ckptz-memory-", dir=options.folder) as name:
        if shutil.disk_usage(name).free < NEEDED_DISK * options.scale:
            parser.error(
                f"{name}: less than {NEEDED_DISK * options.scale / 2**30:.1f} GiB free; use --folder"
            )
        rows, curves = measure(ckptz, Path(name), options.scale)
    if options.scale != 1:
        print(table(rows))
        return
    save_rows("memory", rows)
    draw(curves)
    finish("memory", machine(), rows)


if __name__ == "__main__":
    main()
