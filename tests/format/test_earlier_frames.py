"""Frames copied from an earlier file of the same job: a copy has the bytes that encoding would give."""

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from ckptz import LOSSLESS, Budget, Grid, KMeans, compress
from ckptz.codec.method import Method, Recipe
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.index import BaseRef
from ckptz.format.reader import Container
from ckptz.format.sources import TensorSource
from ckptz.format.written import Written
from ckptz.parallel import Workers
from ckptz.search.budget import SearchOptions
from ckptz.torch import source_of
from ckptz.write import frame_writer
from ckptz.write.frame_writer import Earlier, FilePlan
from ckptz.write.job import WriteJob, prepared
from ckptz.write.writer import write_container
from tests.support.search_support import model


def training_state(drift: float = 0.0) -> dict[str, TensorSource]:
    """Generate three weights with Adam moments, one of which has a NaN and stays lossless, and integers.

    Args:
        drift: relative change of the weights.
    """
    generator = torch.Generator().manual_seed(7)
    state: dict[str, torch.Tensor] = {"ids": torch.arange(600)}
    for name, shape in {"up.weight": (96, 80), "down.weight": (80, 96), "up.bias": (96,)}.items():
        weight = torch.randn(shape, generator=generator)
        state[name] = weight + drift * weight.roll(1)
        state[f"optimizer.{name}.exp_avg"] = 1e-3 * torch.randn(shape, generator=generator)
        state[f"optimizer.{name}.exp_avg_sq"] = 1e-6 * torch.randn(shape, generator=generator).square()
    state["optimizer.down.weight.exp_avg_sq"][3, 4] = float("nan")
    return {name: source_of(name, tensor) for name, tensor in state.items()}


def write(job: WriteJob, earlier: Earlier | None = None) -> tuple[bytes, Written]:
    """Write a file to memory; return its bytes and report."""
    sink = io.BytesIO()
    with Workers(2) as workers, prepared(job) as ready:
        report = write_container(sink, FilePlan.of(ready, earlier), workers)
    return sink.getvalue(), report


def recipes_of(job: WriteJob) -> Mapping[str, Recipe]:
    with prepared(job) as ready:
        return ready.recipes()


def earlier_of(job: WriteJob) -> Earlier:
    """Write a file that later ones may copy frames from."""
    data, report = write(job)
    return Earlier(Container(MemoryBytes(data)).tensors, recipes_of(job), dict(report.tensor_notes))


def counted_chunks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list to which each chunk is appended when it is encoded."""
    encoded: list[object] = []
    real_encode_all = frame_writer._encode_all

    def encode_all(planning: Any, batch: Any) -> Any:
        encoded.extend(batch)
        return real_encode_all(planning, batch)

    monkeypatch.setattr(frame_writer, "_encode_all", encode_all)
    return encoded


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "n_copied"),
    [
        (LOSSLESS, LOSSLESS, 10),
        (KMeans(levels=16), KMeans(levels=8), 8),
        (KMeans(levels=16), LOSSLESS, 8),
        (Grid(step=1.0), Grid(step=2.0), 7),  # it applies to both weights and the bias
        (Grid(step=1.0), Grid(step=1.0), 10),
        (LOSSLESS, Grid(step=1.0), 1),
    ],
)
def test_copied_frames_give_the_same_file_and_report_as_encoded_ones(
    monkeypatch: pytest.MonkeyPatch, first: Method, second: Method, n_copied: int, has_base: bool
) -> None:
    tensors, bases = training_state(), training_state(drift=1e-3) if has_base else {}
    ref = BaseRef(content_id="0" * 64, file="base.ckptz", depth=1) if has_base else None
    job = WriteJob(tensors=tensors, config=second, base=ref, bases=bases, guides={})
    expected_bytes, expected_report = write(job)
    earlier = earlier_of(replace(job, config=first))
    encoded = counted_chunks(monkeypatch)
    data, report = write(job, earlier)
    assert data == expected_bytes
    assert report == expected_report
    assert len(tensors) - len(encoded) == n_copied
    assert bool(report.n_deltas) == has_base


def test_a_first_moment_is_copied_only_together_with_the_second_moment_of_its_contexts() -> None:
    job = WriteJob(tensors=training_state(), config=Grid(), guides={})
    recipes, earlier = recipes_of(job), earlier_of(job)
    first, second = "optimizer.up.weight.exp_avg", "optimizer.up.weight.exp_avg_sq"
    assert {first, second} <= earlier.reusable(recipes).keys()
    changed = recipes | {second: recipes["ids"]}
    assert not {first, second} & earlier.reusable(changed).keys()


def test_progress_includes_copied_tensors() -> None:
    tensors = training_state()
    job = WriteJob(tensors=tensors)
    earlier = earlier_of(job)
    tensor_bytes: list[int] = []
    with Workers(1) as workers, prepared(job) as ready:
        write_container(io.BytesIO(), FilePlan.of(ready, earlier), workers, tensor_bytes.append)
    assert sum(tensor_bytes) == sum(source.dtype.n_bytes(source.shape) for source in tensors.values())


def test_a_search_encodes_lossless_tensors_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(model(moments=True), tmp_path / "step.safetensors")
    encoded = counted_chunks(monkeypatch)
    exact = load_file(tmp_path / "step.safetensors")

    def loss(state: dict[str, Any]) -> float:
        return 1 + sum(float(((state[n].numpy() - exact[n]) ** 2).mean()) for n in state)

    options = SearchOptions(budgets=(Budget(loss, 1e-5),), max_evaluations=3)
    (report,) = compress([tmp_path / "step.safetensors"], tmp_path / "out.ckptz", jobs=1, search=options)
    n_further = len(report.search.trials) - 1
    assert n_further >= 1
    assert len(encoded) == report.n_tensors + n_further * report.n_lossy


def test_another_dither_seed_copies_only_lossless_frames() -> None:
    job = WriteJob(tensors=training_state(), config=KMeans(levels=16))
    earlier, recipes = earlier_of(job), recipes_of(job)
    with prepared(job) as ready:
        same_seed, other_seed = (FilePlan.of(ready, earlier, draw).prepare(map) for draw in (0, 1))
    assert {name for name in same_seed if recipes[name].is_lossy}
    assert {*other_seed} == {name for name in same_seed if not recipes[name].is_lossy}
