"""`ckptz plan-run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from ckptz_cli.options import COUNT, session_options
from ckptz_cli.session import Session

if TYPE_CHECKING:
    from ckptz.commands.plan_run import RunPlan

EPILOG = """\b
Examples:
  ckptz plan-run --parameters 7B
  ckptz plan-run --parameters 70B --nodes 64 --bandwidth 10GB --interval 15m --between-failures 6h
  ckptz plan-run --parameters 400M --bytes-per-parameter 14 --keep 100 --json
"""
SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
POWERS: Final = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


class _Quantity(click.ParamType[float]):
    """A positive number, which may end with a unit."""

    def __init__(self, name: str, units: Mapping[str, float], suffix: str = "") -> None:
        self.name, self.units, self.suffix = name, units, suffix

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().removesuffix(self.suffix)
        factor = self.units.get(text[-1:])
        try:
            return float(text if factor is None else text[:-1]) * (factor or 1.0)
        except ValueError:
            self.fail(f"{value}: not a number, nor one that ends with {', '.join(self.units)}", param, ctx)


TIME: Final = _Quantity("time", SECONDS)
NUMBER: Final = _Quantity("number", POWERS)
RATE: Final = _Quantity("bytes a second", POWERS, suffix="B")


@click.command("plan-run", epilog=EPILOG, short_help="Predict what the checkpoints of a job will cost.")
@click.option("--parameters", type=NUMBER, required=True, metavar="N", help="Of the model: 7B, 400M.")
@click.option(
    "--bytes-per-parameter",
    type=float,
    metavar="N",
    help="Of a checkpoint: 12 (default) for fp32 with Adam's moments, 14 with bf16 weights too, 2 for these.",
)
@click.option("--interval", type=TIME, metavar="TIME", help="Between two saves: 90s, 15m, 2h (default 30m).")
@click.option("--nodes", type=COUNT, metavar="N", help="Machines, each with its share (default 1).")
@click.option("--cores", type=COUNT, metavar="N", help="Cores of each node that encode (default 8).")
@click.option("--bandwidth", type=RATE, metavar="BYTES", help="Of the store, a second: 2GB (default 1GB).")
@click.option("--copy", type=RATE, metavar="BYTES", help="From a node's device, a second (default 10GB).")
@click.option("--between-failures", type=TIME, metavar="TIME", help="Of the job, on average (default 1d).")
@click.option("--restart", type=TIME, metavar="TIME", help="Until a job restores again (default 5m).")
@click.option("--keep", type=COUNT, metavar="N", help="Steps that stay on disk (default 5).")
@session_options
@click.pass_obj
def plan_run(session: Session, /, **given: Any) -> None:
    """Predict what the checkpoints of a training job will cost: disk, stalls, cores, and lost work.

    The ratios and speeds are those of ckptz' own benches, on small models with Adam: expect the order of
    size. The best interval is that of Daly's formula, with what a save keeps training waiting.
    """
    import ckptz

    plan = ckptz.plan_run(**{name: value for name, value in given.items() if value is not None})
    session.show(plan, _text(plan))


def _text(plan: RunPlan) -> str:
    from ckptz.pages.words import percent, size
    from ckptz_cli.tables import add_row, drawn, table_of

    table = table_of(
        *("saved", "smaller", "a save", "a day", "on disk", "stall", "stored after", "core hours a day"),
        *("restore", "lost by a failure", "overhead", "best interval", "overhead then"),
    )
    for mode in plan.modes:
        add_row(
            table,
            mode.mode,
            f"{mode.ratio:.1f}x",
            *(size(n) for n in (mode.bytes_a_save, mode.bytes_a_day, mode.bytes_kept)),
            *(_time(seconds) for seconds in (mode.stall_seconds, mode.safe_seconds)),
            f"{mode.core_hours_a_day:.1f}",
            *(_time(seconds) for seconds in (mode.restore_seconds, mode.lost_seconds)),
            percent(mode.overhead),
            _time(mode.best_interval),
            percent(mode.best_overhead),
        )
    return f"a state of {size(plan.state_bytes)}\n{drawn(table)}"


def _time(seconds: float) -> str:
    """Give seconds in the largest unit of which there is one."""
    unit = next((unit for unit in "dhm" if seconds >= SECONDS[unit]), "s")
    return f"{seconds / SECONDS[unit]:.3g} {unit}"
