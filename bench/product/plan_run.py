"""Holds what `ckptz plan-run` says against cases that other benches have measured; measures nothing itself.

    python -m bench.product.plan_run

The cases are the large folder of bench.product.large and the fine-tuned encoder of bench.studies.encoder.
Seconds are those of the cores, for the store was not what plan-run is asked about here. Where the two differ
by more than 15 %, the table says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.core.measure import Row, parser_of, read_rows, save_rows, verdict
from bench.core.report import update_readme
from ckptz import plan_run
from ckptz.commands.plan_run import ModePlan

MOST: Final = 0.15
ENDLESS: Final = 1e15  # bytes a second
WHY: Final = {
    "8 ranks, compress: core seconds": "torch's own writer is in it",
    "8 ranks, restore: core seconds": "torch's own reader is in it, and a copy in a file",
    "encoder, residual of the newest step: MB": "moments of words that training has not met are zeros",
    "encoder, a save with an exact head: core seconds": "these moments take longer to code than made-up ones",
    "encoder, lossy files: times smaller": "training moves less: take the ratio of a run of your own",
}


def mode(name: str, n_bytes: float, *, bytes_per_parameter: float = 12, cores: int = 1) -> ModePlan:
    """Ask plan-run about a state of so many bytes, on a machine whose store costs no time."""
    found = plan_run(
        n_bytes / bytes_per_parameter, bytes_per_parameter=bytes_per_parameter, cores=cores, bandwidth=ENDLESS
    )
    return next(one for one in found.modes if one.mode == name)


def cases() -> Iterator[tuple[str, float, float]]:
    """(what, what plan-run says, what was measured)."""
    for row in read_rows("large"):
        what, verb = row["command"].rsplit(", ", 1)
        if what == "delta" or row["jobs"] != "2":
            continue
        said = mode("lossless", float(row["raw GiB"]), bytes_per_parameter=2)
        if verb == "compress":
            yield f"{what}, lossless: GiB", said.bytes_a_save, float(row["file GiB"])
        said = mode("lossless", float(row["raw GiB"]) * 2**30, bytes_per_parameter=2)
        seconds = said.safe_seconds if verb == "compress" else said.restore_seconds
        yield f"{what}, {verb}: core seconds", seconds, 2 * float(row["codec s"])
    [head] = read_rows("encoder_exact")
    raw = float(head["raw MB"]) / int(head["checkpoints"])
    exact, lossy = (mode(name, raw) for name in ("lossless", "grid"))
    yield "encoder, residual of the newest step: MB", exact.bytes_a_save, float(head["of these exact"])
    yield "encoder, lossy files: times smaller", lossy.ratio, float(head["lossy files"].rstrip("x"))
    both = mode("grid, newest step exact", 1e6 * raw)
    yield "encoder, a save with an exact head: core seconds", both.safe_seconds, float(head["CPU s a save"])


def row(what: str, said: float, measured: float) -> Row:
    """One case."""
    differs = said / measured - 1
    return {
        "case": what,
        "plan-run": f"{said:.3g}",
        "measured": f"{measured:.3g}",
        "differs": f"{100 * differs:+.0f} %",
        "target": f"within {100 * MOST:.0f} %",
        "verdict": verdict(abs(differs) <= MOST),
        "why": WHY.get(what, "") if abs(differs) > MOST else "",
    }


def main() -> None:
    """Command line."""
    parser_of(__doc__).parse_args()
    save_rows("plan_run", [row(*case) for case in cases()])
    update_readme()


if __name__ == "__main__":
    main()
