"""Read mutants with valid checksums by every reader, with the bounds checks of the kernels switched on.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=FOLDER python -m tests.support.bounds_worker FILES MESSAGES SEED

Reads FILES mutants of files and chains and MESSAGES mutants of messages of links. It is a separate process
because numba reads both variables when it is imported. Prints a line of JSON for each kind of mutant with the
number of mutants and of each outcome: accepted, refused, another error, or values that differ from those of
the second decoder.
"""

import collections
import functools
import hashlib
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptz
from ckptz.api.apply import CHECKS
from ckptz.errors import CkptzError
from ckptz.kernels import compiled as cpu
from ckptz.numpy import save_file
from ckptz.store.resolve import open_checkpoint
from ckptz.torch import apply_, load_file
from tests.support import second_decoder, wire_mutants
from tests.support.mutant_support import Member, file_of, fit, frames_of, is_small, mutant
from tests.support.spec_files import read_all
from tests.support.vector_support import VALID

SHARED = Path("/dev/shm")  # files in memory where possible, because each mutant writes several files
MAX_FILES = 4  # length of a chain; longer chains take time and test nothing more
LARGE_EVERY = 40  # files of some thousand values are slow to decode in plain Python
SECOND_LIMIT = 1 << 20
GOOD = ("accepted", "refused", "codes alone")
OUTCOMES: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
Outcome = dict[str, str] | str  # digests of tensors by name, or the reason why there are none


def count(kind: str, outcome: str, description: str = "") -> None:
    """Count a mutant; print an outcome that must not occur, with the description that reproduces it."""
    OUTCOMES[kind]["mutants"] += 1
    OUTCOMES[kind][outcome] += 1
    if outcome not in GOOD:
        print(f"{kind} {outcome}: {description}", file=sys.stderr)


def outcome_of(run: Callable[[], Any]) -> tuple[str, Any]:
    """Return ("accepted", result), ("refused", None), or another outcome with its traceback."""
    try:
        return "accepted", run()
    except CkptzError:
        return "refused", None
    except IndexError:
        return "out of bounds", traceback.format_exc()
    except Exception:
        return "other error", traceback.format_exc()


# --- files --------------------------------------------------------------------------------------


def decode(path: Path) -> Outcome:
    """Return the digests of a file's tensors, or "large" if the file is too large to decode twice."""
    checkpoint = open_checkpoint(path)
    try:
        if not is_small(checkpoint):
            return "large"
        return {name: hashlib.sha256(data).hexdigest() for name, data in read_all(checkpoint).items()}
    finally:
        checkpoint.close()


def second(path: Path) -> Outcome:
    """Return the digests by the second decoder, or the reason why it refuses the file."""
    try:
        rows = second_decoder.files.decode(path, second_decoder.files.Shelf(SECOND_LIMIT), os.devnull)
        return {row["name"]: row["sha256"] for row in rows}
    except second_decoder.frames.Refusal as refusal:
        return str(refusal)


def read_file(kind: str, path: Path, description: str) -> bool:
    """Read a mutant, and return whether its tensors were accepted."""
    outcome, result = outcome_of(lambda: decode(path))
    if outcome == "accepted" and result != "large":
        expected = second(path)
        if result != expected:
            outcome = "codes alone" if is_by_codes_alone(path, expected) else "differs"
        count(kind, outcome, f"{description} {result} is {expected}")
        return outcome == "accepted"
    count(kind, outcome, f"{description} {result}")
    return False


def _all_patterns(source: Any) -> Any:
    return source.patterns(0, source.dtype.n_patterns(source.shape))


def is_by_codes_alone(path: Path, expected: Outcome) -> bool:
    """Return whether only the patterns of a base are invalid, and only its codes are needed.

    See spec/03-transforms.md#contexts.
    """
    checkpoint = open_checkpoint(path)
    try:
        plans = [frame.header.plan for frame in checkpoint.container.tensors.values()]
        bases = [s for name, s in checkpoint.container.bases.items() if name in checkpoint.tensors]
        refused = any(outcome_of(functools.partial(_all_patterns, base))[0] == "refused" for base in bases)
        by_codes = any(plan.reads_base_codes and not plan.reads_base_patterns for plan in plans)
        return isinstance(expected, str) and by_codes and refused
    finally:
        checkpoint.close()


def apply_file(path: Path, base: Path, is_read: bool, description: str) -> None:
    """Apply a mutated delta to the tensors of its base."""
    try:
        if decode(base) == "large" or outcome_of(lambda: decode(path))[1] == "large":
            return
        expected = load_file(path) if is_read else None
        states = [load_file(base) for _ in CHECKS]
    except CkptzError:  # a dtype that torch lacks, or a base that is damaged itself
        return
    for check, live in zip(CHECKS, states, strict=True):
        untouched = {name: _bits(tensor) for name, tensor in live.items()}
        outcome, result = outcome_of(lambda: apply_(live, path.read_bytes(), check=check, jobs=1))  # noqa: B023
        expected_bytes = untouched
        if outcome == "accepted" and expected is not None:
            expected_bytes = untouched | {name: _bits(tensor) for name, tensor in expected.items()}
        if outcome == "refused" or expected is not None:
            same = all(_bits(live[name]) == data for name, data in expected_bytes.items())
            outcome = outcome if same else "differs"
        count(f"apply_ {check}", outcome, f"{description} {result}")


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def vectors() -> Iterator[tuple[list[str], list[Member]]]:
    """Yield the valid vectors in pieces, except those of many chunks or files."""
    for vector in VALID:
        if len(vector.paths) <= MAX_FILES:
            try:
                chain = [file_of(path.read_bytes()) for path in vector.paths]
            except ValueError:
                continue
            yield [path.name for path in vector.paths], chain


def generated(folder: Path) -> Iterator[tuple[list[str], list[Member]]]:
    """Yield chains of two files from the writer: lanes, tables, Huffman, escapes, contexts, outer vectors."""
    rng = np.random.default_rng(5)
    scale = np.exp(rng.standard_normal((48, 1)))
    weight = (0.02 * scale * rng.standard_normal((48, 96))).astype(np.float32)
    state = {"up.weight": weight, "small": weight[0].astype(np.float16), "step": np.arange(300)}
    drifted = {name: _drifted(t, rng) for name, t in state.items()}
    kmeans = ckptz.KMeans(levels=12, prune=0.1, protect=0.01)
    methods = {"lossless": ckptz.LOSSLESS, "kmeans": kmeans, "grid": ckptz.Grid(step=0.1)}
    for (name, config), effort in itertools.product(methods.items(), ("small", "fast")):
        names = [f"{name}-{effort}-{step}.ckptz" for step in (2, 1)]
        save_file(state, folder / names[1], config=config, effort=effort)
        save_file(drifted, folder / names[0], config=config, base=folder / names[1], effort=effort)
        yield names, [file_of((folder / n).read_bytes()) for n in names]
        yield names[1:], [file_of((folder / names[1]).read_bytes())]


def _drifted(values: Any, rng: np.random.Generator) -> Any:
    drifted = values.copy().reshape(-1)
    positions = rng.integers(0, len(drifted), len(drifted) // 8)
    drifted[positions] = drifted[positions] * 1.25
    return drifted.reshape(values.shape)


def read_mutants(n: int, seed: int) -> None:
    """Read mutants of kind `file` and `chain`, and apply those that are deltas to live tensors."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as name:
        small, large = list(vectors()), list(generated(Path(name)))
        pool = [frame for _, chain in (*small, *large) for frame in frames_of(chain)]
        for i in range(n):
            seeds = large if i % LARGE_EVERY == 0 else small
            names, chain = seeds[int(rng.integers(0, len(seeds)))]
            folder = Path(name, "mutant")
            folder.mkdir(exist_ok=True)
            changed = mutant(chain, rng, pool)
            description = f"mutant {i} of seed {seed}, {names[0]} of {len(names)}"
            outcome, result = outcome_of(lambda: fit(changed, names, folder))  # noqa: B023
            if outcome != "accepted":
                count("fitting", outcome, f"{description} {result}")
            else:
                read_and_apply(folder, names, description)
            for path in folder.iterdir():
                path.unlink()


def read_and_apply(folder: Path, names: Sequence[str], description: str) -> None:
    """Read a mutant that was written to a folder, and apply it if it is a delta."""
    path = folder / names[0]
    is_read = read_file("chain" if len(names) > 1 else "file", path, description)
    if len(names) > 1:
        apply_file(path, folder / names[1], is_read, description)


# --- links --------------------------------------------------------------------------------------


def receive_mutants(n: int, seed: int) -> None:
    """Receive mutants of messages: the kernels of both ends and the second receiver must agree."""
    for kind, outcome, description in itertools.islice(wire_mutants.outcomes(seed, outcome_of), n):
        count(kind, outcome, description)


def require_checks() -> None:
    """Exit unless a kernel that is called with an index out of bounds raises IndexError."""
    out, nine = np.zeros(1, np.uint32), np.array([9], np.uint8)
    try:
        cpu().lookup(nine, np.zeros(1, np.uint16), np.zeros((1, 1), np.uint32), out)
    except IndexError:
        return
    sys.exit("the bounds checks are off: set NUMBA_BOUNDSCHECK=1, and a NUMBA_CACHE_DIR of its own")


def main() -> None:
    n_files, n_messages, seed = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    require_checks()
    read_mutants(n_files, seed)
    receive_mutants(n_messages, seed)
    for kind, counts in OUTCOMES.items():
        print(json.dumps({"kind": kind, **counts}))


if __name__ == "__main__":
    main()
