"""The parts of a search without a model: budgets, the space of settings, strategies and predicted sizes."""

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ckptz import Budget
from ckptz.codec.kmeans import KMeans
from ckptz.codec.sensitivity import SensitivityHistogram
from ckptz.codec.tensor import NO_SIDE_INFORMATION, SideInformation, TensorToEncode
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.dtypes import dtype_of
from ckptz.format.index import BaseRef
from ckptz.format.reader import Container
from ckptz.format.sources import ArraySource, TensorSource
from ckptz.kernels.floats import F32
from ckptz.parallel import Workers
from ckptz.search.budget import Limit, Measurement, judge
from ckptz.search.predicted_sizes import predicted_sizes
from ckptz.search.strategies import (
    MAX_GUIDED,
    MAX_NEIGHBOURS,
    Finer,
    Guided,
    Neighbourhood,
    Outcome,
    best_of,
    dominates,
    run_stages,
)
from ckptz.write import writer
from ckptz.write.job import WriteJob, prepared
from tests.support.search_support import BOTH, CUBE, SPACE, TEMPLATE, landscape, model

QUARTER = 216 // 4

# --- budgets ------------------------------------------------------------------------------------


def loss(state: Any) -> float:
    return float(state["value"])


@pytest.mark.parametrize(
    ("result", "lower", "metric", "value"),
    [
        (2.5, True, "loss", 2.5),
        (np.float32(0.5), False, "loss", 0.5),
        (torch.tensor(1.5), True, "loss", 1.5),
        ({"loss": 3, "accuracy": 0.9}, True, "loss", 3.0),
        ({"loss": 3, "accuracy": 0.9}, False, "accuracy", 0.9),
        ({"accuracy": 0.75}, True, "accuracy", 0.75),
    ],
)
def test_a_quality_is_a_number_or_a_dict_with_a_known_one(
    result: Any, lower: bool, metric: str, value: float
) -> None:
    measurement = Budget(loss, lower_is_better=lower).read(result)
    assert (measurement.metric, measurement.value) == (metric, value)
    if isinstance(result, dict):
        assert measurement.lower_is_better == (metric == "loss")


@pytest.mark.parametrize(
    ("exact", "measured", "lower", "limit", "change", "used"),
    [
        (2.0, 2.02, True, Limit(0.01, True), 0.01, 1.0),
        (2.0, 1.98, True, Limit(0.01, True), -0.01, 1.0),
        (-2.0, -1.98, True, Limit(0.02, False), 0.02, 1.0),
        (0.8, 0.76, False, Limit(0.1, True), 0.05, 0.5),
        (0.8, 0.84, False, Limit(0.01, False), -0.04, 4.0),
        (2.0, math.nan, True, Limit(0.01, True), None, None),
        (2.0, -math.inf, True, Limit(0.01, True), None, None),
        (2.0, 2.0, True, Limit(0.0, True), 0.0, 0.0),
        (2.0, 2.1, True, Limit(0.0, True), 0.05, None),
    ],
)
def test_a_number_uses_the_budget_in_both_directions(
    exact: float, measured: float, lower: bool, limit: Limit, change: float | None, used: float | None
) -> None:
    judged = judge(limit, *(Measurement("loss", np.array([value]), lower) for value in (exact, measured)))
    assert (judged.mean_change, judged.used) == (pytest.approx(change), pytest.approx(used))
    assert (judged.standard_error, judged.example_change) == (None, None)


# --- the grid of settings -----------------------------------------------------------------------


def test_the_grid_has_the_configurations_of_the_paper() -> None:
    assert [len(cube.points) for cube in BOTH] == [216, 216]
    configs = {cube.config(point) for cube in BOTH for point in cube.points}
    assert len(configs) == 432 - 36  # without pruning both metrics give the same configuration
    assert len({config for config in configs if config.prune_by == "sensitivity"}) == 180
    (without,) = SPACE.cubes(TEMPLATE, ["magnitude"], {"head"}, is_ranked=True)
    assert len(without.points) == 108
    (unranked,) = SPACE.cubes(TEMPLATE, ["sensitivity"], {"embedding"}, is_ranked=False)
    assert unranked.name == "magnitude"


def test_every_point_is_found_again_from_its_configuration() -> None:
    for cube in BOTH:
        assert all(cube.point(cube.config(point)) == point for point in cube.points)


def test_a_configuration_between_grid_points_becomes_the_finer_one() -> None:
    point = CUBE.point(KMeans(levels=10, embedding_levels=20, prune=0.35, protect=0.004))
    assert CUBE.config(point) == replace(TEMPLATE, levels=12, embedding_levels=32, prune=0.3, protect=0.005)


# --- strategies ---------------------------------------------------------------------------------


def test_guided_finds_the_smallest_file_with_a_quarter_of_the_trials() -> None:
    n_trials = []
    for seed in range(15):
        scene = landscape(seed)
        outcomes = scene.search(Guided(cubes=(CUBE,), predict=scene.predict))
        assert scene.excess(outcomes) <= 0.005
        assert len({outcome.config for outcome in outcomes}) == len(outcomes)
        n_trials.append(len(outcomes))
    assert max(n_trials) <= QUARTER
    assert np.mean(n_trials) <= 20


@pytest.mark.parametrize(("noise", "least"), [(0.05, 0.9), (0.1, 0.85)])
def test_noise_and_wrong_predictions_rarely_cost_two_per_cent(noise: float, least: float) -> None:
    scenes = [landscape(seed, noise) for seed in range(20)]
    outcomes = [scene.search(Guided(cubes=(CUBE,), predict=scene.predict)) for scene in scenes]
    excess = np.array([scene.excess(trials) for scene, trials in zip(scenes, outcomes, strict=True)])
    assert np.mean(excess <= 0.02) >= least
    assert excess.max() <= 0.1
    assert max(map(len, outcomes)) <= QUARTER


def test_where_quality_is_not_monotone_guided_descends_to_the_smallest_nearby() -> None:
    """Without protected values every number of levels keeps the budget, with them only the largest."""
    scene = landscape(0)
    used = {c: 0.5 if CUBE.point(c)[2] == 2 or CUBE.point(c)[0] == 0 else 3.0 for c in scene.used}
    valley = replace(scene, used=used)
    outcomes = valley.search(Guided(cubes=(CUBE,), predict=scene.predict))
    assert valley.excess(outcomes) <= 0.02
    assert len(outcomes) <= QUARTER


def test_guided_searches_both_prune_metrics_at_once() -> None:
    for seed in range(4):
        scene = landscape(seed, cubes=BOTH)
        outcomes = scene.search(Guided(cubes=BOTH, predict=scene.predict))
        assert scene.excess(outcomes) <= 0.005
        assert len(outcomes) <= 2 * QUARTER


def test_a_search_has_a_maximum_of_trials_and_ends_with_the_finest() -> None:
    scene = landscape(0)
    mildest = max(scene.used, key=scene.predict)
    doubtful = replace(scene, used={config: 0.9 if config == mildest else 1.4 for config in scene.used})
    outcomes = doubtful.search(
        Neighbourhood(parent=CUBE.config((5, 5, 2, 1)), cubes=(CUBE,), predict=scene.predict),
        Guided(cubes=(CUBE,), predict=scene.predict),
    )
    assert len(outcomes) <= MAX_GUIDED
    assert outcomes[-1].is_feasible


def test_finer_settings_are_tried_if_none_of_the_grid_keeps_the_budget() -> None:
    scene, finer = landscape(0), SPACE.finer(KMeans())
    for n_bad in range(len(finer) + 1):
        used = dict.fromkeys(scene.used, 1.4) | {c: 2.0 if i < n_bad else 0.9 for i, c in enumerate(finer)}
        other = replace(scene, used=used, sizes=scene.sizes | dict.fromkeys(finer, 1e9))
        guided = Guided(cubes=(CUBE,), predict=scene.predict, n_reserved=len(finer))
        outcomes = other.search(guided, Finer(configs=finer))
        assert len(outcomes) <= MAX_GUIDED
        best = best_of(outcomes)
        assert (best and best.config) == (finer[n_bad] if n_bad < len(finer) else None)


def test_where_nothing_keeps_the_budget_guided_gives_up_after_few_trials() -> None:
    scene = landscape(0)
    hopeless = replace(scene, used={config: 50.0 for config in scene.used})
    outcomes = hopeless.search(Guided(cubes=(CUBE,), predict=scene.predict))
    assert best_of(outcomes) is None
    assert len(outcomes) <= 12


def test_the_neighbourhood_tries_the_other_metric_first_and_is_never_more_aggressive() -> None:
    scene = landscape(1, cubes=BOTH)
    parent = BOTH[0].config((3, 2, 1, 1))
    nothing = replace(scene, used={config: 2.0 for config in scene.used})
    outcomes = nothing.search(Neighbourhood(parent=parent, cubes=BOTH, predict=scene.predict))
    assert outcomes[0].config == BOTH[1].config((3, 2, 1, 1))
    assert 1 < len(outcomes) <= MAX_NEIGHBOURS
    for outcome in outcomes:
        assert dominates((3, 2, 1, 1), CUBE.point(outcome.config))
    sizes = [scene.predicted[outcome.config] for outcome in outcomes[1:]]
    assert sizes == sorted(sizes)


def test_the_neighbourhood_ends_with_the_first_that_keeps_the_budget() -> None:
    for seed in range(20):
        scene = landscape(seed, cubes=BOTH)
        parent = min(
            (c for c, used in scene.used.items() if used <= 1),
            key=scene.predict,
            default=BOTH[0].config((0, 0, 0, 0)),
        )
        near = Neighbourhood(parent=parent, cubes=BOTH, predict=scene.predict)
        outcomes = scene.search(near)
        assert len(outcomes) <= MAX_NEIGHBOURS
        assert not any(outcome.is_feasible for outcome in outcomes[:-1])
        assert scene.smallest is None or outcomes[-1].is_feasible


def test_guided_takes_over_if_the_neighbourhood_finds_nothing() -> None:
    scene = landscape(2)
    parent = CUBE.config((5, 5, 2, 1))
    strict = replace(scene, used={c: 0.5 if CUBE.point(c)[0] == 0 else 3.0 for c in scene.used})
    near = Neighbourhood(parent=parent, cubes=(CUBE,), predict=scene.predict)
    outcomes = strict.search(near, Guided(cubes=(CUBE,), predict=scene.predict))
    assert not any(outcome.is_feasible for outcome in outcomes[:MAX_NEIGHBOURS])
    assert strict.excess(outcomes) <= 0.005
    assert len(outcomes) == len({outcome.config for outcome in outcomes})


def test_a_search_stops_after_max_trials() -> None:
    scene = landscape(0)
    stages = [Guided(cubes=(CUBE,), predict=scene.predict)]
    assert len(run_stages(stages, lambda config, _: Outcome(config, 2.0, 1), max_trials=3)) == 3


# --- predicted sizes ----------------------------------------------------------------------------


def sources_of(state: dict[str, Any]) -> dict[str, TensorSource]:
    return {n: ArraySource.from_buffer(dtype_of("F32"), v.shape, v.reshape(-1)) for n, v in state.items()}


def file_of(job: WriteJob) -> bytes:
    sink = io.BytesIO()
    with Workers(1) as workers:
        writer.write(sink, job, workers)
    return sink.getvalue()


@pytest.mark.parametrize(("ranked", "is_delta"), [(False, False), (True, True)])
def test_sizes_are_predicted_within_a_few_per_cent(ranked: bool, is_delta: bool) -> None:
    full, tensors = sources_of(model(0, width=256)), sources_of(model(3, width=256))
    moments = {n: v for n, v in model(0, width=256, moments=True).items() if n.endswith("exp_avg_sq")}
    for moment in moments.values():
        moment[: len(moment) // 3] = 0  # rows that got no gradient in training
    squares = sources_of(moments)
    guides = {n: SideInformation(second_moment=squares[f"optimizer.{n}.exp_avg_sq"]) for n in tensors}
    cube = BOTH[1] if ranked else replace(CUBE, template=KMeans())
    job = WriteJob(tensors=tensors, config=cube.template, guides=guides if ranked else {})
    if is_delta:
        first = replace(job, tensors=full, config=cube.config((2, 1, 1, 1)))
        base = Container(MemoryBytes(file_of(first)))
        job = replace(job, base=BaseRef("0" * 64, "base.ckptz", 1), bases=base.tensors)
    with prepared(job) as ready:
        to_encode = {
            n: TensorToEncode(t, job.bases.get(n), guide=(ready.guides or {}).get(n, NO_SIDE_INFORMATION))
            for n, t in tensors.items()
        }
        sizes = predicted_sizes(to_encode, ready.roles or {}, [cube.config(point) for point in cube.points])
    for point in ((0, 0, 0, 0), (2, 1, 1, 1), (2, 3, 0, 1), (4, 5, 2, 1), (5, 2, 1, 0)):
        config = cube.config(point)
        n_bytes = len(file_of(replace(job, config=config)))
        assert sizes[config] == pytest.approx(n_bytes, rel=0.03), config


def test_weights_without_gradients_are_pruned_by_the_same_share_as_the_others() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, 30_000).astype(np.float32)
    sensitivities = np.abs(values) * rng.uniform(0.5, 2, len(values)).astype(np.float32)
    has_gradient = np.arange(len(values)) % 3 > 0
    sensitivities[~has_gradient] = 0
    cut = SensitivityHistogram.of(sensitivities, values.view(np.uint32), F32).cut(0.3, 0.0)
    pruned = cut.prunes(sensitivities, np.abs(values))
    assert pruned[has_gradient].mean() == pytest.approx(0.3, abs=0.02)
    assert pruned[~has_gradient].mean() == pytest.approx(0.3, abs=0.02)
    assert np.abs(values[~has_gradient & pruned]).max() <= np.abs(values[~has_gradient & ~pruned]).min()


def test_predicted_sizes_include_lossless_tensors() -> None:
    state = sources_of(model(0, moments=True))
    job = WriteJob(tensors=state, config=KMeans(), guides={})
    with prepared(job) as ready:
        sizes = predicted_sizes(
            {n: TensorToEncode(t) for n, t in state.items()}, ready.roles or {}, [KMeans()]
        )
    n_bytes = len(file_of(job))
    assert sizes[KMeans()] == pytest.approx(n_bytes, rel=0.02)
