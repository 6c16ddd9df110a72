"""`ckptz plan-run`: sums that can be done by hand, the committed benches, and numbers that make no sense."""

from __future__ import annotations

import csv
import math
from typing import Any

import pytest

from ckptz import plan_run
from ckptz.commands.plan_run import GRID, LOSSLESS, LOSSLESS_BF16, MODES, best_interval
from ckptz.errors import ConfigError
from tests.support.cli_support import ckptz
from tests.support.spec_support import ROOT


def rows(name: str) -> list[dict[str, str]]:
    with (ROOT / "bench" / "results" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_plain_files_cost_what_arithmetic_says() -> None:
    waits, background = plan_run(
        1e9, interval=1000, nodes=2, bandwidth=1e9, copy=6e9, between_failures=1e5, restart=100, keep=3
    ).modes[:2]
    sizes = (waits.bytes_a_save, waits.bytes_a_day, waits.bytes_kept)
    assert sizes == pytest.approx((12e9, 12e9 * 86.4, 36e9))
    assert (waits.stall_seconds, waits.safe_seconds, waits.restore_seconds) == (12, 12, 12)
    assert (background.stall_seconds, background.safe_seconds) == (1, 12)
    assert background.lost_seconds == 500 + 12 + 12 + 100
    assert background.overhead == pytest.approx(1 / 1000 + 624 / 1e5)
    assert waits.core_hours_a_day == 0


def test_cores_bound_what_the_store_does_not() -> None:
    plan = {mode.mode: mode for mode in plan_run(1e9, nodes=1, cores=2, bandwidth=1e15, keep=2).modes}
    for name, files in (("lossless", (LOSSLESS,)), ("grid, newest step exact", (GRID, LOSSLESS))):
        assert plan[name].safe_seconds == pytest.approx(sum(6e9 / file.encode for file in files))
        assert plan[name].restore_seconds == pytest.approx(sum(6e9 / file.decode for file in files))
    kept = 2 * 12e9 / GRID.ratio + 12e9 / LOSSLESS.ratio
    assert plan["grid, newest step exact"].bytes_kept == pytest.approx(kept)


def test_bf16_weights_count_by_their_share_of_the_bytes() -> None:
    [alone] = [
        one
        for one in plan_run(1e9, bytes_per_parameter=2, cores=1, bandwidth=1e15).modes
        if one.mode == "lossless"
    ]
    assert (alone.bytes_a_save, alone.safe_seconds) == pytest.approx(
        (2e9 / 1.508, 2e9 / LOSSLESS_BF16.encode)
    )
    [beside] = [one for one in plan_run(1e9, bytes_per_parameter=14).modes if one.mode == "lossless"]
    assert beside.bytes_a_save == pytest.approx(12e9 / LOSSLESS.ratio + 2e9 / LOSSLESS_BF16.ratio)


@pytest.mark.parametrize("mode", MODES)
def test_no_other_interval_is_better(mode: str) -> None:
    settings: dict[str, Any] = {"nodes": 4, "bandwidth": 5e9, "between_failures": 20_000}
    [found] = [one for one in plan_run(3e9, **settings).modes if one.mode == mode]
    for factor in (0.5, 0.9, 1.1, 2):
        interval = max(found.best_interval * factor, found.safe_seconds)
        [other] = [one for one in plan_run(3e9, interval=interval, **settings).modes if one.mode == mode]
        assert (
            other.overhead >= found.best_overhead * 0.995
        )  # Daly's formula is exact for exponential failures


def test_the_best_interval_is_youngs_where_failures_are_rare() -> None:
    assert best_interval(1, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-3)
    assert best_interval(10, 4) == 4


def test_the_figures_are_those_of_the_benches() -> None:
    demo = {row["method"]: row for row in rows("demo")}
    for name, used in (("ckptz lossless", LOSSLESS), ("ckptz grid", GRID)):
        measured = float(demo[name]["ratio, weights and both moments"].removesuffix("x"))
        assert used.ratio == pytest.approx(measured, rel=0.15)
    speeds = {(row["weights"], row["case"]): float(row["best MB/s"]) for row in rows("lossless_speeds")}
    for weights, used in (("fp32", LOSSLESS), ("bf16", LOSSLESS_BF16)):
        assert used.encode / 1e6 == pytest.approx(speeds[weights, "ckptz file, compress"], rel=0.15)
        assert used.decode / 1e6 == pytest.approx(speeds[weights, "ckptz file, decompress"], rel=0.15)
    [bf16] = [
        row for row in rows("lossless_sizes") if row["tool"].startswith("ckptz") and row["weights"] == "bf16"
    ]
    assert LOSSLESS_BF16.ratio == pytest.approx(1 / float(bf16["of raw"]), rel=0.01)
    for row in rows("whole_state"):
        if row["case"].startswith("delta"):
            used = GRID.encode if row["case"].endswith("encode") else GRID.decode
            raw = float(row["median MB/s"]) * float(row["median s"])
            assert used / 1e6 == pytest.approx(
                raw / (float(row["user s"]) + float(row["system s"])), rel=0.15
            )
    # Another run, of which all steps are kept: its own ratio of deltas, and the residuals as predicted.
    kept = {row["arm"]: row for row in rows("exact_head") if (row["steps"], row["keep"]) == ("14", "all")}
    raw = float(kept["lossy, newest step exact"]["raw, MB"])
    residual = raw / 14 / LOSSLESS.ratio
    assert float(kept["lossy, newest step exact"]["of these residuals, MB"]) == pytest.approx(
        residual, rel=0.15
    )
    assert float(kept["lossless"]["on disk, MB"]) == pytest.approx(raw / LOSSLESS.ratio, rel=0.15)


def test_what_is_said_of_large_cases_is_what_was_measured_or_the_table_says_why() -> None:
    if not (ROOT / "bench" / "results" / "plan_run.csv").exists():
        pytest.skip("not measured yet: python -m bench.product.plan_run")
    found = rows("plan_run")
    assert len(found) >= 3
    for row in found:
        assert row["why"] or abs(float(row["plan-run"]) / float(row["measured"]) - 1) < 0.155, row["case"]


@pytest.mark.parametrize(
    "wrong", [{"interval": 0}, {"bandwidth": math.nan}, {"keep": -1}, {"restart": math.inf}]
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        plan_run(1e9, **wrong)  # type: ignore[arg-type]


def test_the_command_takes_units_and_shows_every_way_to_save() -> None:
    line = ("plan-run", "--parameters", "7B", "--interval", "15m", "--bandwidth", "2GB", "--restart", "0s")
    shown = ckptz(*line).stdout
    assert shown.startswith("a state of 84 GB\n")
    assert all(mode in shown for mode in MODES)
    found = ckptz(*line, "--json").json["modes"]
    wanted = plan_run(7e9, interval=900, bandwidth=2e9, restart=0).modes
    assert [row["safe_seconds"] for row in found] == [mode.safe_seconds for mode in wanted]
    assert "not a number" in ckptz("plan-run", "--parameters", "many", fails=True).stderr
