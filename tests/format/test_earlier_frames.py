"""Frames copied from an earlier file: the bytes are those of encoding, and what may differ is encoded."""

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
    """Weights, Adam's moments, of which one cannot be lossy, and integers."""
    generator = torch.Generator().manual_seed(7)
    state: dict[str, torch.Tensor] = {"ids": torch.arange(600)}
    for name, shape in {"up.weight": (96, 80), "down.weight": (80, 96), "up.bias": (96,)}.items():
        weight = torch.randn(shape, generator=generator)
        state[name] = weight + drift * weight.roll(1)
        state[f"optimizer.{name}.exp_avg"] = 1e-3 * torch.randn(shape, generator=generator)
        state[f"optimizer.{name}.exp_avg_sq"] = 1e-6 * torch.randn(shape, generator=generator).square()
    state["optimizer.down.weight.exp_avg_sq"][3, 4] = float("nan")
    return {name: source_of(name, tensor) for name, tensor in state.items()}


def written(job: WriteJob, earlier: Earlier | None = None) -> tuple[bytes, Written]:
    sink = io.BytesIO()
    with Workers(2) as workers, prepared(job) as ready:
        report = write_container(sink, FilePlan.of(ready, earlier), workers)
    return sink.getvalue(), report


def recipes_of(job: WriteJob) -> Mapping[str, Recipe]:
    with prepared(job) as ready:
        return ready.recipes()


def earlier_of(job: WriteJob) -> Earlier:
    data, report = written(job)
    return Earlier(Container(MemoryBytes(data)).tensors, recipes_of(job), dict(report.tensor_notes))


def counted_chunks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Chunks that are encoded from now on."""
    encoded: list[object] = []
    real = frame_writer._encode_all

    def encode_all(planning: Any, batch: Any) -> Any:
        encoded.extend(batch)
        return real(planning, batch)

    monkeypatch.setattr(frame_writer, "_encode_all", encode_all)
    return encoded


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "n_copied"),
    [
        (LOSSLESS, LOSSLESS, 10),
        (KMeans(levels=16), KMeans(levels=8), 8),
        (KMeans(levels=16), LOSSLESS, 8),
        (Grid(step=1.0), Grid(step=2.0), 7),  # the bias is rounded as finely as the step asks
        (Grid(step=1.0), Grid(step=1.0), 10),
        (LOSSLESS, Grid(step=1.0), 1),
    ],
)
def test_copying_gives_the_bytes_and_the_report_of_encoding(
    monkeypatch: pytest.MonkeyPatch, first: Method, second: Method, n_copied: int, has_base: bool
) -> None:
    tensors, bases = training_state(), training_state(drift=1e-3) if has_base else {}
    ref = BaseRef(content_id="0" * 64, file="base.ckptz", depth=1) if has_base else None
    job = WriteJob(tensors=tensors, config=second, base=ref, bases=bases, guides={})
    expected, report = written(job)
    earlier = earlier_of(replace(job, config=first))
    encoded = counted_chunks(monkeypatch)
    found, again = written(job, earlier)
    assert found == expected
    assert again == report
    assert len(tensors) - len(encoded) == n_copied
    assert bool(report.n_deltas) == has_base


def test_a_moment_is_copied_only_with_the_one_that_its_classes_depend_on() -> None:
    job = WriteJob(tensors=training_state(), config=Grid(), guides={})
    recipes, earlier = recipes_of(job), earlier_of(job)
    first, second = (f"optimizer.up.weight.exp_avg{end}" for end in ("", "_sq"))
    assert {first, second} <= earlier.reusable(recipes).keys()
    changed = recipes | {second: recipes["ids"]}
    assert not {first, second} & earlier.reusable(changed).keys()


def test_progress_counts_what_is_copied_as_well() -> None:
    tensors = training_state()
    job = WriteJob(tensors=tensors)
    earlier = earlier_of(job)
    done: list[int] = []
    with Workers(1) as workers, prepared(job) as ready:
        write_container(io.BytesIO(), FilePlan.of(ready, earlier), workers, done.append)
    assert sum(done) == sum(source.dtype.n_bytes(source.shape) for source in tensors.values())


def test_a_search_encodes_once_what_no_setting_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(model(moments=True), tmp_path / "step.safetensors")
    encoded = counted_chunks(monkeypatch)
    exact = load_file(tmp_path / "step.safetensors")

    def loss(state: dict[str, Any]) -> float:
        return 1 + sum(float(((state[n].numpy() - exact[n]) ** 2).mean()) for n in state)

    asked = SearchOptions(budgets=(Budget(loss, 1e-5),), max_evaluations=3)
    (report,) = compress([tmp_path / "step.safetensors"], tmp_path / "out.ckptz", jobs=1, search=asked)
    n_more = len(report.search.trials) - 1
    assert n_more >= 1
    assert len(encoded) == report.n_tensors + n_more * report.n_lossy


def test_another_draw_of_random_rounding_copies_no_lossy_frame() -> None:
    job = WriteJob(tensors=training_state(), config=KMeans(levels=16))
    earlier, recipes = earlier_of(job), recipes_of(job)
    with prepared(job) as ready:
        same, other = (FilePlan.of(ready, earlier, draw).prepare(map) for draw in (0, 1))
    assert {name for name in same if recipes[name].is_lossy}
    assert {*other} == {name for name in same if not recipes[name].is_lossy}
