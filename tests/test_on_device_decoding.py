"""Tensors decoded and edited where they live, as on the host; see `tests.support.device_fixtures`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from ckptz import LOSSLESS, Checkpointer, Grid, KMeans, Lossless, safe_open
from ckptz.api import apply as api_apply
from ckptz.api import read as api_read
from ckptz.codec import on_device as on_device_codec
from ckptz.codec.decode import Run
from ckptz.entropy import streams
from ckptz.errors import ChecksumError, MissingBaseError
from ckptz.frameworks import torch as torch_frameworks
from ckptz.methods.state import Moments
from ckptz.torch import apply_, load_file, save_file
from tests.support import vector_support
from tests.support.device_support import (
    DEVICE,
    KEPT,
    back,
    by_class,
    chain,
    holds,
    kinds_of,
    moved,
    moved_state,
    not_asked,
    tensors,
    three_steps,
)
from tests.support.frame_support import Case, cases

pytestmark = pytest.mark.apps
pytest_plugins = ["tests.support.device_fixtures"]


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


# --- live tensors ---


@pytest.fixture
def live_there(kernels_everywhere: None, small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous tensors are edited as those on a device are."""

    def made(dtype: Any, shape: Any, tensor: torch.Tensor) -> Any:
        flat = tensor.reshape(-1).view(torch.uint8).view(api_apply._SIGNED[dtype.unit_bytes])
        return api_apply._FlatTensor(dtype, shape, flat)

    if DEVICE == "cpu":
        monkeypatch.setattr(api_apply, "_contiguous", made)


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
