"""Weight sync: delta size, and seconds to publish and apply bf16 weights by the share of changed elements.

    python -m bench.product.weight_sync [--rounds N]

The weights are random, in the shapes of a transformer. ckptz is compared with an in-memory delta of the whole
model (XOR with the base, byte planes, zstd -3) and with full copies as safetensors files. The seconds of
ckptz include files, index, checksums, fsync and the checks of the base and of the result. Files are in a
folder in memory (--folder), so that no disk is measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain

from bench.core.codecs_ckptz import xor_encode
from bench.core.measure import (
    Row,
    Timing,
    interleave,
    machine,
    parser_of,
    save_rows,
    timed,
    verdict,
)
from bench.core.report import finish
from ckptz.sync import Publisher
from ckptz.torch import apply_

SIZE_TARGET: Final = 0.014  # of raw, where one element in a hundred changed
APPLY_TARGET: Final = 0.25  # of memcpy
SHARES: Final = (0.0, 0.001, 0.01, 0.05, 0.2)
LAYERS, WIDTH, INNER, VOCABULARY = 8, 1024, 2816, 32000


State = dict[str, torch.Tensor]
Patterns = NDArray[np.uint16]


# --- states -------------------------------------------------------------------------------------


def patterns_of(tensor: torch.Tensor) -> Patterns:
    """Return the bit patterns of a bf16 tensor as a flat array that shares its memory."""
    return tensor.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1)


def concatenated(state: State) -> Patterns:
    """Concatenate the bit patterns of all tensors."""
    return np.concatenate([patterns_of(tensor) for tensor in state.values()])


def cloned(state: State) -> State:
    """Copy all tensors of a state."""
    return {name: tensor.clone() for name, tensor in state.items()}


def require_equal(a: State, b: State) -> None:
    """Raise AssertionError if two states have different bits."""
    if any(not np.array_equal(patterns_of(a[name]), patterns_of(b[name])) for name in b):
        raise AssertionError("the applied weights differ from the published weights")


def xor_apply(blobs: list[bytes], live: Patterns) -> None:
    """Apply the byte planes of an XOR delta to `live` in place, without checks."""
    difference = np.empty((len(live), 2), np.uint8)
    for i, blob in enumerate(blobs):
        difference[:, i] = np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8)
    live ^= difference.view(np.uint16).reshape(-1)


# --- speed --------------------------------------------------------------------------------------


def a_transformer() -> State:
    """Draw random bf16 weights in the shapes of a small language model."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"layers.{i}.{part}": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"layers.{i}.up": (INNER, WIDTH), f"layers.{i}.gate": (INNER, WIDTH)}
        shapes |= {f"layers.{i}.down": (WIDTH, INNER), f"layers.{i}.norm": (WIDTH,)}
    return {
        name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in shapes.items()
    }


def changed_copy(state: State, share: float) -> State:
    """Copy a state, and change a share of the elements by one unit in the last place, up or down."""
    rng, out = np.random.default_rng(1), cloned(state)
    for tensor in out.values():
        patterns = patterns_of(tensor)
        places = np.flatnonzero(rng.random(len(patterns), np.float32) < share)
        patterns[places] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(places))
    return out


def speed_cases(state: State, folder: Path, share: float) -> tuple[dict[str, Callable[[], float]], int]:
    """Publish a delta; return the timed cases for one share of changed elements, and the delta's bytes."""
    after, live, spare = changed_copy(state, share), cloned(state), cloned(state)
    publisher = Publisher(folder, full_every=64, keep_full=1)
    publisher.publish(state, 0)
    report = publisher.publish(after, 1)
    delta, plain = folder / report.files[0], folder / "full.safetensors"
    save_plain(after, plain)
    blobs = xor_encode(concatenated(after), concatenated(state))
    flat = concatenated(state)

    def applied(**options: Any) -> float:
        for name, tensor in state.items():
            live[name].copy_(tensor)
        seconds = timed(lambda: apply_(live, delta, **options))
        require_equal(live, after)
        return seconds

    def reload() -> None:
        for name, tensor in load_plain(plain).items():
            live[name].copy_(tensor)

    def copy() -> None:
        for name, tensor in state.items():
            spare[name].copy_(tensor)

    def published() -> float:
        return publisher.publish(after if (publisher.step or 0) % 2 == 0 else state).seconds

    return {
        "memcpy": lambda: timed(copy),
        "ckptz, publish": published,
        "ckptz, apply, 1 thread": lambda: applied(jobs=1),
        "ckptz, apply": lambda: applied(),
        "ckptz, apply, check stored": lambda: applied(check="stored"),
        "xor+planes+zstd -3, apply": lambda: timed(lambda: xor_apply(blobs, flat)),
        "full copy, load and copy": lambda: timed(reload),
    }, report.n_bytes


def speed_row(share: float, case: str, raw: int, size: int, timings: Mapping[str, Timing]) -> Row:
    """Build the row of a case: its seconds, and their ratio to a copy of the state in memory."""
    timing, memcpy = timings[case], timings["memcpy"]
    is_target = case in ("ckptz, apply", "ckptz, apply, 1 thread") and share == 0.01
    of_memcpy = memcpy.median / timing.median
    return {
        "elements changed": share,
        "case": case,
        "delta, of raw": f"{size / raw:.5f}",
        "best s": f"{timing.best:.4f}",
        "median s": f"{timing.median:.4f}",
        "median GB/s of state": f"{raw / timing.median / 1e9:.2f}",
        "of memcpy": f"{of_memcpy:.3f}",
        "target": f">= {APPLY_TARGET}" if is_target else None,
        "verdict": verdict(of_memcpy >= APPLY_TARGET) if is_target else None,
    }


def speed(folder: Path, rounds: int) -> list[Row]:
    """Measure all shares of changed elements and write the table."""
    torch.set_num_threads(1)  # memcpy on one thread
    state, rows = a_transformer(), list[Row]()
    raw = sum(tensor.nbytes for tensor in state.values())
    for share in SHARES:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            cases, size = speed_cases(state, Path(temporary), share)
            timings = interleave(cases, rounds)
        rows += [speed_row(share, case, raw, size, timings) for case in cases]
        if share == 0.01:
            rows.append(
                {
                    "elements changed": share,
                    "case": "size",
                    "delta, of raw": f"{size / raw:.5f}",
                    "target": f"<= {SIZE_TARGET}",
                    "verdict": verdict(size / raw <= SIZE_TARGET),
                }
            )
        print(f"{share} changed: done", file=sys.stderr, flush=True)
    save_rows("weight_sync_speed", rows)
    return rows


def main() -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds (default 4)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where files are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        rows = speed(Path(temporary), options.rounds)
    finish("weight_sync", machine(), rows)


if __name__ == "__main__":
    main()
