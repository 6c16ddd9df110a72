"""Decoding chunks of frames on a GPU: coded bytes go up, units are made there. See spec/05-frame.md#decoding.

Frames of all kinds, alone or against others; `ckptz.codec.decode.decodes_there` tells of the exceptions.
These are decoded by `ckptz.codec.decode` on the host, and so are streams of the coder zstd.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptz.bits import ByteReader
from ckptz.class_rules import N_MAGNITUDE_CLASSES, BaseCode, ClassRule, Magnitude, Row
from ckptz.codec.decode import Run, check_stored, read_plane
from ckptz.codec.plan import Predictor, kernel_mode
from ckptz.codec.units import (
    CHUNK_UNITS,
    UNIT_TYPES,
    MapFunction,
    Part,
    TensorSource,
    Units,
    n_chunks_of,
)
from ckptz.entropy.frequency import parse_table
from ckptz.entropy.streams import CoderId, Segments, decode_stream, parse_rans, single
from ckptz.errors import CorruptionError, FormatError
from ckptz.kernels import floats, planes_on_gpu, rans_on_gpu, values_on_gpu
from ckptz.kernels.floats import Bytes, Counts
from ckptz.kernels.torch import UNIT_TYPES as SIGNED
from ckptz.kernels.torch import UNSIGNED, current

Array: TypeAlias = np.ndarray[Any, Any]
FLOATS: Final = {floats.F32: torch.float32, floats.BF16: torch.bfloat16, floats.F16: torch.float16}


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of units on the device, in chunks.

    Attributes:
        labels: of the units, uint8 [n], or int16 where there are more than 256 classes.
        counts: units of each chunk and class, on the host [n_chunks, n_classes or 256].
    """

    labels: torch.Tensor
    counts: Counts

    @classmethod
    def of(cls, labels: torch.Tensor, n_classes: int) -> Classes:
        """Count the units of each class."""
        if n_classes <= 256:
            counts = planes_on_gpu().histograms(labels[None], CHUNK_UNITS)[0]
        else:
            parts = torch.split(labels, CHUNK_UNITS)
            counts = torch.stack([torch.bincount(part, minlength=n_classes) for part in parts])
        return cls(labels, counts.cpu().numpy().astype(np.int64))

    @classmethod
    def by_magnitude(cls, base: torch.Tensor) -> Classes:
        """Find the classes of units by the magnitudes of their base [n]."""
        return cls.of(planes_on_gpu().magnitude_classes(base), N_MAGNITUDE_CLASSES)

    def order(self, chunk: int) -> torch.Tensor:
        """Give the order of a chunk's units when they are grouped by class: indices, int64 [n]."""
        labels = self.labels[chunk * CHUNK_UNITS : (chunk + 1) * CHUNK_UNITS]
        return torch.sort(labels, stable=True).indices

    def used(self, chunk: int) -> tuple[Counts, Counts]:
        """Give the classes that a chunk has, ascending, and its units of each."""
        used = np.flatnonzero(self.counts[chunk])
        return used, self.counts[chunk][used]


@dataclass(slots=True)
class _Batch:
    """The streams of some runs, and where their codes go in one buffer of planes."""

    plain: list[tuple[int, Bytes]] = field(default_factory=list)
    constant: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, code
    scattered: list[tuple[Array, Bytes]] = field(default_factory=list)  # positions, codes
    coded: list[tuple[int, Segments, Array, Array]] = field(default_factory=list)  # begin, way, states, words
    chunk_of: list[tuple[Run, int]] = field(default_factory=list)  # of each coded stream

    def add(self, coder: int, data: Bytes, begin: int, n: int, shared: Segments | None) -> None:
        """Add a stream of n codes; `shared` is its way through the tables of the tensor.

        Raises:
            FormatError: the bytes are not one.
        """
        source = ByteReader(data.data)
        if coder == CoderId.RANS_OWN and n:
            self.coded.append((begin, single(parse_table(source), n), *parse_rans(source)))
        elif coder == CoderId.RANS_SHARED and n and shared is not None:
            self.coded.append((begin, shared, *parse_rans(source)))
        elif coder == CoderId.CONSTANT and n and len(data) == 1:
            self.constant.append((begin, begin + n, int(data[0])))
        elif coder == CoderId.SPARSE and n:
            common, positions, codes = read_plane(source, n)
            self.constant.append((begin, begin + n, common))
            self.scattered.append((positions + begin, codes))
        elif coder == CoderId.STORED and len(data) == n:
            self.plain += [(begin, data)] * bool(n)
        else:
            codes = np.empty(n, np.uint8)
            decode_stream(coder, data.data, codes, shared)
            self.plain.append((begin, codes))

    def decode(self, planes: torch.Tensor) -> list[tuple[Run, int]]:
        """Fill the planes; gives the chunks whose words are wrong."""
        for begin, codes in self.plain:
            put(planes[begin : begin + len(codes)], codes)
        for begin, end, code in self.constant:
            planes[begin:end] = code
        if self.scattered:
            positions, found = (np.concatenate(parts) for parts in zip(*self.scattered, strict=True))
            there = (
                _staged(a, planes.device).to(planes.device, non_blocking=True) for a in (positions, found)
            )
            planes.index_copy_(0, *there)
        if not self.coded:
            return []
        begins, ways, states, words = zip(*self.coded, strict=True)
        n_words = np.array([len(w) for w in words])
        lanes = np.full((len(words), 32), 1 << 16, np.uint32)
        for row, of_stream in zip(lanes, states, strict=True):
            row[: len(of_stream)] = of_stream
        n_lanes = np.array([len(s) for s in states])
        is_whole = rans_on_gpu().rans_decode(
            _staged(np.concatenate(words), planes.device).to(planes.device, non_blocking=True),
            np.cumsum(n_words) - n_words,
            n_words,
            torch.from_numpy(lanes).to(planes.device),
            rans_on_gpu().joined(np.array(begins), n_lanes, ways),
            planes,
        )
        return [self.chunk_of[i] for i in np.flatnonzero(is_whole.cpu().numpy() == 0)]


def _staged(array: Array, device: torch.device) -> torch.Tensor:
    """Copy to memory that a device reads from at full speed."""
    host = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.numpy()[:] = array.view(np.uint8)
    kind = UNSIGNED[array.itemsize]
    return host.view(torch.int64 if kind == torch.uint64 else kind)


def put(out: torch.Tensor, units: Units) -> None:
    """Bring units [n] from the host to `out` on a device."""
    out.view(torch.uint8).copy_(_staged(units, out.device).view(torch.uint8), non_blocking=True)


def decode(parts: Sequence[Part], run: MapFunction = map) -> list[torch.Tensor | None]:
    """Decode whole chunks of tensors, and what they are stored against, into units on a device.

    Beside the units it takes at most four times their bytes there: planes, words, classes, codes, and tensors
    that classes look at.

    Args:
        parts: what, and where to.
        run: maps a function over what is decoded on the host.

    Returns:
        The codes of each, uint8 [n] on the device, if its frame has any and is decoded there.

    Raises:
        FormatError: what `decode_chunk` raises of the first chunk that is wrong.
    """
    lineages = [source.lineage for source, _, _ in parts]
    roots = [(root, *part[1:]) for (root, _), part in zip(lineages, parts, strict=True) if root is not None]
    for out, units in run(_read, _pieces(roots)):
        put(out, units)
    over = zip(lineages, parts, strict=True)
    return decode_over([(frames, first, out) for (_, frames), (_, first, out) in over])


def decode_over(parts: Sequence[tuple[Sequence[Any], int, torch.Tensor]]) -> list[torch.Tensor | None]:
    """Decode frames, each (frames of `lineage`, first chunk, units on the device), over what these hold.

    Gives the codes of each, as `decode` does.
    """
    codes: list[torch.Tensor | None] = [None] * len(parts)
    for level in range(max((len(frames) for frames, _, _ in parts), default=0)):
        runs = {}
        for i, (frames, first, out) in enumerate(parts):
            if level < len(frames):
                frame, only_codes = frames[level]
                runs[i] = frame.run(first, first + n_chunks_of(len(out)), out, codes[i], only_codes)
        for i, made in zip(runs, decode_runs(list(runs.values())), strict=True):
            codes[i] = made
    return codes


def _pieces(parts: Sequence[Part]) -> Iterator[tuple[TensorSource, int, torch.Tensor]]:
    for source, first, out in parts:
        for i, piece in enumerate(torch.split(out, CHUNK_UNITS)):
            yield source, (first + i) * CHUNK_UNITS, piece


def _read(task: tuple[TensorSource, int, torch.Tensor]) -> tuple[torch.Tensor, Units]:
    source, begin, out = task
    return out, source.units(begin, begin + len(out))


def decode_runs(runs: Sequence[Run]) -> list[torch.Tensor | None]:
    """Decode all chunks of some runs into their units, in one launch for each kind of work.

    Returns:
        The codes of each, uint8 [n], if a quantization map made them.

    Raises:
        FormatError: what `decode_chunk` raises of the first chunk that is wrong.
    """
    whole = [run for run in runs if len(run.out)]
    if not whole:
        return [None] * len(runs)
    with current(whole[0].out.device):
        made = iter(_decode(whole))
    return [next(made) if len(run.out) else None for run in runs]


def _decode(runs: Sequence[Run]) -> list[torch.Tensor | None]:
    batch, at = _Batch(), [0]
    classes = _classes(runs)
    for run, found in zip(runs, classes, strict=True):
        numbers = _whole_streams(run)
        for index, payload, begin, end in run.chunks():
            places = (at[-1] + row * len(run.out) + begin for row in range(len(numbers)))
            wanted = [(j, place, end - begin) for j, place in zip(numbers, places, strict=True)]
            _add(batch, run, index, payload, wanted, found)
        at.append(at[-1] + len(numbers) * len(run.out))
    buffer = torch.empty(at[-1], dtype=torch.uint8, device=runs[0].out.device)
    _refuse(batch.decode(buffer))
    planes = [
        buffer[first:end].view(-1, len(run.out))
        for run, (first, end) in zip(runs, itertools.pairwise(at), strict=True)
    ]
    for run, found, own in zip(runs, classes, planes, strict=True):
        if found is not None:
            _ungroup(run, found, own)
    exact = _exact(runs, planes)
    checks = []
    for run, found, own, kept in zip(runs, classes, planes, exact, strict=True):
        if run.header.plan.quant_map is None:
            mode = kernel_mode(run.header.plan.mode, run.header.dtype)
            planes_on_gpu().merge_planes(own, run.out, mode, run.out)
        elif not run.only_codes:
            checks.append((run, restore(run, found, own[0], kept)))
    _check(runs, checks)
    return [None if r.header.plan.quant_map is None else own[0] for r, own in zip(runs, planes, strict=True)]


def _whole_streams(run: Run) -> Sequence[int]:
    """Number the streams that have a code for each unit: byte planes, or the codes of a map and a mask."""
    plan, n_bytes = run.header.plan, run.header.dtype.unit_bytes
    if plan.quant_map is None:
        return range(n_bytes)
    has_mask = plan.quant_map.has_protected and not run.only_codes
    return (0, 1 + n_bytes * (plan.quant_map.escape_code is not None))[: 1 + has_mask]


def _add(
    batch: _Batch,
    run: Run,
    index: int,
    payload: Bytes,
    wanted: Sequence[tuple[int, int, int]],
    classes: Classes | None = None,
) -> None:
    """Add streams of a chunk, each by its number, the place of its first code, and how many it has."""
    record = run.header.chunks[index]
    ends = list(itertools.accumulate((stream.n_bytes for stream in record.streams), initial=0))
    try:
        if run.only_codes:  # no checksum of values is looked at
            check_stored(record, index, payload)
        for j, begin, n in wanted:
            coder, shared = record.streams[j].coder, None
            if classes is not None and coder == CoderId.RANS_SHARED:
                shared = run.header.plan.tables[j].segments(*classes.used(index - run.first))
            batch.add(coder, payload[ends[j] : ends[j + 1]], begin, n, shared)
            batch.chunk_of += [(run, index)] * (len(batch.coded) - len(batch.chunk_of))
    except FormatError:
        _refuse([(run, index)])


def _check(runs: Sequence[Run], finite: Sequence[tuple[Run, torch.Tensor]]) -> None:
    """Require that units have their checksums, and that those that codes stand for are finite."""
    runs = [run for run in runs if not run.only_codes]
    if not runs:
        return
    checksums = [planes_on_gpu().xxh64_of_chunks(run.out, CHUNK_UNITS) for run in runs]
    made = iter(torch.cat(checksums).cpu().numpy().tolist())
    wrong = [
        (run, index)
        for run in runs
        for index, *_ in run.chunks()
        if next(made) != run.header.chunks[index].decoded
    ]
    flags = torch.stack([flag for _, flag in finite]).tolist() if finite else []
    for (run, _), is_finite in zip(finite, flags, strict=True):
        wrong += [] if is_finite else _all_of(run)
    _refuse(wrong)


# --- classes ------------------------------------------------------------------------------------


def _classes(runs: Sequence[Run]) -> list[Classes | None]:
    """Find the classes of the units of each run; None where there are none."""
    beside = _companions(runs)
    found: list[Classes | None] = []
    for run in runs:
        plan = run.header.plan
        if plan.reads_base_codes and not _has_base_codes(run):
            _refuse(_all_of(run))
        found.append(classes_of(run, beside))
    return found


def classes_of(run: Run, beside: Mapping[tuple[int, str], torch.Tensor]) -> Classes | None:
    """Find the classes of the units of a run, as its rules say; `beside` are magnitudes of companions."""
    n_classes, labels = run.header.plan.n_classes, None
    for rule in run.header.plan.rules:
        own = _labels(rule, run, beside)
        before = labels if labels is None or n_classes <= 256 else labels.to(torch.int16)
        labels = own if before is None else before * rule.radix + own
    return None if labels is None else Classes.of(labels, n_classes)


def _companions(runs: Sequence[Run]) -> dict[tuple[int, str], torch.Tensor]:
    """Decode the tensors that classes of runs look at; gives their magnitudes by (id of the run, name)."""
    device, parts = runs[0].out.device, dict[tuple[int, str], Part]()
    for run in runs:
        for name in run.header.plan.companion_names:
            assert run.companions is not None
            source = run.companions(name)
            units = torch.empty(len(run.out), dtype=UNSIGNED[source.dtype.unit_bytes], device=device)
            parts[id(run), name] = source, run.first, units
    decode(list(parts.values()))
    return {key: planes_on_gpu().magnitude_classes(units) for key, (_, _, units) in parts.items()}


def _labels(rule: ClassRule, run: Run, beside: Mapping[tuple[int, str], torch.Tensor]) -> torch.Tensor:
    """Give the labels of a run's units by one rule, uint8 [n]."""
    if isinstance(rule, Magnitude):
        if rule.source:
            return beside[id(run), rule.source]
        labels: torch.Tensor = planes_on_gpu().magnitude_classes(run.out)
        return labels
    if isinstance(rule, BaseCode):
        codes: torch.Tensor | None = run.base_codes
        return torch.zeros(len(run.out), dtype=torch.uint8, device=run.out.device) if codes is None else codes
    size = run.header.row_units if isinstance(rule, Row) else rule.size
    begin = run.first * CHUNK_UNITS
    end = begin + len(run.out)
    own = moved(rule.indices[begin // size : -(-end // size)], run.out.device)
    labels = torch.empty(len(run.out), dtype=torch.uint8, device=run.out.device)
    for part, at in zip(
        torch.split(labels, CHUNK_UNITS), range(begin % size, end, CHUNK_UNITS), strict=False
    ):
        part.copy_(own[torch.arange(at, at + len(part), device=own.device) // size])
    return labels


def _has_base_codes(run: Run) -> bool:
    """Tell whether the codes of the base are those that a run was grouped by."""
    expected = [run.header.chunks[index].base_codes for index, *_ in run.chunks()]
    if run.base_codes is None:
        return not any(expected)
    radix = min(rule.radix for rule in run.header.plan.rules if isinstance(rule, BaseCode))
    made = planes_on_gpu().xxh64_of_chunks(run.base_codes, CHUNK_UNITS).cpu().numpy().tolist()
    return made == expected and int(run.base_codes.max()) < radix


def _ungroup(run: Run, classes: Classes, planes: torch.Tensor) -> None:
    """Put the codes of planes [n_planes, n] that came grouped by class into the order of the units."""
    for index, _, begin, end in run.chunks():
        streams = run.header.chunks[index].streams
        grouped = [j for j, stream in enumerate(streams) if stream.coder == CoderId.RANS_SHARED]
        if not grouped:
            continue
        order = classes.order(index - run.first)
        for j in grouped:
            codes = planes[j, begin:end]
            codes.copy_(torch.empty_like(codes).scatter_(0, order, codes))


# --- values -------------------------------------------------------------------------------------

Exact = list[tuple[torch.Tensor, torch.Tensor]]  # positions int64 [k], and the units there


def _exact(runs: Sequence[Run], planes: Sequence[torch.Tensor]) -> list[Exact]:
    """Decode the values that stand beside codes, where these escaped and where they are protected."""
    batch, at = _Batch(), [0]
    found = [_marked(run, own) for run, own in zip(runs, planes, strict=True)]
    for run, marked in zip(runs, found, strict=True):
        for first, positions in marked:
            n_chunks, numbers = len(run.payloads), range(first, first + run.header.dtype.unit_bytes)
            counts = torch.bincount(positions // CHUNK_UNITS, minlength=n_chunks).tolist()
            places = itertools.accumulate(counts, initial=at[-1])
            for (index, payload, *_), n, place in zip(run.chunks(), counts, places, strict=False):
                wanted = [(j, place + k * len(positions), n) for k, j in enumerate(numbers)]
                _add(batch, run, index, payload, wanted)
            at.append(at[-1] + len(numbers) * len(positions))
    buffer = torch.empty(at[-1], dtype=torch.uint8, device=planes[0].device)
    _refuse(batch.decode(buffer))
    parts = (buffer[first:end] for first, end in itertools.pairwise(at))
    return [
        [(positions, _joined(next(parts), run)) for _, positions in marked]
        for run, marked in zip(runs, found, strict=True)
    ]


def _marked(run: Run, planes: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Find where codes of a run escaped, and what is protected: (first stream of the values, positions)."""
    quant_map, n_bytes = run.header.plan.quant_map, run.header.dtype.unit_bytes
    if quant_map is None:
        return []
    highest = planes.amax(dim=1).tolist()
    if highest[0] >= quant_map.n_codes or max(highest[1:], default=0) > 1:
        _refuse(_all_of(run))
    if run.only_codes:
        return []
    marked = []
    if quant_map.escape_code is not None:
        marked.append((1, planes[0] == quant_map.escape_code))
    if quant_map.has_protected:
        marked.append((2 + n_bytes * len(marked), planes[1] != 0))
    return [(first, mask.nonzero()[:, 0]) for first, mask in marked]


def _joined(planes: torch.Tensor, run: Run) -> torch.Tensor:
    """Make units of their byte planes, one behind the other."""
    n_bytes = run.header.dtype.unit_bytes
    units = torch.empty(len(planes) // n_bytes, dtype=UNSIGNED[n_bytes], device=planes.device)
    if len(units):
        planes_on_gpu().merge_planes(planes.view(n_bytes, -1), units, floats.RAW, units)
    return units


def restore(run: Run, classes: Classes | None, codes: torch.Tensor, exact: Exact) -> torch.Tensor:
    """Turn the codes of a run into units; tells whether all are finite that codes stand for, bool []."""
    plan, table, device = run.header.plan, run.header.value_table, run.out.device
    rows, entries = None, table.by_class
    if classes is None:
        entries = table.entries[table.row_of_class[:1]]
    elif entries is None:
        entries = table.entries
        of_class = moved(table.row_of_class.astype(np.uint8 if len(entries) <= 256 else np.int16), device)
        rows = of_class.index_select(0, classes.labels.to(torch.int32))
    elif len(entries) > 1:
        rows = classes.labels
    values_on_gpu().restore(
        codes,
        rows,
        moved(entries, device),
        table.kind,
        int(plan.domain),
        run.out,
        run.out if plan.predictor is Predictor.BASE else None,
        _outer(run),
        run.first * CHUNK_UNITS,
    )
    out = run.out.view(SIGNED[run.out.element_size()])
    if table.quant_map.zero_code is not None:
        out.masked_fill_(codes == table.quant_map.zero_code, 0)
    is_finite = run.out.view(FLOATS[table.kind]).isfinite()
    for positions, units in exact:
        out.index_copy_(0, positions, units.view(out.dtype))
        is_finite.index_fill_(0, positions, True)
    return is_finite.all()


def _outer(run: Run) -> tuple[torch.Tensor, ...] | None:
    """Bring the vectors up whose products predict a run, if there are any."""
    outer = run.header.plan.outer
    if outer is None:
        return None
    try:
        return tuple(moved(vector, run.out.device) for vector in (outer.rows, outer.columns))
    except FormatError:
        _refuse(_all_of(run))
        raise


def moved(array: Array, device: torch.device) -> torch.Tensor:
    """Bring an array to a device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


# --- faults -------------------------------------------------------------------------------------


def _all_of(run: Run) -> list[tuple[Run, int]]:
    return [(run, index) for index, *_ in run.chunks()]


def _refuse(wrong: Sequence[tuple[Run, int]]) -> None:
    """Say what is wrong with chunks, if there are any, by decoding them on the host, which names the rule."""
    for run, index in wrong:
        begin, end = next((begin, end) for i, _, begin, end in run.chunks() if i == index)
        run.on_host(index, np.empty(end - begin, UNIT_TYPES[run.header.dtype.unit_bytes]))
    if wrong:
        raise CorruptionError(
            f"chunk {wrong[0][1]}: the GPU decodes it wrongly, the CPU does not; load to 'cpu'"
        )
