"""Whole training states on grids: bytes of anchors and deltas, and the loss when training goes on from them.

    nice python -m bench.studies.whole_state [--quick]  results/whole_state.csv; about 20 minutes on two cores

The run of the study grid (the demo's GPT with AdamW, trained once) is stored as one anchor and four deltas,
as `ckptz compress --base --method grid --calibration` does: weights, both moments, 1-D tensors, counters and
random state in one file each. Bytes are those of the files, headers and indices included; ratios are to fp32
weights and both moments. Training resumes from the whole restored state of the third and of the fourth delta;
"resumed" is the mean validation loss 10, 20, 30 and 40 steps later over that of the exact resume. "noise"
disturbs the weights by a hundredth of their spread: smaller gaps mean nothing. Chains and resumptions are
kept in bench/.cache/whole_state, so that a second run only measures what is missing; delete the folder after
a change of the encoder.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

import ckptz.torch
from bench.core.measure import CACHE, machine, save_facts, save_rows, verdict
from bench.core.report import update_readme
from bench.core.tiny_gpt import read_corpus
from bench.demo.training import QUICK, Resumption, Settings
from bench.studies.grid import Run
from bench.studies.moments import Study, disturbed
from ckptz import compress
from ckptz.methods.grid import Grid
from ckptz.methods.state import Moments

N_THREADS: Final = 1  # of torch: a resumption must be repeatable to the bit, whatever else runs
N_FILES: Final = 5  # one anchor and four deltas
POINTS: Final = (3, 4)  # deltas that training resumes from
RATIO: Final = 50.0  # the target of one delta
LARGEST_GAP: Final = 0.2  # the same, in per cent
BYTES_PER_PARAMETER: Final = 12  # fp32, three times
SETTINGS: Final = dataclasses.replace(Settings(), resume_steps=40, validation_batches=4)


@dataclass(frozen=True, slots=True)
class Case:
    """Steps and dead zones of a chain.

    Attributes:
        step: of all files.
        anchor_zone: dead zone of the anchor.
        delta_zone: of the deltas.
        first_step: of first moments, in roots of the second ones.
    """

    step: float
    anchor_zone: float = 0.1
    delta_zone: float = 0.1
    first_step: float = 1.0

    @property
    def name(self) -> str:
        """For files."""
        first = "" if self.first_step == 1 else f"-first-{self.first_step:g}"
        return f"step-{self.step:g}-zones-{self.anchor_zone:g}-{self.delta_zone:g}{first}"


CASES: Final = (
    Case(0.25, first_step=0.5),
    Case(0.25, first_step=0.5, delta_zone=0),
    Case(0.15, first_step=0.5),
    Case(0.5, first_step=0.5),
    Case(0.25),
    Case(0.5),
)


@dataclass(frozen=True, slots=True)
class Chains:
    """Chains of a run, and resumptions from them, all on disk.

    Attributes:
        run: with states and calibrations.
        study: remembers resumptions.
    """

    run: Run
    study: Study

    @property
    def steps(self) -> list[int]:
        """Steps of the files."""
        settings = self.run.settings
        ends = [settings.steps_between * (i + 1) for i in range(settings.n_checkpoints)]
        return ends[-N_FILES:]

    def exact(self, point: int) -> dict[str, Tensor]:
        """The state that one file of the chain stands for."""
        return load_file(self.run.path("step", self.steps[point]))

    def stored(self, case: Case) -> list[Path]:
        """The files of a chain, written now if they are not there."""
        folder = self.study.folder / case.name
        files: list[Path] = []
        for step in self.steps:
            out = folder / f"step-{step:04d}.ckptz"
            if not out.exists():
                folder.mkdir(parents=True, exist_ok=True)
                zone = case.delta_zone if files else case.anchor_zone
                compress(
                    [self.run.path("step", step)],
                    out,
                    base=files[-1] if files else None,
                    config=Grid(step=case.step, dead_zone=zone, moments=Moments(first_step=case.first_step)),
                    calibration=self.run.path("calibration", step),
                )
            files.append(out)
        return files


# --- the table ----------------------------------------------------------------------------------


def gaps(found: Resumption, exact: Resumption) -> tuple[float, float]:
    """Loss at once and after training on, in per cent of the exact ones."""
    return 100 * (found.at_once / exact.at_once - 1), 100 * (found.resumed / exact.resumed - 1)


def loss_cells(found: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Columns of the losses at all points."""
    cells: dict[str, object] = {"at once, %": f"{statistics.mean(gap[0] for gap in found):+.3f}"}
    return cells | {
        f"resumed, delta {point}, %": f"{gap[1]:+.3f}" for point, gap in zip(POINTS, found, strict=True)
    }


def case_row(case: Case, chains: Chains, exact: Sequence[Resumption]) -> dict[str, object]:
    """One chain."""
    files = chains.stored(case)
    n_bytes = [path.stat().st_size for path in files]
    found = [
        gaps(chains.study.resumed(ckptz.torch.load_file(files[point])), reference)
        for point, reference in zip(POINTS, exact, strict=True)
    ]
    first = chains.exact(0)
    state_bytes = BYTES_PER_PARAMETER * sum(t.numel() for n, t in first.items() if n.startswith("model."))
    ratio = state_bytes / n_bytes[POINTS[0]]
    is_met = ratio >= RATIO and all(gap[1] <= LARGEST_GAP for gap in found)
    return {
        "step": f"{case.step:g}",
        "dead zones": f"{case.anchor_zone:g} / {case.delta_zone:g}",
        "first moments": f"{case.first_step:g} roots",
        "anchor, bytes": n_bytes[0],
        "ratio, anchor": f"{state_bytes / n_bytes[0]:.1f}",
        f"delta {POINTS[0]}, bytes": n_bytes[POINTS[0]],
        "ratio, delta": f"{ratio:.1f}",
        **loss_cells(found),
        "target": f">= {RATIO:g}x, <= {LARGEST_GAP:g} %: {verdict(is_met)}",
    }


def noise_row(chains: Chains, exact: Sequence[Resumption]) -> dict[str, object]:
    """The exact state with disturbed weights."""
    found = [
        gaps(chains.study.resumed(disturbed(chains.exact(point))), reference)
        for point, reference in zip(POINTS, exact, strict=True)
    ]
    empty = (
        "dead zones",
        "first moments",
        "anchor, bytes",
        "ratio, anchor",
        f"delta {POINTS[0]}, bytes",
        "ratio, delta",
    )
    return {"step": "noise"} | dict.fromkeys(empty, "") | loss_cells(found) | {"target": ""}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Whole training states on grids.")
    parser.add_argument("--quick", action="store_true", help="a toy model, to see that everything runs")
    is_quick = parser.parse_args().quick
    settings = dataclasses.replace(QUICK, n_checkpoints=N_FILES) if is_quick else SETTINGS
    suffix = "-quick" if is_quick else ""
    torch.set_num_threads(N_THREADS)
    run = Run(settings, read_corpus(), CACHE / f"grid{suffix}")
    chains = Chains(run, Study(settings, CACHE / f"whole_state{suffix}", (), base_step=0))
    chains.study.folder.mkdir(parents=True, exist_ok=True)
    run.train()
    run.calibrate(chains.steps)
    exact = [chains.study.resumed(chains.exact(point)) for point in POINTS]
    rows = [noise_row(chains, exact)]
    for case in CASES:
        rows.append(case_row(case, chains, exact))
        print(rows[-1], flush=True)
    if is_quick:
        return 0
    rows[1:] = sorted(rows[1:], key=lambda row: (float(str(row["step"])), str(row["dead zones"])))
    save_rows("whole_state", rows)
    save_facts("whole_state", machine(), "python -m bench.studies.whole_state")
    update_readme()
    return 0


if __name__ == "__main__":
    sys.exit(main())
