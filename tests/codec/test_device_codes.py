"""Weights encoded on their device: codes and files equal those of the CPU kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptz import Checkpointer, KeepPolicy, KMeans
from ckptz.codec.coded import bits_for
from ckptz.codec.histogram import Histogram
from ckptz.codec.partitions import Partitions, fit_partitions
from ckptz.format.sources import CHUNK_VALUES, PATTERN_TYPES
from ckptz.kernels import compiled as cpu
from ckptz.parallel import Workers
from ckptz.store.resolve import open_checkpoint
from ckptz.torch import load_file
from ckptz.training import device

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def host_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat host tensors as device tensors, so that these tests also run without a GPU."""
    monkeypatch.setattr(device, "is_on_device", lambda tensor: True)


def random_weight(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Return a weight [2, n / 2] with standard deviation 0.05, zeros, and values 20 times larger."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * 0.05
    values[::97] = 0
    values[1::991] *= 20
    return values.to(dtype).reshape(2, -1)


def encode(tensor: torch.Tensor, config: KMeans) -> Any:
    """Encode a tensor on its device as "model.weight"; returns a mapping with its codes as "weight"."""
    with Workers(1) as workers:
        return device.code_where_they_live({"weight": tensor}, "model.", config, workers)


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.float32, KMeans(levels=16)),
        *((dtype, KMeans(levels=5, prune=0.3, protect=0.02, protect_as="bf16")) for dtype in DTYPES),
        (torch.bfloat16, KMeans(levels=2, protect=0)),
        (torch.float16, KMeans(levels=255, protect=0.001)),
    ],
)
def test_device_codes_equal_those_of_the_cpu_kernels(
    device_type: str, dtype: torch.dtype, config: KMeans
) -> None:
    tensor = random_weight(dtype, 20_000)
    source = encode(tensor.to(device_type), config)["weight"]
    patterns = tensor.reshape(-1).view(torch.uint8).numpy().view(PATTERN_TYPES[dtype.itemsize])
    kind = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[dtype]
    as_bf16 = config.protect_as == "bf16"
    partitions = Partitions(config.levels, config.prune, config.protect, as_bf16, config.sigma)
    quant_map, quantizer = fit_partitions(Histogram.of(patterns, kind), partitions)
    codes = quantizer.codes(0, len(patterns), patterns)
    packed = cpu().pack_codes(codes, bits_for(quant_map.n_codes))
    assert np.array_equal(source.packed, packed)
    assert np.array_equal(source.quant_map.table.expand(), quant_map.table.expand())
    is_escaped = codes == (quant_map.escape_code if quant_map.escape_code is not None else 256)
    assert np.array_equal(source.kept, quantizer.kept(0, patterns)[is_escaped])
    assert np.array_equal(source.codes_of(0, len(patterns)), codes)


@pytest.mark.parametrize("device_type", DEVICES)
def test_only_codes_and_protected_values_are_copied_to_the_host(device_type: str) -> None:
    """Codes of 4 bits are 12.5 % of the bytes of float32, and protected values 0.5 %."""
    tensor = random_weight(torch.float32, 1 << 16).to(device_type)
    source = encode(tensor, KMeans(levels=15, protect=0.005))["weight"]
    assert source.packed.nbytes + source.kept.nbytes < 0.15 * tensor.nbytes


def save_two_steps(folder: Path, model: nn.Module, config: KMeans) -> tuple[Path, Path]:
    """Save a full file and a delta with movements of 0.001, and return their paths."""
    keep = KeepPolicy(exact=0)
    with Checkpointer(folder, model, config=config, keep=keep, background=False) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.001 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        checkpointer.save(2)
    return folder / "step-00000001.ckptz", folder / "step-00000002.ckptz"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpointer_writes_the_same_values_and_errors_by_device_and_cpu_kernels(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1100, 1000), nn.LayerNorm(1000), nn.Linear(1000, 80)).to(dtype)

    assert new_model()[0].weight.numel() > CHUNK_VALUES
    config = KMeans(levels=12, prune=0.1)
    device_paths = save_two_steps(tmp_path / "device", new_model(), config)
    monkeypatch.setattr(device, "is_on_device", lambda tensor: False)
    cpu_paths = save_two_steps(tmp_path / "cpu", new_model(), config)
    for device_path, cpu_path in zip(device_paths, cpu_paths, strict=True):
        by_device, by_cpu = open_checkpoint(device_path), open_checkpoint(cpu_path)
        assert by_device.content_id() == by_cpu.content_id()
        cpu_records = {entry.name: entry.lossy for entry in by_cpu.container.index.tensors}
        for entry in by_device.container.index.tensors:
            expected = cpu_records[entry.name]
            assert (entry.lossy is None) == (expected is None)
            if entry.lossy is not None and expected is not None:
                assert entry.lossy.max_abs_error == expected.max_abs_error
                assert entry.lossy.rms_error == pytest.approx(expected.rms_error, rel=1e-12)
                assert (entry.lossy.n_pruned, entry.lossy.n_protected) == (
                    expected.n_pruned,
                    expected.n_protected,
                )
        by_device.close()
        by_cpu.close()
        cpu_tensors = load_file(cpu_path)
        assert all(tensor.equal(cpu_tensors[name]) for name, tensor in load_file(device_path).items())


@pytest.mark.parametrize("exact", [0, 1])
def test_weights_are_copied_and_restored_exactly_only_if_the_newest_step_is_exact(
    tmp_path: Path, exact: int
) -> None:
    model = nn.Linear(80, 80)
    weight = model.weight.detach().clone()
    keep = KeepPolicy(exact=exact)
    with Checkpointer(tmp_path, model, config=KMeans(), keep=keep) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        copied_bytes = sum(buffer.nbytes for buffer in checkpointer._snapshot._buffers.values())
        assert (copied_bytes > weight.nbytes) == bool(exact)
        checkpointer.restore(1)
    assert model.weight.equal(weight) == bool(exact)


def test_weights_with_nan_and_tied_weights_are_copied_instead_of_encoded(tmp_path: Path) -> None:
    not_finite, tied = nn.Linear(80, 80), nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    nn.init.constant_(not_finite.weight, float("nan"))
    tied[1].weight = tied[0].weight
    assert not encode(not_finite.weight, KMeans())
    with Workers(1) as workers:
        assert not device.code_where_they_live(dict(tied.state_dict()), "model.", KMeans(), workers)
    for name, model in (("not finite", not_finite), ("tied", tied)):
        keep = KeepPolicy(exact=0)
        with Checkpointer(tmp_path / name, model, config=KMeans(), keep=keep) as checkpointer:
            checkpointer.save(1)
            checkpointer.restore(1)
    assert bool(not_finite.weight.isnan().all())


@pytest.mark.parametrize("full_every", [1, 16])
def test_a_file_of_weights_on_a_device_keeps_the_movement_since_a_restore(
    tmp_path: Path, full_every: int
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(160, 256)
    options: dict[str, Any] = {"config": KMeans(), "keep": KeepPolicy(exact=0), "background": False}
    with Checkpointer(tmp_path, model, full_every=full_every, **options) as checkpointer:
        checkpointer.save(1)
        checkpointer.restore(1)
        start = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += 0.02 * start.std() * torch.randn_like(start)
        movement = (model.weight.detach() - start).double()
        checkpointer.save(2)
        checkpointer.restore(2)
    restored_movement = (model.weight.detach() - start).double()
    assert 0.8 < (restored_movement * movement).sum() / movement.square().sum() < 1.2
