"""Decoding chunks of frames on a GPU: coded bytes go up, units are made there. See spec/05-frame.md#decoding.

So far for lossless frames that stand alone; `decodes` tells. What else a frame may have is decoded by
`ckptz.codec.decode` on the host, and so are streams of the coders zstd and sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from ckptz.bits.cursor import ByteReader
from ckptz.codec.decode import Run, decode_chunk
from ckptz.codec.frame import FrameHeader
from ckptz.codec.plan import Predictor, kernel_mode
from ckptz.codec.units import CHUNK_UNITS, UNIT_TYPES, ChunkSources
from ckptz.entropy.frequency import parse_table
from ckptz.entropy.streams import CoderId, decode_stream, parse_rans
from ckptz.errors import CorruptionError, FormatError
from ckptz.kernels import planes_on_gpu, rans_on_gpu
from ckptz.kernels.floats import Bytes, Frequencies
from ckptz.kernels.torch import UNSIGNED, current

Array: TypeAlias = np.ndarray[Any, Any]


def decodes(header: FrameHeader) -> bool:
    """Tell whether the chunks of a frame can be decoded here."""
    plan = header.plan
    return plan.quant_map is None and plan.predictor is Predictor.ZERO and not plan.rules


@dataclass(slots=True)
class _Batch:
    """The streams of some runs, and where their codes go in one buffer of planes."""

    plain: list[tuple[int, Bytes]] = field(default_factory=list)
    constant: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, code
    # begin, codes, table, lane states, words
    coded: list[tuple[int, int, Frequencies, Array, Array]] = field(default_factory=list)
    chunk_of: list[tuple[Run, int]] = field(default_factory=list)  # of each coded stream

    def add(self, coder: int, data: Bytes, begin: int, n: int) -> None:
        """Add a stream of n codes.

        Raises:
            FormatError: the bytes are not one.
        """
        if coder == CoderId.RANS_OWN and n:
            source = ByteReader(data.data)
            self.coded.append((begin, n, parse_table(source), *parse_rans(source)))
        elif coder == CoderId.CONSTANT and n and len(data) == 1:
            self.constant.append((begin, begin + n, int(data[0])))
        elif coder == CoderId.STORED and len(data) == n:
            self.plain.append((begin, data))
        else:
            codes = np.empty(n, np.uint8)
            decode_stream(coder, data.data, codes)
            self.plain.append((begin, codes))

    def decode(self, planes: torch.Tensor) -> list[tuple[Run, int]]:
        """Fill the planes; gives the chunks whose words are wrong."""
        for begin, codes in self.plain:
            planes[begin : begin + len(codes)].copy_(_staged(codes, planes.device), non_blocking=True)
        for begin, end, code in self.constant:
            planes[begin:end] = code
        if not self.coded:
            return []
        begins, n_codes, tables, states, words = zip(*self.coded, strict=True)
        n_words = np.array([len(w) for w in words])
        lanes = np.full((len(words), 32), 1 << 16, np.uint32)
        for row, of_stream in zip(lanes, states, strict=True):
            row[: len(of_stream)] = of_stream
        n_lanes = np.array([len(s) for s in states])
        streams = rans_on_gpu().single(np.array(begins), np.array(n_codes), n_lanes, np.stack(tables))
        is_whole = rans_on_gpu().rans_decode(
            _staged(np.concatenate(words), planes.device).to(planes.device, non_blocking=True),
            np.cumsum(n_words) - n_words,
            n_words,
            torch.from_numpy(lanes).to(planes.device),
            streams,
            planes,
        )
        return [self.chunk_of[i] for i in np.flatnonzero(is_whole.cpu().numpy() == 0)]


def _staged(array: Array, device: torch.device) -> torch.Tensor:
    """Copy to memory that a device reads from at full speed."""
    host = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.numpy()[:] = array.view(np.uint8)
    return host.view(UNSIGNED[array.itemsize])


def decode_runs(runs: Sequence[Run]) -> None:
    """Decode all chunks of some runs into their units, in one launch for each kind of work.

    Beside the units it takes at most twice their bytes on the device: planes, and words.

    Raises:
        FormatError: what `decode_chunk` raises of the first chunk that is wrong.
    """
    runs = [run for run in runs if len(run.out)]
    if runs:
        with current(runs[0].out.device):
            _decode(runs)


def _decode(runs: Sequence[Run]) -> None:
    batch, at = _Batch(), [0]
    for run in runs:
        for index, payload, begin, end in run.chunks():
            _add(batch, run, index, payload, at[-1], begin, end)
        at.append(at[-1] + run.out.nbytes)
    planes = torch.empty(at[-1], dtype=torch.uint8, device=runs[0].out.device)
    wrong = batch.decode(planes)
    checksums = []
    for run, begin, end in zip(runs, at[:-1], at[1:], strict=True):
        mode = kernel_mode(run.header.plan.mode, run.header.dtype)
        planes_on_gpu().merge_planes(planes[begin:end].view(-1, len(run.out)), run.out, mode, run.out)
        checksums.append(planes_on_gpu().xxh64_of_chunks(run.out, CHUNK_UNITS))
    found = iter(torch.cat(checksums).cpu().numpy().tolist())
    for run in runs:
        for index, *_ in run.chunks():
            if next(found) != run.header.chunks[index].decoded:
                wrong.append((run, index))
    if wrong:
        _refuse(*wrong[0])


def _add(batch: _Batch, run: Run, index: int, payload: Bytes, at: int, begin: int, end: int) -> None:
    offset = 0
    for j, stream in enumerate(run.header.chunks[index].streams):
        data = payload[offset : offset + stream.n_bytes]
        offset += stream.n_bytes
        try:
            batch.add(stream.coder, data, at + j * len(run.out) + begin, end - begin)
        except FormatError:
            _refuse(run, index)
        batch.chunk_of += [(run, index)] * (len(batch.coded) - len(batch.chunk_of))


def _refuse(run: Run, index: int) -> NoReturn:
    """Say what is wrong with a chunk by decoding it on the host, which names the rule."""
    _, payload, begin, end = next(chunk for chunk in run.chunks() if chunk[0] == index)
    units = np.empty(end - begin, UNIT_TYPES[run.header.dtype.unit_bytes])
    first = run.first * CHUNK_UNITS
    with run.naming():
        decode_chunk(run.header, index, payload, ChunkSources(first + begin, first + end), units)
        raise CorruptionError(f"chunk {index}: the GPU decodes it wrongly, the CPU does not; load to 'cpu'")
