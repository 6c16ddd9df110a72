"""Tensors encoded where they live: the chunks of the host, on hardware too, and whether to trust it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ckptz.codec import decode as codec_decode
from ckptz.codec import on_device as on_device_codec
from ckptz.codec import units as codec_units
from ckptz.codec.decode import Run
from ckptz.codec.frame import FrameHeader
from ckptz.codec.plan import exact_plan
from ckptz.codec.units import ChunkSources
from ckptz.codec.values import KINDS
from ckptz.dtypes import dtype_of
from ckptz.encoding import chunk as encoding_chunk
from ckptz.encoding import there as there_encoding
from ckptz.encoding.draft import Draft
from ckptz.encoding.near import Near, Resident
from ckptz.encoding.on_device import is_trusted
from ckptz.encoding.there import There
from ckptz.entropy import streams
from ckptz.errors import ChecksumError
from ckptz.frameworks.torch import stored_type
from ckptz.kernels import floats, triton_values
from ckptz.methods import trial
from ckptz.methods.first_moment import FirstMoment
from ckptz.methods.grid import UniformGrid
from ckptz.methods.lossless import Exact
from ckptz.methods.second_moment import SecondMoment
from ckptz.parallel import Workers
from tests.support.device_support import DEVICE, SMALL_CHUNK, back, cut_chunks, moved, not_asked, tensors

pytestmark = pytest.mark.apps
pytest_plugins = ["tests.support.device_fixtures"]


def encoded_here(tensor: torch.Tensor) -> tuple[Any, list[Any]]:
    """A tensor as host memory, and its chunks as the CPU encodes them."""
    dtype, shape = stored_type("", tensor)
    data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    source = codec_units.ArraySource.from_buffer(dtype, shape, data)
    draft = Draft(exact_plan(dtype))
    bounds = codec_units.chunk_bounds(source.n_units)
    chunks = [encoding_chunk.encode_chunk(source, draft, codec_units.ChunkSources(*b)) for b in bounds]
    return source, chunks


def encoded_there(source: Any, tensor: torch.Tensor, workers: Workers) -> Any:
    """The same tensor without loss, as its device encodes it."""
    there = There(Resident.of(source.dtype, source.shape, tensor), None, {}, workers)
    return there.encoded(Draft(exact_plan(source.dtype)))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", tensors())
def test_chunks_coded_on_the_device_are_those_of_the_host_and_come_back_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = tensors()[name]
    source, chunks = encoded_here(tensor)
    monkeypatch.setattr(there_encoding, "DEVICE_BYTES", int(2 * SMALL_CHUNK * 2.25 * source.dtype.unit_bytes))
    with Workers(1) as workers:
        made = encoded_there(source, tensor.to(DEVICE), workers)
    assert [(c.record, bytes(c.payload)) for c in made.chunks] == [(c.record, c.payload) for c in chunks]
    if source.n_units > 40:
        np.testing.assert_array_equal(made.units(3, 40), source.units(3, 40))
    header = FrameHeader(source.dtype, source.shape, made.plan, tuple(c.record for c in chunks))
    payloads = [np.frombuffer(c.payload, np.uint8) for c in chunks]
    out = moved(np.zeros_like(source.flat))
    half = len(payloads) // 2
    cut = half * SMALL_CHUNK
    parts = (0, payloads[:half], out[:cut]), (half, payloads[half:], out[cut:])
    on_device_codec.decode_runs([Run(header, *part, on_host=not_asked) for part in parts])
    np.testing.assert_array_equal(back(out), source.flat)


@pytest.mark.usefixtures("small_chunks")
def test_damage_is_reported_as_the_host_reports_it() -> None:
    source, chunks = encoded_here(tensors()["bf16"])
    header = FrameHeader(
        source.dtype, source.shape, exact_plan(source.dtype), tuple(c.record for c in chunks)
    )
    whole = [np.frombuffer(c.payload, np.uint8) for c in chunks]
    damaged = [3, len(whole[1]) - 1, SMALL_CHUNK]
    for at in damaged:
        payload = whole[1].copy()
        payload[at] ^= 0x55

        def on_host(index: int, units: Any, payload: Any = payload) -> None:
            codec_decode.decode_chunk(
                header, index, payload, ChunkSources(SMALL_CHUNK, 2 * SMALL_CHUNK), units
            )

        run = Run(header, 1, [payload], moved(np.zeros_like(source.flat[:SMALL_CHUNK])), on_host)
        with pytest.raises(ChecksumError, match="chunk 1: its stored bytes were changed"):
            on_device_codec.decode_runs([run])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32])
def test_whole_chunks_on_hardware_take_bounded_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5 * codec_units.CHUNK_UNITS + 12_345, generator=generator) * 0.02
    tensor = (values * (1 if dtype.is_floating_point else 1000)).to(dtype)
    source, chunks = encoded_here(tensor)
    live = tensor.to(DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before, most = torch.cuda.memory_allocated(), 2 * int(2.25 * codec_units.CHUNK_UNITS * dtype.itemsize)
    monkeypatch.setattr(there_encoding, "DEVICE_BYTES", most)
    with Workers(4) as workers:
        made = encoded_there(source, live, workers)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * most
    assert [(c.record, bytes(c.payload)) for c in made.chunks] == [(c.record, c.payload) for c in chunks]
    header = FrameHeader(source.dtype, source.shape, made.plan, tuple(c.record for c in chunks))
    out = moved(np.zeros_like(source.flat))
    payloads = [np.frombuffer(c.payload, np.uint8) for c in chunks]
    on_device_codec.decode_runs([Run(header, 0, payloads, out, not_asked)])
    np.testing.assert_array_equal(back(out), source.flat)


def wrong_of(owner: Any, name: str) -> tuple[Any, str, Any]:
    """A function that gives other numbers than it should."""
    right = getattr(owner, name)

    def wrong(*args: Any) -> Any:
        made = right(*args)
        part = made[0] if isinstance(made, tuple) else made
        if isinstance(part, list):
            part[:] = [x * 0.9 if isinstance(x, float) else part[0] for x in part]
        else:
            part.copy_(part * 0.9 if part.is_floating_point() else part + 1)
        return made

    return owner, name, wrong


@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        (Exact, (There, "_exact")),
        (UniformGrid, (There, "_grid_codes")),
        (UniformGrid, (triton_values, "sums_of_pairs")),
        (SecondMoment, (triton_values, "sums_of_runs")),
        (SecondMoment, (there_encoding, "ladder_levels")),
        (FirstMoment, (triton_values, "sums_of_runs")),
        (FirstMoment, (triton_values, "thresholds")),
        (FirstMoment, (there_encoding, "step_levels")),
    ],
    ids=lambda one: one[1] if isinstance(one, tuple) else one.__name__,
)
def test_a_device_is_believed_once_it_writes_what_the_host_writes(
    recipe: type, wrong: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_chunks(256, monkeypatch)
    monkeypatch.setattr(streams, "LANE_MIN_BYTES", (0, 40, 160))
    monkeypatch.setattr(trial, "SHAPE", (6, 85))
    chosen = [
        case for case in trial.cases() if isinstance(case.recipe, recipe) and case.source.dtype.name == "BF16"
    ]
    monkeypatch.setattr(trial, "cases", lambda: chosen)
    assert is_trusted.__wrapped__(torch.device(DEVICE), trial.agrees)
    monkeypatch.setattr(*wrong_of(*wrong))
    assert not is_trusted.__wrapped__(torch.device(DEVICE), trial.agrees)


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
@pytest.mark.parametrize("where", ["values", "base"])
def test_values_that_no_grid_fits_are_seen_on_the_device(where: str) -> None:
    values = {name: torch.full((30, 40), 0.5) for name in ("values", "base")}
    values[where][20, 3] = torch.nan
    dtype, shape = stored_type("", values["values"])
    against = codec_units.ArraySource.from_buffer(dtype, shape, values["base"].numpy())
    source = Resident.of(dtype, shape, values["values"].to(DEVICE))
    with Workers(1) as workers:
        near = Near.decoded(against, torch.device(DEVICE), workers)
        found = There(source, near, {}, workers).extent(None)
    assert found is not None
    assert found.fault(dtype) == "it or its base holds NaN or infinity, so it stays lossless"


def odd(kind: str) -> dict[str, np.ndarray[Any, Any]]:
    """Moments of which some, or all, are no numbers that a step fits."""
    first, second = np.random.default_rng(3).normal(0, 0.02, (2, 6, 300))
    second = second**2
    if kind == "zeros":
        first[:], second[:] = 0, 0
    elif kind == "infinite":
        second[2, ::7], second[3, 0], second[4, 1] = np.inf, np.nan, -1
    elif kind == "subnormal":
        first[1:, ::3] *= 2.0**-140
        second[1:, ::3] *= 2.0**-132
    elif kind == "updates":  # that are divided by the root already
        first *= 1e4
    elif kind == "NaN":
        first[5, 299] = np.nan
    return {"first": first, "second": second}


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("kind", ["zeros", "infinite", "subnormal", "updates", "NaN"])
def test_odd_moments_are_encoded_on_the_device_as_on_the_host(kind: str, dtype: str) -> None:
    with np.errstate(all="ignore"):
        parts = {
            name: codec_units.ArraySource(
                dtype_of(dtype),
                values.shape,
                floats.from_f32(values.astype(np.float32).view(np.uint32).reshape(-1), KINDS[dtype]),
            )
            for name, values in odd(kind).items()
        }
    recipe = FirstMoment(1.0, 0.35, "second")
    first, second = parts["first"], parts["second"]
    firsts = (recipe, replace(recipe, is_kept=True), replace(recipe, source=None))
    cases = [trial.Case(SecondMoment(4.0), second, base) for base in (None, first)]
    cases += [trial.Case(one, first, None, second) for one in firsts]
    with Workers(1) as workers:
        found = is_trusted.__wrapped__(
            torch.device(DEVICE), lambda moved: [case.agrees(moved, workers) for case in cases]
        )
    assert found == [True] * len(cases)
