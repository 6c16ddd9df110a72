"""Which further levers would make checkpoints smaller: each measured alone, on real states, and kept or not.

    OMP_NUM_THREADS=1 nice python bench/levers.py      results/levers*.csv

States are those of the language run of paper_a.py, which trains them if they are not there. Chains of lossy
weights are an anchor and three deltas at the default step, calibrated, in memory (levers_chain.py).
"at equal error" is the run's size against that of the default method at a step with the same weighted error,
from its own curve; "of a file" is the same of a whole state's delta, moments and 1-D tensors counted. The
resumed gap is that of the third delta's weights with exact moments, 10 to 40 steps on. Every figure is kept
in bench/.cache/levers, so that an interrupted bench goes on; delete the folder after a change of the encoder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from levers_bits import scaled_base
from levers_chain import Link, Way, links
from levers_counted import bit_rows
from levers_first import first_rows
from levers_rate import by_values, weighed
from levers_states import FOLDER, N_FILES, measured, points
from measure import machine, save_facts, save_rows
from paper_a_chain import exact_probe, resumed_gap
from paper_a_tasks import Task, language
from paper_a_training import N_CHECKPOINTS, Run, Trainer, probe_on
from report import update_readme

from ckptz.commands.compress import CompressOptions, compress_files
from ckptz.commands.inspect import inspect_file
from ckptz.methods.grid import Grid

ENOUGH: Final = 5.0  # per cent of size that a lever must save
DEFAULT: Final = Way(1.0, 1.0)
CURVE: Final = (0.5, 0.7, 1.0, 1.4)  # steps of the default method
RATE: Final = 0.1
CHAINS: Final[Mapping[str, Way]] = {
    "levels at the means of the values": Way(1.0, 1.0, revise=by_values),
    "dead zone 0.2": Way(1.0, 1.0, dead_zone=0.2),
    "anchor at 0.7 of the step": Way(0.7, 1.0),
    "anchor at 1.4 of the step": Way(1.4, 1.0),
    "deltas to a scaled base and last movement": Way(1.0, 1.0, predict=scaled_base, n_parameters=2),
}
LAYER: Final = "blocks.1.down"  # one layer stands for all where rounding takes long
OF_A_LAYER: Final[Mapping[str, Way]] = {
    f"errors against bits, {RATE:g} squared steps a bit": Way(
        1.0, 1.0, 0.0, revise=weighed(RATE), only=LAYER
    ),
    "the same with a gain": Way(1, 1, 0.0, revise=weighed(RATE, has_gain=True), only=LAYER),
    "dead zone 0": Way(1.0, 1.0, 0.0, only=LAYER),
    "dead zone 0.05": Way(1.0, 1.0, 0.05, only=LAYER),
}
BEFORE: Final = "levels at the means of the values"  # what the encoder did until this was measured
PROBED: Final = (BEFORE, "default", "dead zone 0.2")


# --- chains -------------------------------------------------------------------------------------


def chain_facts(task: Task, name: str, way: Way) -> dict[str, Any]:
    """Bits, errors and, of some, the resumed gap."""

    def make() -> dict[str, Any]:
        found = links(points(task), way)
        facts: dict[str, Any] = {
            "bits": [link.bits for link in found],
            "errors": [link.error for link in found],
            "sent": [link.sent for link in found],
        }
        if name in PROBED:
            facts["resumed"] = _resumed(task, found[-1])
        return facts

    return measured(f"chain {name}", make)


def _resumed(task: Task, link: Link) -> float:
    """Per cent of the loss when training goes on from restored weights and exact moments."""
    index = N_FILES - 1
    weights = {name: torch.from_numpy(one.values.copy()) for name, one in link.tensors.items()}
    losses = probe_on(Trainer(task, {**Run(task).state(index), **weights}))
    return 100 * resumed_gap({"restored": losses, "exact": exact_probe(task, index)})


def run_bits(facts: Mapping[str, Any]) -> float:
    """Mean bits of the run, of which all deltas that were not made count as the mean of those that were."""
    anchor, *deltas = facts["bits"]
    return (anchor + (N_CHECKPOINTS - 1) * float(np.mean(deltas))) / N_CHECKPOINTS


def worst_error(facts: Mapping[str, Any]) -> float:
    """Of all files."""
    return max(facts["errors"])


def at_equal_error(facts: Mapping[str, Any], curve: list[dict[str, Any]]) -> float:
    """Per cent that the run's size differs from the default's at the same worst weighted error."""
    errors, sizes = [worst_error(f) for f in curve], [run_bits(f) for f in curve]
    size = float(np.interp(np.log(worst_error(facts)), np.log(errors), sizes))
    return 100 * (run_bits(facts) / size - 1)


def chain_rows(task: Task) -> list[dict[str, object]]:
    """All ways to store the chain."""
    curve = [chain_facts(task, _curve_name(step), Way(step, step)) for step in CURVE]
    default = chain_facts(task, "default", DEFAULT)
    share = file_share(task)
    rows = [_chain_row("default", default, default, 0.0, share, "")]
    for name, way in CHAINS.items():
        facts = chain_facts(task, name, way)
        equal = at_equal_error(facts, curve)
        rows.append(_chain_row(name, facts, default, equal, share, _verdict(name, equal * share)))
    return rows


def layer_rows(task: Task) -> list[dict[str, object]]:
    """Roundings of one layer, whose steps are as large as they may be at any setting."""
    default = chain_facts(task, "default of a layer", replace(DEFAULT, only=LAYER))
    rows = []
    for name, facts in {"default": default, **_layers(task)}.items():
        rows.append(
            {
                "rounding": name,
                "bits, anchor": f"{facts['bits'][0]:.3f}",
                "bits, delta 3": f"{facts['bits'][-1]:.3f}",
                "run, %": f"{100 * (run_bits(facts) / run_bits(default) - 1):+.1f}",
                "worst error, %": f"{100 * (worst_error(facts) / worst_error(default) - 1):+.1f}",
                "movement sent": f"{facts['sent'][-1]:.3f}",
            }
        )
    return rows


def _layers(task: Task) -> dict[str, dict[str, Any]]:
    return {name: chain_facts(task, f"{name} of a layer", way) for name, way in OF_A_LAYER.items()}


def _curve_name(step: float) -> str:
    return "default" if step == DEFAULT.anchor_step else f"default step {step:g}"


def _verdict(name: str, saved: float) -> str:
    if name == BEFORE:
        return "left"
    return "would win" if saved <= -ENOUGH else "no"


def _chain_row(
    name: str,
    facts: Mapping[str, Any],
    default: Mapping[str, Any],
    equal: float,
    share: float,
    kept: str,
) -> dict[str, object]:
    resumed = facts.get("resumed")
    return {
        "lever": name,
        "bits, anchor": f"{facts['bits'][0]:.3f}",
        "bits, delta 3": f"{facts['bits'][-1]:.3f}",
        "run, bits": f"{run_bits(facts):.3f}",
        "run, %": f"{100 * (run_bits(facts) / run_bits(default) - 1):+.1f}",
        "worst error, %": f"{100 * (worst_error(facts) / worst_error(default) - 1):+.1f}",
        "at equal error, %": f"{equal:+.1f}",
        "of a file, %": f"{equal * share:+.1f}",
        "movement sent": f"{facts['sent'][-1]:.3f}",
        "resumed, %": "" if resumed is None else f"{resumed:+.3f}",
        "kept": kept,
    }


def file_share(task: Task) -> float:
    """Share of lossy weights in a whole state's delta, as `ckptz compress` writes it."""

    def make() -> dict[str, Any]:
        paths = [Run(task).path(index) for index in (0, 1)]
        files = [FOLDER / f"share-{index}.ckptz" for index in (0, 1)]
        for i, (path, out) in enumerate(zip(paths, files, strict=True)):
            base = files[0] if i else None
            calibration = FOLDER / f"calibration-16-{i:02d}.safetensors"
            options = CompressOptions(base=base, config=Grid(), calibration=calibration, force=True)
            list(compress_files([path], out, options))
        lossy = set(points(task)[0].lossy)
        stored = {t.name: t.stored_bytes for t in inspect_file(files[1]).tensors}
        return {"share": sum(n for name, n in stored.items() if name in lossy) / files[1].stat().st_size}

    return measured("share", make)["share"]


def main() -> int:
    """Command line."""
    torch.set_num_threads(1)
    task = language()
    Run(task).train()
    save_rows("levers", chain_rows(task))
    save_rows("levers_rounding", layer_rows(task))
    save_rows("levers_bits", bit_rows(task))
    save_rows("levers_first", first_rows(task))
    save_facts("levers", machine(), "python bench/levers.py", share=file_share(task))
    update_readme()
    return 0


if __name__ == "__main__":
    sys.exit(main())
