"""Weights coded where they live: the same bytes as on the CPU for the same map, and the same files."""

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
from ckptz.training import device as coding

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory counts as elsewhere, so that all is tried without a device too."""
    monkeypatch.setattr(coding, "is_on_device", lambda tensor: True)


def a_tensor(dtype: torch.dtype, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * 0.05
    values[::97] = 0
    values[1::991] *= 20
    return values.to(dtype).reshape(2, -1)


def coded(tensor: torch.Tensor, config: KMeans) -> Any:
    with Workers(1) as workers:
        return coding.code_where_they_live({"weight": tensor}, "model.", config, workers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.float32, KMeans(levels=16)),
        *((dtype, KMeans(levels=5, prune=0.3, protect=0.02, protect_as="bf16")) for dtype in DTYPES),
        (torch.bfloat16, KMeans(levels=2, protect=0)),
        (torch.float16, KMeans(levels=255, protect=0.001)),
    ],
)
def test_codes_are_those_of_the_cpu_kernels(device: str, dtype: torch.dtype, config: KMeans) -> None:
    tensor = a_tensor(dtype, 20_000)
    source = coded(tensor.to(device), config)["weight"]
    patterns = tensor.reshape(-1).view(torch.uint8).numpy().view(PATTERN_TYPES[dtype.itemsize])
    kind = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[dtype]
    as_bf16 = config.protect_as == "bf16"
    wanted = Partitions(config.levels, config.prune, config.protect, as_bf16, config.sigma)
    quant_map, quantizer = fit_partitions(Histogram.of(patterns, kind), wanted)
    codes = quantizer.codes(0, len(patterns), patterns)
    packed = cpu().pack_codes(codes, bits_for(quant_map.n_codes))
    assert np.array_equal(source.packed, packed)
    assert np.array_equal(source.quant_map.table.expand(), quant_map.table.expand())
    escaped = codes == (quant_map.escape_code if quant_map.escape_code is not None else 256)
    assert np.array_equal(source.kept, quantizer.kept(0, patterns)[escaped])
    assert np.array_equal(source.codes_of(0, len(patterns)), codes)


@pytest.mark.parametrize("device", DEVICES)
def test_only_codes_cross_to_the_host(device: str) -> None:
    tensor = a_tensor(torch.float32, 1 << 16).to(device)
    source = coded(tensor, KMeans(levels=15, protect=0.005))["weight"]
    assert source.packed.nbytes + source.kept.nbytes < 0.15 * tensor.nbytes


def files(folder: Path, model: nn.Module, config: KMeans) -> tuple[Path, Path]:
    keep = KeepPolicy(exact=0)
    with Checkpointer(folder, model, config=config, keep=keep, background=False) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.001 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        checkpointer.save(2)
    return folder / "step-00000001.ckptz", folder / "step-00000002.ckptz"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpointer_writes_the_same_values_and_errors_either_way(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1100, 1000), nn.LayerNorm(1000), nn.Linear(1000, 80)).to(dtype)

    assert a_model()[0].weight.numel() > CHUNK_VALUES
    config = KMeans(levels=12, prune=0.1)
    there = files(tmp_path / "there", a_model(), config)
    monkeypatch.setattr(coding, "is_on_device", lambda tensor: False)
    here = files(tmp_path / "here", a_model(), config)
    for one, other in zip(there, here, strict=True):
        a, b = open_checkpoint(one), open_checkpoint(other)
        assert a.content_id() == b.content_id()
        lossy = {e.name: e.lossy for e in b.container.index.tensors}
        for entry in a.container.index.tensors:
            expected = lossy[entry.name]
            assert (entry.lossy is None) == (expected is None)
            if entry.lossy is not None and expected is not None:
                assert entry.lossy.max_abs_error == expected.max_abs_error
                assert entry.lossy.rms_error == pytest.approx(expected.rms_error, rel=1e-12)
                assert (entry.lossy.n_pruned, entry.lossy.n_protected) == (
                    expected.n_pruned,
                    expected.n_protected,
                )
        a.close()
        b.close()
        x, y = load_file(one), load_file(other)
        assert all(tensor.equal(y[name]) for name, tensor in x.items())


@pytest.mark.parametrize("exact", [0, 1])
def test_what_was_coded_comes_back_exactly_if_the_step_is_exact(tmp_path: Path, exact: int) -> None:
    model = nn.Linear(80, 80)
    weight = model.weight.detach().clone()
    keep = KeepPolicy(exact=exact)
    with Checkpointer(tmp_path, model, config=KMeans(), keep=keep) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        assert (sum(one.nbytes for one in checkpointer._snapshot._buffers.values()) > weight.nbytes) == bool(
            exact
        )
        checkpointer.restore(1)
    assert model.weight.equal(weight) == bool(exact)


def test_what_codes_cannot_hold_is_copied(tmp_path: Path) -> None:
    broken, tied = nn.Linear(80, 80), nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    nn.init.constant_(broken.weight, float("nan"))
    tied[1].weight = tied[0].weight
    assert not coded(broken.weight, KMeans())
    with Workers(1) as workers:
        assert not coding.code_where_they_live(dict(tied.state_dict()), "model.", KMeans(), workers)
    for name, model in (("broken", broken), ("tied", tied)):
        keep = KeepPolicy(exact=0)
        with Checkpointer(tmp_path / name, model, config=KMeans(), keep=keep) as checkpointer:
            checkpointer.save(1)
            checkpointer.restore(1)
    assert bool(broken.weight.isnan().all())


def test_a_delta_of_weights_that_live_elsewhere_keeps_the_movement(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(160, 256)
    with Checkpointer(
        tmp_path, model, config=KMeans(), keep=KeepPolicy(exact=0), background=False
    ) as checkpointer:
        checkpointer.save(1)
        checkpointer.restore(1)
        start = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += 0.02 * start.std() * torch.randn_like(start)
        moved = (model.weight.detach() - start).double()
        checkpointer.save(2)
        checkpointer.restore(2)
    found = (model.weight.detach() - start).double()
    assert 0.8 < (found * moved).sum() / moved.square().sum() < 1.2
