"""NNCodec 2, the reference software of MPEG's neural network coding (ISO/IEC 15938-17), driven over a pipe.

`NNCodec()` makes bench/.cache/nncodec-venv with a pinned version on first use (its entropy coder is compiled
then) and starts one worker process in it. torch and numpy come from the caller's environment, by a path file.
The worker keeps a chain: the first file of one is a key frame, each further one codes the difference to
what was decoded last, with the package's temporal contexts (`tca`), its trellis (`use_dq`) and its search for
coder parameters (`param_opt`) on. `nncodec.nn.encode` never signals a difference, which those contexts need;
so `nncodec.nnc.compress`, which it calls itself, is called directly.

    python -m bench.studies.nncodec_rival             make the environment and print its version
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

HERE: Final = Path(__file__).resolve()
VENV: Final = HERE.parents[1] / ".cache" / "nncodec-venv"
PIN: Final = "nncodec==2.1.3"
# Its training applications import these; its coder never calls them.
STAND_INS: Final = ("pandas", "torchvision", "cv2", "h5py")

Arrays = Mapping[str, NDArray[Any]]


# --- the caller's side --------------------------------------------------------------------------


def environment() -> Path:
    """The Python of the environment, which is made if it is missing or has another pin."""
    python, stamp = VENV / "bin" / "python", VENV / "pin.txt"
    wanted = "\n".join((PIN, sys.version))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making {VENV} with {PIN}", file=sys.stderr)
    venv.EnvBuilder(clear=True, with_pip=True).create(VENV)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", PIN], check=True)
    folder = next((VENV / "lib").glob("python*/site-packages"))
    (folder / "caller.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    stamp.write_text(wanted)
    return python


@dataclass(frozen=True, slots=True)
class Coded:
    """One file: its bytes, and CPU seconds of coding and of decoding it."""

    n_bytes: int
    encode_seconds: float
    decode_seconds: float


class NNCodec:
    """A worker process; use it in a `with` block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [environment(), HERE, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def store(self, weights: Path, restored: Path, qp: int, *, is_delta: bool) -> Coded:
        """Code a safetensors file of float32 tensors; what it decodes to is written to `restored`.

        Args:
            weights: the input.
            restored: a safetensors file to write.
            qp: quantization parameter of tensors of two and more dimensions; four more double the step.
            is_delta: against what was decoded last; otherwise a new chain begins.

        Raises:
            RuntimeError: the worker ended; its error is on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"weights": str(weights), "restored": str(restored), "qp": qp, "is_delta": is_delta}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("NNCodec's worker ended; its error is printed above")
        return Coded(**json.loads(answer))


# --- the worker's side, inside that environment -------------------------------------------------


def _no_base() -> dict[str, Any]:
    """What its contexts begin with; it fills this in."""
    return {"parameters": {}, "put_node_depth": {}, "device_id": 0, "parameter_id": {}}


class _Chain:
    """Both ends of a chain; they share nothing but the bytes."""

    def __init__(self) -> None:
        self._ends = [_no_base() for _ in range(2)]
        self._last: Arrays | None = None

    def store(self, weights: Arrays, qp: int) -> tuple[Coded, Arrays]:
        from nncodec.nnc import compress, decompress  # type: ignore[import-not-found]  # only there

        last, (own, other) = self._last, self._ends
        begin = time.process_time()
        wanted = dict(weights) if last is None else {n: t - last[n] for n, t in weights.items()}
        stream = compress(
            wanted,
            bitstream_path=None,
            qp=qp,
            use_dq=True,
            param_opt=True,
            row_skipping=True,
            tca=True,
            compress_differences=last is not None,
            approx_param_base=own,
            update_base_param=True,
            return_bitstream=True,
            verbose=False,
        )
        coded_at = time.process_time()
        found = decompress(stream, approx_param_base=other, update_base_param=True)
        restored = dict(found) if last is None else {n: last[n] + found[n] for n in weights}
        self._last = restored
        seconds = (coded_at - begin, time.process_time() - coded_at)
        return Coded(len(stream), *seconds), restored


def _serve() -> None:
    from unittest.mock import MagicMock

    from safetensors.numpy import load_file, save_file

    for name in STAND_INS:
        sys.modules[name] = MagicMock()
    # It prints now and then; answers go to the real standard output, all else to stderr.
    answers, sys.stdout = sys.stdout, sys.stderr
    chain = _Chain()
    for line in sys.stdin:
        request = json.loads(line)
        chain = chain if request["is_delta"] else _Chain()
        coded, restored = chain.store(load_file(request["weights"]), request["qp"])
        contiguous = {n: np.ascontiguousarray(t, np.float32) for n, t in restored.items()}
        save_file(contiguous, request["restored"])
        answer = {name: getattr(coded, name) for name in Coded.__slots__}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make NNCodec's environment and print its version.")
    parser.add_argument("--serve", action="store_true", help="answer requests on standard input")
    if parser.parse_args().serve:
        _serve()
        return 0
    code = f"import importlib.metadata; print(importlib.metadata.version({PIN.split('==')[0]!r}))"
    subprocess.run([environment(), "-c", code], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
