"""Tensors encoded and decoded where they live: the bytes of the host, in Triton's interpreter without a GPU.

Host memory stands for a device there: it is said to have kernels, and tensors in it to live elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

import ckptz.torch
from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy, KMeans, Lossless, safe_open
from ckptz.api import apply as api_apply
from ckptz.api import read as api_read
from ckptz.codec import decode as codec_decode
from ckptz.codec import on_device as on_device_codec
from ckptz.codec import units as codec_units
from ckptz.codec.decode import Run
from ckptz.codec.frame import FrameHeader
from ckptz.codec.plan import Plan, exact_plan
from ckptz.codec.units import ChunkSources
from ckptz.container.reader import FrameSource
from ckptz.dtypes import dtype_of
from ckptz.encoding import chunk as encoding_chunk
from ckptz.encoding import grid_on_device, planes_on_device
from ckptz.encoding import on_device as on_device_encoding
from ckptz.encoding.draft import Draft
from ckptz.encoding.near import Near
from ckptz.entropy import streams
from ckptz.errors import ChecksumError, MissingBaseError
from ckptz.frameworks import torch as torch_frameworks
from ckptz.frameworks.torch import stored_type
from ckptz.integrations import linked, sharded
from ckptz.integrations.sharded import ShardedCheckpointer
from ckptz.kernels import triton_values
from ckptz.kernels.floats import NEAREST
from ckptz.methods import lossless
from ckptz.methods.state import Moments
from ckptz.parallel import Workers
from ckptz.pipeline import write
from ckptz.torch import apply_, load_file, save_file
from ckptz.training import device as training_device
from tests.support import quick_kernels, vector_support
from tests.support.frame_support import Case, cases

pytestmark = pytest.mark.apps
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_CHUNK = 512


def moved(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def back(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()


# --- whole chunks -------------------------------------------------------------------------------


def cut_chunks(n_units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptz.") and hasattr(module, "CHUNK_UNITS"):
            monkeypatch.setattr(module, "CHUNK_UNITS", n_units)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a step of a coder."""
    cut_chunks(SMALL_CHUNK, monkeypatch)
    monkeypatch.setattr(lossless, "MIN_CLASSED_UNITS", 200)
    monkeypatch.setattr(lossless, "SAMPLE_UNITS", 200)  # of one chunk
    monkeypatch.setattr(streams, "LANE_MIN_BYTES", (0, 40, 160))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2 * SMALL_CHUNK + 37, generator=generator) * 0.02
    rare = torch.where(weights.abs() > 0.05, (1e5 * weights).to(torch.int64) % 256, 0)
    return {
        "bf16": weights.bfloat16(),
        "f32": weights[: SMALL_CHUNK + 8],
        "few values": torch.arange(700, dtype=torch.float32) % 3,  # zstd
        "nearly zero": torch.nn.functional.pad(weights[:4].half(), (0, 900)),  # sparse and constant
        "integers": torch.arange(900, dtype=torch.int64),
        "bytes": torch.arange(800, dtype=torch.uint8) % 7,
        "rare": rare.to(torch.uint8),  # sparse, where zstd is not tried
        "one": torch.ones(1, dtype=torch.bfloat16),
        "none": torch.ones(0),
    }


def not_asked(index: int, units: Any) -> None:
    pytest.fail(f"chunk {index} was decoded on the host")


def encoded_here(tensor: torch.Tensor) -> tuple[Any, list[Any]]:
    """A tensor as host memory, and its chunks as the CPU encodes them."""
    dtype, shape = stored_type("", tensor)
    data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    source = codec_units.ArraySource.from_buffer(dtype, shape, data)
    draft = Draft(exact_plan(dtype))
    bounds = codec_units.chunk_bounds(source.n_units)
    chunks = [encoding_chunk.encode_chunk(source, draft, codec_units.ChunkSources(*b)) for b in bounds]
    return source, chunks


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", tensors())
def test_chunks_coded_on_the_device_are_those_of_the_host_and_come_back_there(name: str) -> None:
    tensor = tensors()[name]
    source, chunks = encoded_here(tensor)
    with Workers(1) as workers:
        most = int(2 * SMALL_CHUNK * 2.25 * source.dtype.unit_bytes)
        made = on_device_encoding.encode_on_device(
            tensor.to(DEVICE), source.dtype, source.shape, workers, most
        )
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
def test_whole_chunks_on_hardware_take_bounded_memory(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5 * codec_units.CHUNK_UNITS + 12_345, generator=generator) * 0.02
    tensor = (values * (1 if dtype.is_floating_point else 1000)).to(dtype)
    source, chunks = encoded_here(tensor)
    live = tensor.to(DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before, most = torch.cuda.memory_allocated(), 2 * int(2.25 * codec_units.CHUNK_UNITS * dtype.itemsize)
    with Workers(4) as workers:
        made = on_device_encoding.encode_on_device(live, source.dtype, source.shape, workers, most)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * most
    assert [(c.record, bytes(c.payload)) for c in made.chunks] == [(c.record, c.payload) for c in chunks]
    header = FrameHeader(source.dtype, source.shape, made.plan, tuple(c.record for c in chunks))
    out = moved(np.zeros_like(source.flat))
    payloads = [np.frombuffer(c.payload, np.uint8) for c in chunks]
    on_device_codec.decode_runs([Run(header, 0, payloads, out, not_asked)])
    np.testing.assert_array_equal(back(out), source.flat)


# --- files --------------------------------------------------------------------------------------


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory counts as a device with kernels where there is no GPU."""
    for module in (training_device, on_device_encoding):
        monkeypatch.setattr(module, "MIN_ENCODED", 500)
    if DEVICE == "cuda":
        return
    for module in (torch_frameworks, on_device_encoding, api_apply):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    for module in (on_device_codec, on_device_encoding, planes_on_device, grid_on_device, api_apply):
        monkeypatch.setattr(module, "planes_on_gpu", lambda: quick_kernels.PLANES)
        monkeypatch.setattr(module, "rans_on_gpu", lambda: quick_kernels.RANS, raising=False)
    monkeypatch.setattr(on_device_encoding, "agrees_with_host", lambda device: True)
    for module in (training_device, ckptz.torch, sharded):
        monkeypatch.setattr(module, "lives_elsewhere", torch.Tensor.is_floating_point)


@pytest.fixture
def only_here(kernels_everywhere: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A call after which nothing is encoded on a device any more."""

    def switch() -> None:
        for module in (training_device, on_device_encoding):
            monkeypatch.setattr(module, "MIN_ENCODED", 1 << 40)

    return switch


@pytest.fixture
def decoded_on_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors of which a chunk was decoded on the host."""
    names: list[str] = []
    decode = FrameSource.decode_chunk

    def noted(self: FrameSource, index: int, out: Any) -> Any:
        names.append(self.entry.name)
        return decode(self, index, out)

    monkeypatch.setattr(FrameSource, "decode_chunk", noted)
    return names


def by_class() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and what they become: steps that follow from the magnitude, so that classes pay."""
    generator = torch.Generator().manual_seed(3)
    magnitude, mantissa, low = (torch.randint(n, (700,), generator=generator) for n in (16, 60, 2))
    units = (112 + magnitude) * 128 + mantissa
    steps = torch.randperm(16, generator=generator)[magnitude] * 4 + low
    first, second = (each.to(torch.int16).view(torch.bfloat16) for each in (units, units + steps))
    return first, second


def three_steps() -> list[dict[str, torch.Tensor]]:
    """States one after another: many values change, few, and again all of them."""
    generator = torch.Generator().manual_seed(11)
    first = {name: tensors()[name] for name in ("bf16", "f32", "few values", "bytes", "none")}
    first["f64"] = first["f32"][:260].double()
    first["by class"], then = by_class()
    second = {name: tensor.clone() for name, tensor in first.items()}
    for name in ("bf16", "f32", "f64"):
        second[name] *= 1 + 0.01 * torch.randn(second[name].shape, generator=generator)
    second["bytes"][::3] += 1
    second["by class"] = then
    third = {name: tensor.clone() for name, tensor in second.items()}
    third["bf16"][5::97] += 1
    third["f32"] += 0.001 * torch.randn(third["f32"].shape, generator=generator)
    return [first, second, third]


def chain(folder: Path, config: Any = LOSSLESS) -> list[Path]:
    """The files of the three steps, each against the one before, written from host memory."""
    paths = [folder / f"{i}.ckptz" for i in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckptz.torch, "lives_elsewhere", lambda tensor: False)
        for i, state in enumerate(three_steps()):
            save_file(state, paths[i], base=paths[i - 1] if i else None, config=config)
    return paths


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
@pytest.mark.parametrize("config", [LOSSLESS, Lossless(sparse=True)], ids=["dense", "sparse"])
def test_files_are_decoded_on_the_device_over_what_they_are_stored_against(
    tmp_path: Path, config: Lossless, decoded_on_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_read, "DEVICE_BYTES", 9_000)  # several batches
    for path, state in zip(chain(tmp_path, config), three_steps(), strict=True):
        decoded_on_host.clear()
        loaded = load_file(path, DEVICE)
        assert decoded_on_host == []
        assert loaded.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(loaded[name].cpu(), tensor)
            assert loaded[name].device.type == DEVICE


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_what_stands_on_plain_files_is_decoded_over_what_the_host_brings(
    tmp_path: Path, decoded_on_host: list[str]
) -> None:
    first, second, _ = ({"layer.weight": state["f32"].repeat(9).reshape(8, -1)} for state in three_steps())
    safetensors.torch.save_file(first, tmp_path / "plain.safetensors")
    save_file(second, tmp_path / "delta.ckptz", base=tmp_path / "plain.safetensors")
    assert holds(load_file(tmp_path / "delta.ckptz", DEVICE), second)
    assert decoded_on_host == []


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (
            Grid(min_elements=100, moments=Moments(first_step=0.1, second_step=0.5)),
            {"OUTER", "BASE", "ZERO", "Row", "BaseCode", "Magnitude", "escape", "codes alone"},
        ),
        (KMeans(min_elements=100, levels=7), {"ZERO", "BaseCode", "escape", "codes alone"}),
    ],
    ids=["grid", "kmeans"],
)
def test_lossy_runs_are_decoded_on_the_device(
    config: Any, wanted: set[str], tmp_path: Path, decoded_on_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptz.store.steps.weighed_in_folder", lambda _kind, rule, *_: rule)
    generator = torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.Linear(40, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=False)
    chosen: dict[str, Any] = {"anchor_every": 3, "keep": KEPT, "snapshot": "host", "background": False}
    with Checkpointer(tmp_path, model, optimizer, config=config, **chosen) as checkpointer:
        for step in range(1, 4):
            for _ in range(5):
                optimizer.zero_grad()
                inputs = torch.randn(50, 64, generator=generator) * torch.logspace(-2, 1, 64)
                model(inputs).square().sum().backward()
                optimizer.step()
            checkpointer.save(step)
    seen = set()
    for path in sorted(tmp_path.glob("*.ckptz")):
        with safe_open(path, "pt") as file:
            sources = file._opened.sources
            host = {name: file.get_tensor(name) for name in sources}
            for source in sources.values():
                seen |= kinds_of(source.header.plan)
                seen |= {"codes alone"} if any(only_codes for _, only_codes in source.lineage[1]) else set()
        decoded_on_host.clear()
        assert holds(load_file(path, DEVICE), host)
        assert decoded_on_host == []
    assert seen >= wanted


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_a_base_of_which_only_codes_are_read_is_checked_on_the_device(tmp_path: Path) -> None:
    paths = [tmp_path / "1.ckptz", tmp_path / "2.ckptz"]
    state = {"layer.weight": torch.randn(40, 20, generator=torch.Generator().manual_seed(1))}
    save_file(state, paths[0], config=KMeans(min_elements=100))
    save_file(state, paths[1], base=paths[0], config=KMeans(min_elements=100))
    with safe_open(paths[1], "pt") as file:
        (base, only_codes), _ = file._opened.sources["layer.weight"].lineage[1]
        payload = base.payload(0).tobytes()
    assert only_codes
    data = bytearray(paths[0].read_bytes())
    data[data.index(payload) + len(payload) - 1] ^= 1  # of a value that escaped
    paths[0].write_bytes(data)
    with pytest.raises(ChecksumError, match=r"1\.ckptz: tensor 'layer.weight': chunk 0"):
        load_file(paths[1], DEVICE)


def kinds_of(plan: Plan) -> set[str]:
    """Name what a device has code of its own for in a lossy frame."""
    if plan.quant_map is None:
        return set()
    found = {plan.predictor.name, *(type(rule).__name__ for rule in plan.rules)}
    return found | ({"escape"} if plan.quant_map.escape_code is not None else set())


def outcome(path: Path) -> Any:
    """Give what a file decodes to, or the error."""
    try:
        return {
            name: (tensor.dtype, tensor.shape, tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, tensor in load_file(path, DEVICE).items()
        }
    except Exception as error:
        return type(error), str(error)


def test_all_vectors_are_decoded_and_refused_on_the_device_as_on_the_host(
    kernels_everywhere: None, decoded_on_host: list[str]
) -> None:
    paths = [vector.paths[0] for vector in vector_support.VALID + vector_support.INVALID]
    paths = [path for path in paths if path.suffix == ".ckptz"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_frameworks, "has_kernels", lambda device: False)
        host = [outcome(path) for path in paths]
    left = []
    for path, expected in zip(paths, host, strict=True):
        decoded_on_host.clear()
        assert outcome(path) == expected, path
        if isinstance(expected, dict) and decoded_on_host:
            left.append(path.parent.name)
    assert left == ["delta-classes-by-everything"]  # by another tensor, and against a base


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
@given(cases())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_of_all_plans_are_decoded_on_the_device(case: Case) -> None:
    header, chunks = case.encode()
    payloads = [np.frombuffer(chunk.payload, np.uint8) for chunk in chunks]
    base, n = case.base, header.n_units
    assert base is not None
    codes = base.codes(0, n) if case.plan.reads_base_codes else None
    base_codes = None if codes is None else moved(codes)
    for only_codes in (True, False):
        out = moved(base.units(0, n).copy())
        run = Run(header, 0, payloads, out, not_asked, base_codes, only_codes, lambda name: case.companion)
        [made] = on_device_codec.decode_runs([run])
        assert made is not None
        np.testing.assert_array_equal(back(made), case.decode_codes(header, payloads))
    np.testing.assert_array_equal(back(out), case.decode(header, payloads))


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_slices_over_several_chunks_are_taken_on_the_device(
    tmp_path: Path, decoded_on_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_read, "DEVICE_BYTES", 20_000)
    weight = torch.arange(50 * 47, dtype=torch.int32).reshape(50, 47)
    save_file({"weight": weight}, tmp_path / "1.ckptz")
    save_file({"weight": weight + 3}, tmp_path / "2.ckptz", base=tmp_path / "1.ckptz")
    decoded_on_host.clear()
    with safe_open(tmp_path / "2.ckptz", "pt", DEVICE) as file:
        part = file.get_slice("weight")
        for index in (slice(None), slice(2, 49, 7), (slice(None), slice(3, 40, 2)), ([49, 0, 40, 40],)):
            assert torch.equal(part[index].cpu(), weight[index] + 3)
        assert decoded_on_host == []
        assert torch.equal(part[17].cpu(), weight[17] + 3)  # of one chunk, which is kept
        assert decoded_on_host


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_a_wrong_base_is_noticed_on_the_device(tmp_path: Path) -> None:
    paths = chain(tmp_path)
    data = bytearray(paths[0].read_bytes())
    with safe_open(paths[0], "pt") as file:
        payload = file._opened.sources["f32"].payload(0).tobytes()
    data[data.index(payload) + 60] ^= 1
    paths[0].write_bytes(data)
    with pytest.raises(ChecksumError, match=r"0\.ckptz: tensor 'f32': chunk 0"):
        load_file(paths[2], DEVICE)


@pytest.mark.usefixtures("small_chunks")
def test_the_kernels_themselves_decode_a_delta(
    tmp_path: Path, decoded_on_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = by_class()
    save_file({"weight": first}, tmp_path / "1.ckptz")
    save_file({"weight": second}, tmp_path / "2.ckptz", base=tmp_path / "1.ckptz")
    with safe_open(tmp_path / "2.ckptz", "pt") as file:
        coders = {s.coder for chunk in file._opened.sources["weight"].header.chunks for s in chunk.streams}
    assert streams.CoderId.RANS_SHARED in coders
    monkeypatch.setattr(torch_frameworks, "has_kernels", lambda device: True)
    decoded_on_host.clear()
    assert torch.equal(load_file(tmp_path / "2.ckptz", DEVICE)["weight"].cpu(), second)
    assert decoded_on_host == []


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("snapshot", ["coded", "device", "host"])
def test_runs_on_hardware_write_the_files_of_the_host_in_bounded_memory(
    snapshot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(folder: Path, device: str) -> tuple[dict[str, bytes], int]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3000, 2000)
        moved = [1e-3 * torch.randn_like(model.weight) for _ in range(3)]
        model, extra = model.to(device), 0
        settings: dict[str, Any] = {"anchor_every": 3, "snapshot": snapshot, "background": False}
        with Checkpointer(folder, model, **settings) as checkpointer:
            for step, change in enumerate(moved, 1):
                with torch.no_grad():
                    model.weight += change.to(device)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                checkpointer.save(step)
                extra = max(extra, torch.cuda.max_memory_allocated() - before)
                assert torch.cuda.memory_allocated() - before < 1 << 20
        with safe_open(sorted(folder.glob("*[0-9].ckptz"))[-1], "pt", device) as file:
            assert torch.equal(file.get_tensor("model.weight"), model.weight)
        return {path.name: path.read_bytes() for path in folder.glob("*[0-9].ckptz")}, extra

    monkeypatch.setattr("ckptz.store.steps.weighed_in_folder", lambda _kind, rule, *_: rule)
    there, extra = saved(tmp_path / "there", "cuda")
    assert extra < 6_002_000 * 4 * 7
    assert there == saved(tmp_path / "here", "cpu")[0]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("sparse", [False, True])
def test_deltas_on_hardware_are_loaded_and_applied_over_whole_chunks(sparse: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    first = {"weight": torch.randn(3_300_000, generator=generator).bfloat16(), "norm": torch.ones(5000)}
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["weight"][:: 60 if sparse else 3] *= 1.01
    save_file(first, tmp_path / "1.ckptz")
    save_file(
        moved_state(second), tmp_path / "2.ckptz", base=tmp_path / "1.ckptz", config=Lossless(sparse=sparse)
    )
    assert holds(load_file(tmp_path / "2.ckptz", DEVICE), second)
    live = moved_state(first)
    apply_(live, tmp_path / "2.ckptz")
    assert holds(live, second)


# --- live tensors -------------------------------------------------------------------------------


@pytest.fixture
def live_there(kernels_everywhere: None, small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous tensors are edited as those on a device are."""

    def made(dtype: Any, shape: Any, tensor: torch.Tensor) -> Any:
        flat = tensor.reshape(-1).view(torch.uint8).view(api_apply._SIGNED[dtype.unit_bytes])
        return api_apply._FlatTensor(dtype, shape, flat)

    if DEVICE == "cpu":
        monkeypatch.setattr(api_apply, "_contiguous", made)


def moved_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().to(DEVICE) for name, tensor in state.items()}


def holds(live: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(live[name].cpu(), tensor) for name, tensor in state.items())


@pytest.mark.usefixtures("live_there")
@pytest.mark.parametrize("check", ["base", "stored"])
@pytest.mark.parametrize("config", [LOSSLESS, Lossless(sparse=True)], ids=["dense", "sparse"])
def test_deltas_are_applied_to_tensors_on_the_device(
    tmp_path: Path, config: Lossless, check: Any, decoded_on_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_apply, "DEVICE_BYTES", 20_000)
    paths, states = chain(tmp_path, config), three_steps()
    live = moved_state(states[0])
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    for path, state, before in zip(paths[1:], states[1:], states, strict=False):
        decoded_on_host.clear()
        report = apply_(live, path, check=check)
        assert decoded_on_host == []
        assert holds(live, state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api_apply, "has_kernels", lambda device: False)
            assert report == apply_(moved_state(before), path, check=check)
    for tensor in live.values():
        tensor.zero_()
    assert apply_(live, paths[0], check=check).n_changed_tensors == 6
    assert holds(live, states[0])
    assert apply_(live, paths[0], check="base").n_written == 0
    assert places == {name: tensor.data_ptr() for name, tensor in live.items()}


@pytest.mark.usefixtures("live_there")
@pytest.mark.parametrize("check", ["base", "stored"])
def test_lossy_files_are_applied_to_tensors_on_the_device(
    check: Any, tmp_path: Path, decoded_on_host: list[str]
) -> None:
    paths, generator = [tmp_path / "1.ckptz", tmp_path / "2.ckptz"], torch.Generator().manual_seed(2)
    first = {"layer.weight": torch.randn(40, 60, generator=generator)}
    second = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in first.items()}
    moments = {f"layer.weight.{name}": second["layer.weight"].square() for name in ("exp_avg", "exp_avg_sq")}
    save_file({**first, **moments}, paths[0], config=Grid(min_elements=100))
    live = {**moved_state(first), **moved_state(moments)}
    apply_(live, paths[0], check=check)
    # A first moment depends on another tensor, which may be written before it.
    assert set(decoded_on_host) == {"layer.weight.exp_avg", "layer.weight.exp_avg_sq"}
    restored = load_file(paths[0], DEVICE)
    assert holds(live, {name: tensor.cpu() for name, tensor in restored.items()})
    save_file(second, paths[1], base=paths[0], config=Grid(min_elements=100))
    decoded_on_host.clear()
    apply_(live, paths[1], check=check)
    assert decoded_on_host == []
    expected = load_file(paths[1], DEVICE)
    assert holds(live, {name: tensor.cpu() for name, tensor in expected.items()})
    with pytest.raises(MissingBaseError):
        apply_(live, paths[1])


@pytest.mark.usefixtures("live_there")
@pytest.mark.parametrize("config", [LOSSLESS, Lossless(sparse=True)], ids=["dense", "sparse"])
def test_other_values_on_the_device_are_noticed_and_nothing_is_written(
    tmp_path: Path, config: Lossless
) -> None:
    paths, states = chain(tmp_path, config), three_steps()
    other = {name: tensor.clone() for name, tensor in states[0].items()}
    other["f32"][-1] += 1
    live = moved_state(other)
    with pytest.raises(MissingBaseError, match="is not the checkpoint that this delta was made from"):
        apply_(live, paths[1])
    assert holds(live, other)
    live = moved_state(states[1])
    with pytest.raises(MissingBaseError, match="it was applied before"):
        apply_(live, paths[1])


@pytest.mark.usefixtures("live_there")
def test_an_interrupted_write_on_the_device_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, states = chain(tmp_path), three_steps()
    live, n_calls = moved_state(states[0]), 0
    decode = api_apply._FlatTensor.decode_there

    def interrupted(self: Any, *args: Any) -> None:
        nonlocal n_calls
        n_calls += 1
        decode(self, *args)
        if n_calls == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(api_apply._FlatTensor, "decode_there", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply_(live, paths[1])
    assert n_calls == 2
    assert holds(live, states[0])


# --- files --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels_everywhere")
def test_a_damaged_file_names_file_tensor_and_chunk_on_the_device_too(tmp_path: Path) -> None:
    path = tmp_path / "1.ckptz"
    save_file({"weight": tensors()["bf16"][:1500]}, path)
    with safe_open(path, "pt") as file:
        payload = file._opened.sources["weight"].payload(0)
    data = bytearray(path.read_bytes())
    data[data.index(payload.tobytes()) + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"1\.ckptz: tensor 'weight': chunk 0"):
        load_file(path, DEVICE)


def stepped(seed: int = 0) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(30, 20).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), fused=False)


def saved(folder: Path, n_steps: int = 3, **settings: Any) -> tuple[dict[str, bytes], Any]:
    """The bytes of a run's files, and the last report."""
    model, optimizer = stepped()
    with Checkpointer(folder, model, optimizer, **settings) as checkpointer:  # writes beside training
        for step in range(1, n_steps + 1):
            optimizer.zero_grad()
            model(torch.full((3, 30), 0.1 * step, device=DEVICE)).square().sum().backward()
            optimizer.step()
            checkpointer.save(step)
        report = checkpointer.wait()
        assert checkpointer._snapshot.elsewhere == {}
    return {path.name: path.read_bytes() for path in folder.glob("*.ckptz")}, report


KEPT = KeepPolicy(last=3)


@pytest.mark.usefixtures("deltas_at_any_cost", "small_chunks")
@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"anchor_every": 1}, ""),
        ({"anchor_every": 3, "snapshot": "device"}, ""),
        (
            {"anchor_every": 3},
            "3 tensors of 0.0 MB were encoded on the host: the GPU encodes what loses nothing, and",
        ),
        (
            {"config": Grid(step=1.0), "snapshot": "device"},
            "3 tensors of 0.0 MB were encoded on the host: the GPU",
        ),
        ({"anchor_every": 1, "snapshot": "host"}, ""),
    ],
    ids=["anchors", "deltas", "deltas, coded", "grid", "host"],
)
def test_a_checkpointer_writes_the_files_of_the_host_from_tensors_on_the_device(
    settings: dict[str, Any], note: str, tmp_path: Path, only_here: Callable[[], None]
) -> None:
    made: list[Any] = []
    encode = on_device_encoding._encoded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device_encoding, "_encoded", lambda *args: made.append(args) or encode(*args))
        there, report = saved(tmp_path / "there", keep=KEPT, **settings)
    found = [one for one in report.notes if "encoded on the host" in one]
    assert len(found) == bool(note)
    assert not note or found[0].startswith(note)
    assert bool(made) == (settings.get("snapshot") != "host")
    assert any(plan.needs_base for _, plan, *_ in made) == (settings.get("snapshot") == "device")
    only_here()
    here, _ = saved(tmp_path / "here", keep=KEPT, **settings)
    assert there == here
    model, optimizer = stepped(1)
    with Checkpointer(tmp_path / "there", model, optimizer, **settings) as checkpointer:
        assert checkpointer.restore_latest() == 3
        assert checkpointer.restored is not None
        assert checkpointer.restored.is_exact


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_without_room_on_the_device_a_snapshot_is_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for two of the three: the weight and its first moment.
    monkeypatch.setattr(training_device, "room_on", lambda device: training_device.DEVICE_BYTES + 5_000)
    _, report = saved(tmp_path, 1, snapshot="device")
    assert report.notes[0].startswith("1 tensors of 0.0 MB were encoded on the host")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("step", [1, 2])
def test_save_file_encodes_tensors_where_they_live(
    step: int, tmp_path: Path, only_here: Callable[[], None]
) -> None:
    paths, states = chain(tmp_path), three_steps()
    state = {name: tensor.to(DEVICE) for name, tensor in states[step].items()}
    save_file(state, tmp_path / "there.ckptz", base=paths[step - 1])
    assert (tmp_path / "there.ckptz").read_bytes() == paths[step].read_bytes()


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
def test_adapters_encode_a_state_where_it_lives(tmp_path: Path) -> None:
    state = {"model": moved_state(three_steps()[0]), "step": 7}
    state["tied"] = state["model"]["f32"]
    job = linked.job_of(state)
    there = {name for name, s in job.tensors.items() if isinstance(s, on_device_encoding.DeviceSource)}
    assert {"model.bf16", "model.f32", "model.f64"} <= there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_device, "lives_elsewhere", lambda tensor: False)
        here = linked.job_of(state)
    assert here.tree == job.tree
    files = []
    for one in (job, here):
        with Workers(1) as workers, (tmp_path / "x").open("w+b") as sink:
            write(sink, one, workers)
        files.append((tmp_path / "x").read_bytes())
    assert files[0] == files[1]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_rank_copies_and_encodes_its_shards_on_its_device(
    tmp_path: Path, only_here: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "00000000")
    files = []
    for snapshot in ("device", "host"):
        folder, (model, optimizer) = tmp_path / snapshot, stepped()
        with ShardedCheckpointer(folder, model, optimizer, snapshot=snapshot) as checkpointer:
            for step in (1, 2):
                saved = model.weight.detach().clone()
                checkpointer.save(step)
                with torch.no_grad():  # beside the writer
                    model.weight += 0.01
            checkpointer.restore(2)
        assert model.weight.equal(saved)
        files.append({p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.ckptz")})
        only_here()
    assert files[0] == files[1]


def test_a_device_is_believed_once_its_bytes_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_chunks(256, monkeypatch)
    monkeypatch.setattr(streams, "LANE_MIN_BYTES", (0, 40, 160))
    agrees, encode = on_device_encoding.agrees_with_host.__wrapped__, on_device_encoding._encoded
    assert agrees(torch.device(DEVICE))
    for is_delta in (False, True):

        def wrong(source: Any, plan: Any, *args: Any, is_delta: bool = is_delta) -> Any:
            source.flat[-1] ^= plan.needs_base == is_delta
            return encode(source, plan, *args)

        monkeypatch.setattr(on_device_encoding, "_encoded", wrong)
        assert not agrees(torch.device(DEVICE))


@pytest.mark.parametrize("part", ["codes", "sums", "drawn codes against a base"])
def test_a_device_is_believed_once_it_rounds_to_grids_as_the_host_does(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_chunks(128, monkeypatch)
    codes, powers = grid_on_device._codes, triton_values.powers
    check, bf16 = on_device_encoding._agrees_on_grid, dtype_of("BF16")
    with Workers(1) as workers:
        assert check(torch.device(DEVICE), bf16, workers)

        def wrong(source: Any, grid: Any, base: Any, *bounds: int) -> torch.Tensor:
            made = codes(source, grid, base, *bounds)
            made[3] ^= part == "codes" or (part != "sums" and base is not None and grid.key != NEAREST)
            return made

        def wrong_sums(*args: Any) -> list[float]:
            return [np.nextafter(found, (part == "sums" and np.inf) or found) for found in powers(*args)]

        monkeypatch.setattr(grid_on_device, "_codes", wrong)
        monkeypatch.setattr(triton_values, "powers", wrong_sums)
        assert not check(torch.device(DEVICE), bf16, workers)


@pytest.mark.usefixtures("kernels_everywhere", "small_chunks")
@pytest.mark.parametrize("where", ["values", "base"])
def test_values_that_no_grid_fits_are_seen_on_the_device(where: str) -> None:
    values = {name: torch.full((30, 40), 0.5) for name in ("values", "base")}
    values[where][20, 3] = torch.nan
    own, base = (stored_type(name, tensor) for name, tensor in values.items())
    there = on_device_encoding.DeviceSource.of(*own, values["values"].to(DEVICE))
    against = codec_units.ArraySource.from_buffer(*base, values["base"].numpy())
    with Workers(1) as workers:
        close = Near(against, torch.device(DEVICE), workers)
        found = grid_on_device.extent_of(there, close, None, 1 << 20)
    assert found.fault(there.dtype) == "it or its base holds NaN or infinity, so it stays lossless"


@pytest.mark.usefixtures("deltas_at_any_cost", "small_chunks")
def test_a_run_on_the_grid_is_written_on_the_device_as_on_the_host(
    tmp_path: Path, only_here: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Plan] = []
    encode = grid_on_device.encoded_chunks

    def noted(source: Any, draft: Draft, *args: Any) -> Any:
        made.append(draft.plan)
        return encode(source, draft, *args)

    monkeypatch.setattr(grid_on_device, "encoded_chunks", noted)
    files = []
    for folder in (tmp_path / "there", tmp_path / "here"):
        generator = torch.manual_seed(0)
        model = torch.nn.Linear(64, 20).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=False)
        chosen: dict[str, Any] = {"anchor_every": 3, "keep": KEPT, "snapshot": "device", "background": False}
        with Checkpointer(folder, model, optimizer, config=Grid(min_elements=100), **chosen) as checkpointer:
            for step in range(1, 4):
                inputs = torch.randn(50, 64, generator=generator) * torch.logspace(-2, 1, 64)
                model(inputs.to(DEVICE)).square().sum().backward()
                optimizer.step()
                with torch.no_grad():
                    model.weight[0, 0] += 3  # which escapes
                checkpointer.save(step)
        files.append({path.name: path.read_bytes() for path in folder.glob("*.ckptz")})
        only_here()
    assert files[0] == files[1]
    assert [plan.predictor.name for plan in made] == ["ZERO", "BASE", "BASE"]
    assert "escape" in kinds_of(made[0])
