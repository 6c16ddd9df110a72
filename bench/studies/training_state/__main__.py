"""Whole training states and weights: ckptz's default method against every rival, on one run.

    python -m bench.studies.training_state [--stage NAME ...] [--only WORD ...] [--report] [--quick]

The run is that of paper_a: a GPT of 3.3 M parameters with AdamW, 14 checkpoints, 260 steps apart. Each way
stores all of them, each against the file before, and training is resumed from what five of them restore
to. Stages: snapshots, chains, whole, search; each figure is kept in bench/.cache/training_state, so
that an interrupted study goes on where it stopped, and several processes can take a stage or some ways each
(--only takes words of their names). --report writes the tables and the picture from what is there. About an
hour of CPU time in all, on one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from bench.core.tiny_gpt import GPTConfig, TinyGPT
from bench.studies.paper_a.tasks import Task, language
from bench.studies.paper_a.training import N_THREADS
from bench.studies.training_state.page import write_all
from bench.studies.training_state.search import searches
from bench.studies.training_state.settings import CASES, QUICK, Case, selected
from bench.studies.training_state.study import Study

STAGES: Final = (*CASES, "search")


def quick_task() -> Task:
    """A toy of the same kind."""
    config = GPTConfig(n_layers=1, width=64, n_heads=2)
    return dataclasses.replace(
        language(), name="language-quick", model=lambda: TinyGPT(config), first_step=4, interval=4
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--only", nargs="+", default=(), help="words of the names of ways")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what the cache holds")
    parser.add_argument("--quick", action="store_true", help="a toy model, to see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    study = Study.of(quick_task(), (2, 5)) if args.quick else Study.of(language())
    cases = QUICK if args.quick else CASES
    if not args.report:
        study.run.train()
        measure(study, cases, args.stage, args.only)
    if args.report or args.quick:
        write_all(study, cases, is_kept=not args.quick)


def measure(
    study: Study, cases: Mapping[str, Sequence[Case]], stages: Sequence[str], only: Sequence[str]
) -> None:
    """Whatever of the stages the cache lacks."""
    for stage in stages:
        for case in selected(cases.get(stage, ()), only):
            study.measured(case.way, probes=case.probes)
    if "search" in stages:
        searches(study)
    study.noise()
    study.training_seconds()


if __name__ == "__main__":
    main()
