"""Refusals of a search: invalid budgets, invalid results of evaluations, and values that allow no limit."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptz import Agreement, Budget, Grid, KMeans, ResumeProbe, compress
from ckptz.errors import ConfigError
from ckptz.search.budget import Limit, Measurement, SearchOptions, judge
from ckptz.search.measures import prepare

Call = Callable[[], object]


def loss(state: Any) -> float:
    return 2.0


def read(value: Any, **options: Any) -> Call:
    return lambda: Budget(loss, **options).read(value)


def exact(*values: float) -> Call:
    """Return a call that checks the values of the exact tensors against a relative budget."""
    return lambda: Budget(loss).check_exact(Measurement("loss", np.array(values), True))


def search_options(**changes: Any) -> Call:
    return lambda: SearchOptions(**{"budgets": (Budget(loss),), **changes})


def probe(**changes: Any) -> Call:
    return lambda: ResumeProbe(**{"resume": lambda state, n_steps: 1.0, **changes})


class Exact:
    """An exact state without tensors."""

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def noisy_state(self, share: float, seed: int) -> dict[str, torch.Tensor]:
        return {}


def logits(*results: Any) -> Call:
    """Return a call that evaluates logits, those of the exact tensors first and then those of trials."""
    remaining = iter(results)

    def evaluate() -> None:
        prepared = prepare(Agreement(lambda state: next(remaining)), Exact())
        for _ in results[1:]:
            prepared.quality({})

    return evaluate


def judge_different_counts() -> None:
    judge(Limit(0.01, True), *(Measurement("loss", np.ones(2), True, np.array([3.0, n])) for n in (4.0, 5.0)))


NAN, SPARSE, META = math.nan, torch.ones(4).to_sparse(), torch.ones(4, device="meta")
SCORES = {"loss": 2.0, "f1": 0.5}
SMALL = r"relative budget needs 0\.001 or more"
REFUSED: dict[str, tuple[Call, str]] = {
    # budgets and options
    "no function": (lambda: Budget("no function"), "function"),
    "drop below zero": (lambda: Budget(loss, -0.1), "drop"),
    "drop of nan": (lambda: Budget(loss, NAN), "drop"),
    "steps without a probe": (lambda: Budget(loss, 20, in_steps=True), "only a ResumeProbe"),
    "probe without function": (probe(resume=None), "ResumeProbe needs a function"),
    "no steps": (probe(n_steps=0), "n_steps"),
    "noise below zero": (probe(noise_floor=-1.0), "a noise floor must be"),
    "noise of nan": (probe(noise_floor=NAN), "a noise floor must be"),
    "restores below zero": (search_options(restores=-1), "restores"),
    "half a restore": (search_options(restores=1.5), "restores"),
    "other parent": (search_options(template=Grid(), parent=KMeans()), "cannot begin at settings of kmeans"),
    # results of evaluations
    **{f"{value!r}": (read(value), "loss returned") for value in ("0.5", True, None, {"perplexity": 3.0})},
    "list": (read([1.0, 2.0]), "a list of 2; return the values of all examples in one tensor"),
    "matrix": (read(torch.zeros(2, 2)), r"values of shape \[2, 2\]"),
    "nothing": (read(torch.zeros(0)), r"values of shape \[0\]"),
    "sparse": (read(SPARSE), "cannot be read: can't convert Sparse"),
    "meta": (read(META), "cannot be read: Cannot copy out of meta"),
    "complex": (read(torch.ones(4, dtype=torch.complex64)), "which is not a number"),
    "texts": (read(np.array(["1", "2"])), "which is not a number"),
    **{
        f"counts {n}": (read({"loss": np.ones(2), "counts": np.array(n)}), r"2 sums and \d counts")
        for n in ([1.0], [1.0, 0.0], [1.0, -1.0], [NAN, 1.0])
    },
    "missing metric": (read(SCORES, metric="bleu"), "without 'bleu'; it has 'f1', 'loss'"),
    "metric of a number": (read(7.0, metric="los"), "for 'los'; write 'loss' or 'accuracy'"),
    # values of the exact tensors and of trials
    **{f"exact {value}": (exact(value), SMALL) for value in (0.0, 5e-4, -5e-4, -2.0)},
    **{f"exact {value}": (exact(value), f"exact tensors is {value}$") for value in (NAN, math.inf)},
    "exact values": (exact(1.0, NAN, NAN), "exact tensors is nan in 2 of 3 values"),
    "other counts": (judge_different_counts, "a sum over 5 at index 1 for a trial and over 4"),
    **{
        f"logits {value}": (logits(value), "returned no logits")
        for value in (None, 0.5, "high", torch.zeros(0, 4))
    },
    "logits of nan": (logits(torch.full((2, 4), NAN)), "exact tensors hold NaN"),
    "other logits": (logits(torch.zeros(4, 3), torch.zeros(5, 3)), "5 x 3 logits for a trial and 4 x 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_and_results_are_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        call()


# --- searches -------------------------------------------------------------------------------------


def fails(state: Any) -> float:
    return 1 / 0


def returning(*results: Any) -> tuple[Budget, ...]:
    """Return a budget whose evaluation returns the results in order, then the last one again and again."""
    remaining = itertools.chain(results, itertools.repeat(results[-1]))
    return (Budget(lambda state: next(remaining), 0.01),)


UP, DOWN = torch.tensor([2.0, 3.0]), torch.tensor([3.0, 2.0])
TWO_LIMITS = (Budget(loss, 0.01), Budget(loss, 0.02))
TWO_WAYS = (Budget(loss, 0.01), Budget(loss, 0.01, lower_is_better=False))
SEARCHES: dict[str, tuple[tuple[Budget, ...], str]] = {
    "raises": ((Budget(fails),), "raised ZeroDivisionError"),
    "too large": (returning(10**400), "not a number"),
    "nan": (returning(NAN), "exact tensors is nan"),
    "other metric": (returning({"f1": 0.5}), "without 'loss' or 'accuracy'"),
    "small": (returning(1e-4), SMALL),
    "negative": (returning(-torch.ones(4)), "is -1, and a relative budget needs"),
    "one of three": (returning(torch.tensor([1.0, NAN, 2.0])), "exact tensors is nan in 1 of 3 values"),
    "second look": (returning(2.0, 2.1), "exact tensors is 2 and then 2.1; fix the data and the seed"),
    "other order": (returning(UP, DOWN), "2.5 and then 2.5, and 2 of 2 values differ"),
    "more values": (returning(torch.ones(4), torch.ones(5)), "5 values for a trial and 4 for the exact"),
    "fewer": (returning(*map(torch.ones, (4, 4, 3))), "3 values for a trial and 4"),
    "two limits": (TWO_LIMITS, "loss.* relative limits of 0.01 and 0.02"),
    "two directions": (TWO_WAYS, "loss.* lower is better for one, higher for the other"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_is_refused_leaves_no_file(name: str, tmp_path: Path) -> None:
    budgets, words = SEARCHES[name]
    save_file({"head.weight": torch.randn(96, 96)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=words):
        compress(
            [tmp_path / "a.safetensors"],
            tmp_path / "out.ckptz",
            jobs=1,
            search=SearchOptions(budgets=budgets, max_evaluations=4),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
