"""The decoder that was written from the specification alone reads what we write, as a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import ckptz
from safetensors.numpy import save_file as save_plain

from ckptz import KMeans
from ckptz.numpy import load_file, save_file

DECODER = Path(__file__).parent.parent / "spec" / "decoder" / "ckptz_decode.py"
DTYPES = (np.float32, np.float16, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 3, 4), (64, 70))

State = dict[str, np.ndarray[Any, Any]]


def decode_alone(path: Path) -> subprocess.CompletedProcess[str]:
    """The other decoder in a process that sees no installed ckptz of the user's."""
    command = [sys.executable, "-I", str(DECODER), str(path), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def decoded(path: Path) -> dict[str, str]:
    """SHA-256 of each tensor, by the other decoder."""
    run = decode_alone(path)
    assert run.returncode == 0, run.stderr + run.stdout
    return {row["name"]: row["sha256"] for row in json.loads(run.stdout)["tensors"]}


def ours(path: Path) -> dict[str, str]:
    return {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in load_file(path).items()}


def random_state(rng: np.random.Generator) -> State:
    """A few tensors of any type and shape, and two weights large enough for maps."""
    state: State = {}
    for i in range(int(rng.integers(1, 5))):
        dtype, shape = rng.choice(DTYPES), SHAPES[rng.integers(len(SHAPES))]
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)
        with np.errstate(all="ignore"):
            state[f"tensor.{i}"] = np.asarray(values).astype(dtype)
    for name in ("up.weight", "token.weight"):
        state[name] = (rng.standard_normal((64, 72)) * 0.02).astype(rng.choice((np.float32, np.float16)))
    return state


def moved(state: State, rng: np.random.Generator) -> State:
    """The next checkpoint: floats drift, the rest stays."""
    return {
        name: np.asarray(t * (1 + 0.01 * rng.standard_normal(t.shape)), t.dtype) if t.dtype.kind == "f" else t
        for name, t in state.items()
    }


def check_chain(folder: Path, seed: int) -> None:
    """A chain of three files by one configuration, each read by both."""
    rng = np.random.default_rng(seed)
    lossy = KMeans(levels=int(rng.integers(2, 40)), prune=0.1 * (seed % 3), protect=0.01 * (seed % 2))
    config = {"config": lossy} if rng.random() < 0.6 else {}
    state, base = random_state(rng), None
    for step in range(3):
        path = folder / f"{seed}-{step}.ckptz"
        save_file(state, path, {"seed": str(seed)}, base=base, **config)  # type: ignore[arg-type]
        assert decoded(path) == ours(path)
        state, base = moved(state, rng), path


@pytest.mark.parametrize("seed", range(6))
def test_it_reads_random_chains_as_we_do(tmp_path: Path, seed: int) -> None:
    check_chain(tmp_path, seed)


@pytest.mark.slow
def test_it_reads_many_random_chains_as_we_do(tmp_path: Path) -> None:
    for seed in range(100, 434):
        check_chain(tmp_path, seed)


def test_it_refuses_what_was_changed(tmp_path: Path) -> None:
    save_plain({"w": np.arange(64, dtype=np.float32)}, tmp_path / "w.safetensors")
    ckptz("compress", tmp_path / "w.safetensors")
    path = tmp_path / "w.ckptz"
    whole = path.read_bytes()
    for position in (3, 40, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:position] + bytes((whole[position] ^ 4,)) + whole[position + 1 :])
        run = decode_alone(path)
        assert run.returncode == 1, position
        assert "Traceback" not in run.stderr


def test_it_shares_no_code_with_us() -> None:
    imported = [
        line for line in DECODER.read_text().splitlines() if line.strip().startswith(("import", "from"))
    ]
    assert not [line for line in imported if "ckptz" in line or "numpy" in line or "safetensors" in line]
