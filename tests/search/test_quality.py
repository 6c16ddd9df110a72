"""Qualities other than the loss: agreement of logits, resumed training, and several budgets at once."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain

from ckptz import Agreement, Budget, ResumeProbe
from ckptz import compress as compress_files
from ckptz.search.budget import Measurement, SearchOptions, check_consistent
from ckptz.search.measures import CHUNK_ENTRIES, NOISE_SHARE, agreement_of, prepare
from ckptz.torch import load_file
from ckptz.verbs.compress import CompressReport
from tests.support.cli_support import ckptz

State = dict[str, torch.Tensor]
N_IN, N_OUT, N_ROWS = 64, 96, 128

# A linear classifier with the state of Adam, and evaluations as users write them.
FUNCTIONS = f"""
import math
import torch

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn({N_ROWS}, {N_IN}, generator=GENERATOR)
Y = torch.randint({N_OUT}, ({N_ROWS},), generator=GENERATOR)


def logits(state):
    return X @ state["head.weight"].T


def loss(state):
    return float(torch.nn.functional.cross_entropy(logits(state), Y))


def accuracy(state):
    return {{"accuracy": float((logits(state).argmax(1) == Y).float().mean()) + 0.5}}


def resume(state, n_steps):
    weight = state["head.weight"].requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    names = ("exp_avg", "exp_avg_sq")
    moments = {{name: state[f"optimizer.head.weight.{{name}}"] for name in names}}
    optimizer.state[weight] = {{"step": torch.tensor(50.0), **moments}}
    for _ in range(n_steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(X @ weight.T, Y).backward()
        optimizer.step()
    return float(torch.nn.functional.cross_entropy(X @ weight.detach().T, Y))


def breaks(state, n_steps):
    raise RuntimeError("out of\\n  data")


def diverges(state, n_steps):
    return math.nan


loss.data_digest = resume.data_digest = "sha256:cafe"
"""


@pytest.fixture(scope="module")
def functions() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(FUNCTIONS, "functions.py", "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path: Path, functions: dict[str, Any]) -> Path:
    """Return a folder with the classifier after 50 steps: weights and moments in one file."""
    weight = torch.zeros(N_OUT, N_IN, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(functions["X"] @ weight.T, functions["Y"]).backward()
        optimizer.step()
    moments = {f"optimizer.head.weight.{n}": optimizer.state[weight][n] for n in ("exp_avg", "exp_avg_sq")}
    save_plain({"head.weight": weight.detach(), **moments}, tmp_path / "state.safetensors")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def compress(folder: Path, *budgets: Budget, **options: Any) -> CompressReport:
    """Search for the smallest file of the state in `folder`, and return the report."""
    (report,) = compress_files(
        [folder / "state.safetensors"],
        folder / "out.ckptz",
        jobs=1,
        search=SearchOptions(budgets=budgets, **options),
    )
    return report


class Exact:
    """The exact state in memory; counts its plain and its noisy copies."""

    def __init__(self, state: State) -> None:
        self.tensors, self.n_copies, self.n_disturbed = state, 0, 0

    def state(self) -> State:
        self.n_copies += 1
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def noisy_state(self, share: float, seed: int) -> State:
        assert share == NOISE_SHARE
        self.n_disturbed += 1
        return {name: tensor * (1 + share) for name, tensor in self.tensors.items()}


# --- agreement ----------------------------------------------------------------------------------


def test_divergence_and_agreement_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    exact = (3 * rng.standard_normal((50, 7))).astype(np.float32)
    noisy = (exact + rng.standard_normal(exact.shape)).astype(np.float32)
    p, q = (torch.from_numpy(x).double().softmax(1) for x in (exact, noisy))
    expected_kl = float((p * (p.log() - q.log())).sum(1).mean())
    agreement = agreement_of(exact, noisy)
    assert agreement["kl"] == pytest.approx(expected_kl, rel=1e-12)
    assert agreement["top1"] == float((p.argmax(1) == q.argmax(1)).double().mean())


def test_agreement_does_not_depend_on_chunks() -> None:
    rng = np.random.default_rng(1)
    n_entries = CHUNK_ENTRIES // 3
    exact, noisy = (rng.standard_normal((8, n_entries)).astype(np.float32) for _ in range(2))
    rows = [agreement_of(exact[i : i + 1], noisy[i : i + 1]) for i in range(8)]
    of_all = agreement_of(exact, noisy)
    for metric in ("kl", "top1"):
        assert of_all[metric] == pytest.approx(np.mean([row[metric] for row in rows]), rel=1e-12)


def test_softmax_shares_do_not_overflow_or_lose_small_differences() -> None:
    exact = np.array([[1e30, 0.0, -1e30], [1000.0, 999.0, 0.0]], np.float32)
    assert agreement_of(exact, exact) == {"kl": 0.0, "top1": 1.0}
    near = np.array([[0.0, 0.0]], np.float32)
    far = np.array([[1e-4, 0.0]], np.float32)
    assert agreement_of(near, far)["kl"] == pytest.approx(1e-8 / 8, rel=1e-3)


def test_only_entries_that_the_exact_model_excludes_are_ignored() -> None:
    exact = np.array([[0.0, 1.0, -np.inf]], np.float32)
    same = np.array([[0.0, 1.0, -np.inf]], np.float32)
    assert agreement_of(exact, same)["kl"] == 0.0
    assert agreement_of(same[:, ::-1].copy(), exact)["kl"] == math.inf


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_agreement_with_logits_that_are_not_finite_is_nan(value: float) -> None:
    exact = np.zeros((2, 3), np.float32)
    invalid = exact.copy()
    invalid[1, 1] = value
    assert all(math.isnan(number) for number in agreement_of(exact, invalid).values())


def test_exact_logits_are_computed_once_and_copied_from_the_users_buffer() -> None:
    buffer = torch.zeros(4, 5, dtype=torch.bfloat16)

    def logits(state: State) -> torch.Tensor:
        buffer.copy_(state["bias"].expand(4, 5))
        return buffer.view(2, 2, 5)

    exact = Exact({"bias": torch.arange(5.0)})
    prepared = prepare(Agreement(logits), exact)
    assert exact.n_copies == 1
    assert prepared.exact == {"kl": 0.0, "top1": 1.0}
    agreement = prepared.quality({"bias": -torch.arange(5.0)})
    assert agreement["top1"] == 0.0
    assert agreement["kl"] > 1


# --- the resume probe ---------------------------------------------------------------------------


def test_a_probe_measures_its_noise_by_a_repeat_and_a_noisy_state() -> None:
    losses = iter((2.0, 2.002, 1.999, 1.9))
    seen = []

    def resume(state: State, n_steps: int) -> float:
        seen.append(n_steps)
        return next(losses)

    exact = Exact({"w": torch.ones(3, 3)})
    prepared = prepare(ResumeProbe(resume, n_steps=10), exact)
    assert prepared.exact == 2.0
    assert prepared.noise == pytest.approx(0.002)
    assert prepared.gain_per_step == pytest.approx(0.01)
    assert seen == [10, 10, 10, 20]
    assert (exact.n_copies, exact.n_disturbed) == (3, 1)


def test_a_gain_below_the_noise_is_not_used() -> None:
    losses = iter((2.0, 2.002, 1.999, 1.999))
    assert prepare(ResumeProbe(lambda state, n_steps: next(losses)), Exact({})).gain_per_step is None


def test_a_known_noise_floor_is_not_measured() -> None:
    exact = Exact({})
    probe = ResumeProbe(lambda state, n_steps: float(n_steps), n_steps=7, noise_floor=0.01)
    prepared = prepare(probe, exact)
    assert (prepared.exact, prepared.noise) == (7.0, 0.01)
    assert (exact.n_copies, exact.n_disturbed) == (2, 0)


def test_a_noisy_state_that_diverges_means_infinite_noise() -> None:
    losses = iter((2.0, 2.0, math.nan, 1.0))
    assert prepare(ResumeProbe(lambda state, n_steps: next(losses)), Exact({})).noise == math.inf


def test_a_probe_gets_the_whole_state_and_its_file_promises_a_resumed_gap(
    folder: Path, functions: dict[str, Any]
) -> None:
    seen: list[set[str]] = []

    def resume(state: State, n_steps: int) -> float:
        seen.append(set(state))
        return float(functions["resume"](state, n_steps))

    report = compress(folder, Budget(ResumeProbe(resume, n_steps=5), 0.02))
    exact = load_plain(folder / "state.safetensors")
    assert all(names == set(exact) for names in seen)
    assert report.search.is_met
    assert len(seen) == 4 + len(report.search.trials)
    record = report.search.quality[0]
    assert (record.promise, record.metric) == ("resume-gap", "resume")
    restored = load_file(folder / "out.ckptz")
    assert functions["resume"](dict(restored), 5) == record.measured <= record.exact * 1.02
    assert not torch.equal(restored["optimizer.head.weight.exp_avg"], exact["optimizer.head.weight.exp_avg"])
    facts = ckptz("inspect", folder / "out.ckptz", "--json").json
    assert {tensor["lossy"]["promise"] for tensor in facts["tensors"]} == {"resume-gap"}


def probe_of_decay(functions: dict[str, Any], per_step: float) -> ResumeProbe:
    """Return a probe: the resumed loss plus 1, less `per_step` for every step of training."""
    return ResumeProbe(
        lambda state, n_steps: 1 + float(functions["resume"](state, 5)) - per_step * n_steps, n_steps=5
    )


def test_a_budget_in_steps_is_kept_and_recorded_with_the_loss(
    folder: Path, functions: dict[str, Any]
) -> None:
    report = compress(folder, Budget(probe_of_decay(functions, 0.01), 2, in_steps=True))
    assert report.search.is_met
    assert report.n_lossy
    loss, steps = report.search.quality
    assert (loss.metric, steps.metric, steps.exact) == ("resume", "steps_lost", 0.0)
    assert loss.measured - loss.exact <= 2 * 0.01 + 1e-9
    assert steps.measured == pytest.approx((loss.measured - loss.exact) / 0.01, rel=1e-6)
    assert (steps.max_drop, steps.is_relative, steps.is_met) == (pytest.approx(2), False, True)
    assert "steps of training lost (limit 2)" in ckptz("inspect", folder / "out.ckptz").stdout


def test_a_budget_of_the_loss_is_also_recorded_in_steps(folder: Path, functions: dict[str, Any]) -> None:
    report = compress(folder, Budget(probe_of_decay(functions, 0.01), 0.02))
    loss, steps = report.search.quality
    assert steps.max_drop == pytest.approx(0.02 * abs(loss.exact) / 0.01, rel=1e-6)


def test_steps_without_a_gain_cannot_be_measured_and_lose_nothing(
    folder: Path, functions: dict[str, Any]
) -> None:
    report = compress(folder, Budget(probe_of_decay(functions, 0.0), 20, in_steps=True))
    assert not report.search.is_met
    assert report.n_lossy == 0
    assert any("cannot be measured in steps" in note for note in report.notes)


@pytest.mark.parametrize(("losses", "met"), [((2.0, 2.0, 2.0002), True), ((2.0, 2.1, 2.0), False)])
def test_noise_above_the_budget_is_reported_and_fails_the_search(
    folder: Path, losses: tuple[float, ...], met: bool
) -> None:
    remaining = iter(losses)
    report = compress(folder, Budget(ResumeProbe(lambda state, n_steps: next(remaining, 2.0)), 0.002))
    assert report.search.is_met is met
    assert report.search.noise[0] == pytest.approx(max(losses) - 2)
    if not met:
        assert report.search.trials == ()
        assert report.n_lossy == 0
        assert any("resume cannot be measured to its budget of 0.2%" in note for note in report.notes)
        assert any("5% (the noise floor)" in note for note in report.notes)


# --- several budgets ----------------------------------------------------------------------------


def test_budgets_of_one_agreement_share_its_logits_and_the_tightest_decides(
    folder: Path, functions: dict[str, Any]
) -> None:
    n_calls = [0]

    def logits(state: State) -> Any:
        n_calls[0] += 1
        assert set(state) == {"head.weight"}
        return functions["logits"](state)

    agreement = Agreement(logits)
    report = compress(
        folder,
        Budget(agreement, 1e-3, relative=False, metric="kl"),
        Budget(agreement, 0.5, relative=False, metric="top1"),
        Budget(functions["loss"], 0.5),
    )
    assert n_calls[0] == 2 + len(report.search.trials)  # exact logits are computed twice
    kl, top1, loss = report.search.quality
    assert (kl.metric, top1.metric, loss.metric) == ("kl", "top1", "loss")
    assert (kl.exact, top1.exact, top1.lower_is_better) == (0.0, 1.0, False)
    assert 0.5e-3 < kl.measured <= 1e-3
    assert loss.data_digest == "sha256:cafe"


def test_budgets_in_different_units_or_of_different_values_agree() -> None:
    def both(state: State) -> dict[str, float]:
        return {"loss": 1.0, "accuracy": 0.5}

    loss, accuracy = Measurement("loss", np.ones(1), True), Measurement("accuracy", np.array([0.5]), False)
    budgets = (
        Budget(both, 0.01),
        Budget(both, 0.02, relative=False),
        Budget(both, 0.03, lower_is_better=False),
    )
    check_consistent(budgets, (loss, loss, accuracy))


def test_a_budget_reads_the_metric_that_it_names() -> None:
    def scores(state: State) -> dict[str, float]:
        return {"loss": 2.0, "perplexity": 7.0, "f1": 0.5}

    measurement = Budget(scores, metric="perplexity").read(scores({}))
    assert (measurement.metric, measurement.value, measurement.lower_is_better) == ("perplexity", 7.0, True)
    measurement = Budget(scores, metric="f1", lower_is_better=False).read(scores({}))
    assert (measurement.metric, measurement.value, measurement.lower_is_better) == ("f1", 0.5, False)


def test_a_plain_number_may_have_any_known_metric() -> None:
    def perplexity(state: State) -> float:
        return 7.0

    for metric in ("loss", "accuracy", "perplexity"):
        assert Budget(perplexity, metric=metric).read(7.0).metric == metric


# --- the command line ---------------------------------------------------------------------------


def run(folder: Path, *options: object, fails: bool = False) -> Any:
    """Compress the state in `folder`; "{f}" in an option stands for the file of evaluations."""
    arguments = [str(option).replace("{f}", str(folder / "functions.py")) for option in options]
    return ckptz(
        "compress", folder / "state.safetensors", "-o", folder / "out.ckptz", *arguments, fails=fails
    )


def test_the_command_keeps_several_budgets(folder: Path) -> None:
    evals = ("--eval", "{f}:logits", "--eval", "{f}:loss", "--eval", "resume={f}:resume")
    texts = ("kl<=5e-3", "top1>=0.9", "loss<=5%", "resume <= 5%")
    budgets = [word for text in texts for word in ("--budget", text)]
    result = run(folder, *evals, *budgets, "--set", "search.resume_steps=4", "--json")
    (tried, *_) = (line for line in result.stderr.splitlines() if line.startswith("ckptz: tried "))
    for metric in ("kl", "top1", "loss", "resume"):
        assert re.search(rf"\b{metric} \d", tried)
    (report,) = result.json["files"]
    records = report["search"]["quality"]
    assert [record["metric"] for record in records] == ["kl", "top1", "loss", "resume", "steps_lost"]
    assert [record["promise"] for record in records] == ["quality-drop"] * 3 + ["resume-gap"] * 2
    assert [record["is_relative"] for record in records] == [False, False, True, True, False]
    assert [round(record["max_drop"], 6) for record in records[:4]] == [0.005, 0.1, 0.05, 0.05]
    assert all(record["is_met"] for record in records)
    assert "resume-gap" in ckptz("inspect", folder / "out.ckptz").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--eval", "{f}:logits"), "logits need --budget"),
        (("--eval", "{f}:logits", "--budget", "kl"), "is not a budget"),
        (
            ("--eval", "{f}:loss", "--budget", "los<=1%"),
            "values without a name, but the budget is for 'los'; write",
        ),
        (("--eval", "{f}:logits", "--budget", "kl<=1%"), "write nats"),
        (("--eval", "{f}:logits", "--budget", "kl>=1"), "kl is better when lower"),
        (("--eval", "{f}:logits", "--budget", "kl<=-1"), "must be at least 0, the allowed rise of kl"),
        (("--eval", "{f}:logits", "--budget", "kl<=nan"), "not a finite number"),
        (("--eval", "{f}:logits", "--budget", "top1>=1.2"), "a share from 0 to 1"),
        (("--eval", "{f}:logits", "--budget", "top1<=0.9"), "top1 is better when higher"),
        (("--eval", "{f}:loss", "--budget", "loss<=much"), "neither a percentage"),
        (("--eval", "{f}:accuracy", "--budget", "accuracy>=1%"), "at most 0"),
        (("--eval", "{f}:accuracy", "--budget", "loss<=1%"), "without 'loss'"),
        (("--eval", "{f}:loss", "--budget", "kl<=1e-3"), "needs one --eval that returns logits"),
        (("--eval", "{f}:loss", "--budget", "resume<=1%"), "returns resume, as in resume=file.py"),
        (("--eval", "{f}:loss", "--eval", "{f}:logits", "--budget", "loss<=1%"), "no --budget uses it"),
        (("--eval", "{f}:loss", "--eval", "{f}:accuracy"), "several --eval need a --budget"),
        (("--eval", "{f}:loss", "--budget", "loss<=1%", "--budget", "loss<=2%"), "contradict each other"),
        (("--eval", "{f}:loss", "--budget", "loss<=1%", "--budget", "1%"), "is not a budget"),
        (("--eval", "{f}:loss", "--set", "search.resume_steps=4"), "needs an --eval resume="),
        (("--budget", "loss<=1%"), "--budget needs --eval"),
        (("--eval", "resume={f}:breaks", "--budget", "1%"), "raised RuntimeError: out of data"),
        (("--eval", "resume={f}:diverges", "--budget", "1%"), "the resume of the exact tensors is nan"),
    ],
)
def test_invalid_options_exit_with_2(folder: Path, options: tuple[object, ...], message: str) -> None:
    result = run(folder, *options, fails=True)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert not (folder / "out.ckptz").exists()


def test_a_budget_below_the_noise_exits_with_6_and_a_message(folder: Path) -> None:
    noisy = (
        "import itertools\nN = itertools.count()\ndef resume(state, n_steps):\n    return 2.0 + next(N) % 2\n"
    )
    (folder / "noisy.py").write_text(noisy)
    result = run(folder, "--eval", f"{folder}/noisy.py:resume", "--budget", "1%", fails=True)
    assert result.exit_code == 6
    assert "the noise floor" in result.stderr
    assert not load_plain(folder / "state.safetensors").keys() - load_file(folder / "out.ckptz").keys()
    ckptz("verify", folder / "out.ckptz", "--against", folder / "state.safetensors")
