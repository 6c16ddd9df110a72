"""NNCodec 2, the reference software of MPEG's neural network coding (ISO/IEC 15938-17), in its own process.

Its entropy coder is compiled when its environment is made; see `bench.core.elsewhere`. The worker keeps a
chain: the first file of one is a key frame, each further one codes the difference to what was decoded last,
with the package's temporal contexts (`tca`), its trellis (`use_dq`) and its search for coder parameters
(`param_opt`) on. `nncodec.nn.encode` never signals a difference, which those contexts need; so
`nncodec.nnc.compress`, which it calls itself, is called directly.

    python -m bench.studies.nncodec_rival             make the environment and print its version
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import numpy as np
from numpy.typing import NDArray

from bench.core.elsewhere import Worker, serve

PIN: Final = "nncodec==2.1.3"
# Its training applications import these; its coder never calls them.
STAND_INS: Final = ("pandas", "torchvision", "cv2", "h5py")

Arrays = Mapping[str, NDArray[Any]]


# --- the caller's side --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Coded:
    """One file: its bytes, and CPU seconds of coding and of decoding it."""

    n_bytes: int
    encode_seconds: float
    decode_seconds: float


class NNCodec(Worker):
    """A worker process; use it in a `with` block."""

    def __init__(self) -> None:
        super().__init__("nncodec", (PIN,), "bench.studies.nncodec_rival", OMP_NUM_THREADS="1")

    def version(self) -> str:
        """Of the package."""
        return self.ask("version")  # type: ignore[no-any-return]

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
        paths = {"weights": str(weights), "restored": str(restored)}
        return Coded(*self.ask("store", **paths, qp=qp, is_delta=is_delta))


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


_chains: list[_Chain] = []


def _store(weights: str, restored: str, qp: int, is_delta: bool) -> tuple[object, ...]:
    from safetensors.numpy import load_file, save_file

    if not is_delta:
        _chains[:] = [_Chain()]
    coded, found = _chains[0].store(load_file(weights), qp)
    save_file({n: np.ascontiguousarray(t, np.float32) for n, t in found.items()}, restored)
    return astuple(coded)


def _version() -> str:
    return importlib.metadata.version(PIN.split("==")[0])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make NNCodec's environment and print its version.")
    parser.add_argument("--serve", action="store_true", help="answer requests on standard input")
    if parser.parse_args().serve:
        sys.modules.update({name: MagicMock() for name in STAND_INS})
        serve({"store": _store, "version": _version})
        return
    with NNCodec() as coder:
        print(coder.version())


if __name__ == "__main__":
    main()
