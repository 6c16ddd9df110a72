"""Restored first moments never exceed the bound by their restored second moments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptz import Checkpointer, Grid, Moments
from ckptz.codec.chunk import restored_chunk
from ckptz.codec.moment_bounds import MomentBound
from ckptz.codec.moments import FirstMoment, SecondMoment
from ckptz.codec.restored import RestoredTensor
from ckptz.codec.tensor import SideInformation, TensorToEncode
from ckptz.format.dtypes import dtype_of
from ckptz.format.sources import ArraySource, ChunkSources
from ckptz.guidance import momentum
from ckptz.guidance.momentum_decay import MomentumDecay, decay_of
from ckptz.kernels import floats
from tests.support.checkpointer_support import LOSSY

Array = np.ndarray[Any, Any]
KINDS = {"F32": floats.F32, "BF16": floats.BF16, "F16": floats.F16}
ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}


def bound_of(betas: tuple[float, float], n_updates: int) -> float:
    """Return the largest |first moment| / sqrt(second moment) that Adam can have after `n_updates`."""
    state = {"exp_avg": 0, "exp_avg_sq": 0, "step": n_updates}
    decay = decay_of({**ADAM, "betas": betas}, state)
    assert decay is not None
    assert decay.bound is not None
    return decay.bound


def moments_of(gradients: Array, b1: float, b2: float) -> tuple[Array, Array]:
    """Return Adam's first and second moments of gradients [n_updates, ...]."""
    first, second = (np.zeros(gradients.shape[1:]) for _ in range(2))
    for gradient in gradients:
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
    return first, second


def source_of(values: Array, dtype: str = "F32") -> ArraySource:
    patterns = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(-1)
    return ArraySource(dtype_of(dtype), values.shape, floats.from_f32(patterns, KINDS[dtype]))


def values_of(patterns: Array, dtype: str) -> Array:
    """Convert patterns of a dtype to float64 [n]."""
    return floats.to_f32(patterns, KINDS[dtype]).view(np.float32).astype(np.float64)


def restored(first: ArraySource, second: ArraySource, guide: SideInformation) -> tuple[Array, Array]:
    """Return both moments as restored from a file with default steps, float64 [n]."""
    restored_second = RestoredTensor(second, None, SecondMoment(4.0).plan(TensorToEncode(source=second)))
    context = {"second": restored_second}
    recipe = FirstMoment(1.0, 0.35, "second")
    encoding = recipe.plan(TensorToEncode(source=first, context_tensors=context, guide=guide))
    sources = ChunkSources(0, first.n_patterns, None, context)
    first_patterns, _ = restored_chunk(first, encoding, sources)
    second_patterns = restored_second.patterns(0, second.n_patterns)
    return values_of(first_patterns, first.dtype.name), values_of(second_patterns, second.dtype.name)


# --- the bound ------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_averages_of_any_gradients_are_within_the_bound(data: st.DataObject) -> None:
    b1, b2 = (data.draw(st.floats(0.01, 0.9995)) for _ in range(2))
    n = data.draw(st.integers(1, 40))
    gradients = np.array(data.draw(st.lists(st.floats(-1, 1), min_size=n, max_size=n)))
    first, second = moments_of(gradients, b1, b2)
    assert abs(first) <= bound_of((b1, b2), n) * np.sqrt(second) * (1 + 1e-9) + 1e-150


@pytest.mark.parametrize(
    ("betas", "expected"), [((0.9, 0.999), 7.27), ((0.9, 0.95), 1.165), ((0.9, 0.81), None)]
)
def test_the_bound_is_reached(betas: tuple[float, float], expected: float | None) -> None:
    b1, b2 = betas
    for n in (1, 3, 500):
        gradients = (b1 / b2) ** np.arange(n)[::-1]  # these give the largest ratio of all gradients
        first, second = moments_of(gradients, b1, b2)
        assert first / np.sqrt(second) == pytest.approx(bound_of(betas, n), rel=1e-6)
    if expected is not None:
        assert bound_of(betas, 10_000) == pytest.approx(expected, rel=1e-3)


# --- restored moments -----------------------------------------------------------------------------


def adversarial(rng: np.random.Generator, shape: tuple[int, int], n_updates: int) -> Array:
    """Return gradients [n_updates, *shape] of rare and frozen rows, zero columns, tiny and huge elements."""
    directions = rng.standard_normal((n_updates, shape[0], 2)) @ rng.standard_normal((2, shape[1]))
    gradients = directions + rng.standard_normal((n_updates, *shape)) * rng.choice([0.01, 1.0, 10.0])
    kind = rng.integers(0, 6, shape[0])
    gradients[:, kind == 0] = 0
    is_used = rng.random((n_updates, shape[0])) <= 0.05
    gradients[:, kind == 1] *= is_used[:, kind == 1, None]
    gradients[:, kind == 2] *= 1e-21
    gradients[: n_updates // 2, kind == 3] *= 1e-6
    gradients[n_updates // 2 :, kind == 4] = 0
    gradients[:, :, rng.random(shape[1]) < 0.1] = 0
    gradients[rng.random(gradients.shape) < rng.choice([0.0, 0.5, 0.95])] = 0
    gradients[-1, rng.integers(shape[0]), rng.integers(shape[1])] = rng.choice([0.0, 1e4, 1e15])
    return gradients * 10.0 ** rng.integers(-8, 3)


@given(
    st.integers(0, 10_000),
    st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.95, 0.9), (0.5, 0.9999)]),
    st.sampled_from([1, 2, 20, 120]),
    st.sampled_from([None, 0.0, 0.1, 1.0, 30.0]),
    st.sampled_from(["F32", "BF16", "F16"]),
)
@example(0, (0.9, 0.95), 1, 0.1, "F32")  # some mean roots of second moments are 10^-23
@settings(max_examples=40, deadline=None)
def test_restored_first_moments_are_within_the_bound(
    seed: int, betas: tuple[float, float], n_updates: int, update_scale: float | None, dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    gradients = adversarial(rng, (int(rng.integers(5, 80)), int(rng.integers(8, 60))), n_updates)
    moments = moments_of(gradients, *betas)
    with np.errstate(over="ignore"):
        first, second = (source_of(np.clip(moment, -6e4, 6e4), dtype) for moment in moments)
    bound = bound_of(betas, n_updates)
    guide = SideInformation(update_scale=update_scale, bound=bound)
    restored_first, restored_second = restored(first, second, guide)
    assert np.isfinite(restored_first).all()
    assert (np.abs(restored_first) <= bound * np.sqrt(restored_second)).all()


def test_rows_with_rare_gradients_become_zero_and_others_keep_most_of_their_updates() -> None:
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((60, 200, 3)) @ rng.standard_normal((3, 64)) + 3.0
    gradients[:, 100:] *= 1e-4 * (rng.random((60, 100, 1)) < 0.02)
    first, second = moments_of(gradients, 0.9, 0.999)
    guide = SideInformation(update_scale=3.0, bound=bound_of((0.9, 0.999), 60))
    restored_first, _ = restored(source_of(first), source_of(second), guide)
    errors = restored_first.reshape(200, 64) - first
    assert (errors[100:] ** 2).sum() <= 1.01 * (first[100:] ** 2).sum()
    assert (errors[:100] ** 2).sum() < 0.3 * (first[:100] ** 2).sum()


def test_first_moments_of_amsgrad_are_bounded_by_the_largest_second_moment() -> None:
    rng = np.random.default_rng(0)
    first, second = moments_of(adversarial(rng, (60, 40), 50), 0.9, 0.999)
    largest = second * rng.choice([1.0, 100.0], second.shape)
    bound = bound_of((0.9, 0.999), 50)
    for update_scale in (None, 3.0):
        guide = SideInformation(update_scale=update_scale, bound=bound / 30, divisor=source_of(largest))
        restored_first, _ = restored(source_of(first), source_of(second), guide)
        limits = bound / 30 * np.sqrt(largest.astype(np.float32).reshape(-1))
        assert (np.abs(restored_first) <= limits).all()


def test_values_beyond_their_bound_are_clipped_to_it() -> None:
    bound = MomentBound(2.0, source_of(np.array([1.0, 1.0, 0.0, 4.0, np.nan])))
    patterns = source_of(np.array([1.5, -3.0, 1e-9, 5.0, 9.0])).patterns(0, 5)
    clamped = values_of(bound.clamped(0, patterns, floats.F32), "F32")
    np.testing.assert_allclose(clamped, [1.5, -2.0, 0.0, 4.0, 9.0], rtol=1e-5)
    np.testing.assert_array_equal(bound.is_beyond(0, patterns, floats.F32), [False, True, True, True, False])


# --- runs -----------------------------------------------------------------------------------------


class Tokens:
    """An embedding and a linear layer in training with a skewed distribution of tokens."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(400, 32), torch.nn.Linear(32, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, n: int) -> None:
        for _ in range(n):
            tokens = (torch.rand(64) ** 6 * 400).long()
            loss = torch.nn.functional.cross_entropy(self.model(tokens), tokens % 64)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def largest(self) -> float:
        """Return the largest first moment relative to its bound; at most 1 if all obey it."""
        largest = []
        for state in self.optimizer.state.values():
            ratios = state["exp_avg"].double().abs() / state["exp_avg_sq"].double().sqrt()
            ratio = float(torch.nan_to_num(ratios, posinf=1e9).max())
            largest.append(ratio / bound_of((0.9, 0.999), int(state["step"])))
        return max(largest)


def train_and_restore(folder: Path) -> tuple[Tokens, tuple[str, ...], Array]:
    """Train, save three lossy steps and restore the last; returns notes and the embedding's first moment."""
    run, config = Tokens(), Grid(moments=Moments(first_step=0.1))
    with Checkpointer(folder, run.model, run.optimizer, config=config, keep=LOSSY, background=False) as saver:
        for step in (40, 60, 80):
            run.train(20)
            saver.save(step)
        saver.restore(80)
        assert saver.restored is not None
        return run, saver.restored.notes, run.optimizer.state[run.model[0].weight]["exp_avg"].numpy()


def test_rare_tokens_are_restored_within_their_bound(tmp_path: Path) -> None:
    run, notes, first = train_and_restore(tmp_path)
    assert run.largest() <= 1
    assert not [note for note in notes if "larger than" in note]
    assert first.any(), "not all first moments are zero"


def test_first_moments_of_parameters_that_share_memory_are_within_their_bound(tmp_path: Path) -> None:
    """The file has their weights once, and their moments twice."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(128, 128, bias=False), torch.nn.Linear(128, 128, bias=False)
    second.weight = torch.nn.Parameter(first.weight.data)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), second)
    optimizer, inputs = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(256, 128)
    for _ in range(20):
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
    with Checkpointer(tmp_path, model, optimizer, config=Grid(), keep=LOSSY, background=False) as saver:
        saver.save(20)
        saver.restore(20)
        assert saver.restored is not None
        assert not [note for note in saver.restored.notes if "larger than" in note]


def test_first_moments_beyond_their_bound_in_an_older_file_are_restored_as_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(momentum.LostMomentum, "bound", SideInformation())
    run, notes, first = train_and_restore(tmp_path)
    [note] = [
        note for note in notes if "were larger than their second moments allow and are zero now" in note
    ]
    assert "first 'optimizer.0.weight.exp_avg'" in note
    assert run.largest() <= 1
    assert first.any(), "first moments within their bound are kept"


def test_optimizers_without_a_second_moment_have_no_bound() -> None:
    decay = decay_of(
        {"lr": 0.1, "momentum": 0.9, "nesterov": False, "dampening": 0.0}, {"momentum_buffer": 0}
    )
    assert isinstance(decay, MomentumDecay)
    assert decay.bound is None
