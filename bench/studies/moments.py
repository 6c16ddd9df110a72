"""Optimizer moments: bits per parameter, and the gap that they leave when training goes on.

    nice python -m bench.studies.moments [--quick]

Trains the demo's GPT once (kept in bench/.cache/moments), replaces both moments of a checkpoint by what a
file restores while the weights stay exact, trains on, and holds the validation loss of the further steps
against the exact resumption. Every resumption is kept under the digest of what it began with, so that a
second run only measures what changed. Two tables: steps of both moments with rivals, and the bits that
second moments take behind each prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.core.measure import CACHE, machine, save_rows, verdict
from bench.core.report import finish
from bench.core.tiny_gpt import read_corpus
from bench.demo.training import QUICK, Resumption, Settings, Trainer, digest, resume
from bench.studies.paper_a.chain import disturbed
from ckptz import compress, restore
from ckptz.kernels import floats
from ckptz.methods.grid import Grid
from ckptz.methods.state import Moments
from ckptz.quant.moments import LogSums, best_ladder, entropy_of, ladder_step

State = Mapping[str, Tensor]
Change = Callable[[State], dict[str, Tensor]]

N_THREADS = 1  # of torch: a resumption must be repeatable to the bit, whatever else runs
BLOCK = 256  # of the rival with 8-bit codes
STEPS_OF_MOMENTS = (
    Moments(second_step=2, first_step=0.5),
    Moments(second_step=4, first_step=0.5),
    Moments(second_step=4, first_step=0.7),
    Moments(second_step=4, first_step=1),
    Moments(second_step=6, first_step=1),
    Moments(second_step=8, first_step=2),
)


@dataclass(frozen=True, slots=True)
class Study:
    """A trained run: its settings, where it lies, the checkpoints that are resumed, and one before them."""

    settings: Settings
    folder: Path
    steps: tuple[int, ...]
    base_step: int

    def path(self, step: int) -> Path:
        """A checkpoint."""
        return self.folder / f"step-{step:04d}.safetensors"

    def trained(self) -> None:
        """Train, unless that was done before."""
        if all(self.path(step).exists() for step in (self.base_step, *self.steps)):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(self.settings.model, read_corpus()[0])
        while trainer.step < max(self.steps):
            trainer.train(self.settings.steps_between)
            save_file(trainer.state(), self.path(trainer.step))

    def resumed(self, state: State) -> Resumption:
        """Train on from a state, or remember what came of it."""
        path = self.folder / f"resumed-{digest(state)[:16]}-{self.settings.resume_steps}.json"
        if not path.exists():
            found = resume(state, self.settings, read_corpus(), N_THREADS)
            path.write_text(json.dumps(asdict(found)))
        return Resumption(**json.loads(path.read_text()))


FULL = Study(Settings(), CACHE / "moments", (160,), base_step=120)
SHORT = Study(QUICK, CACHE / "moments-quick", (6,), base_step=3)


# --- what replaces the moments ------------------------------------------------------------------


def moments_of(state: State) -> dict[str, Tensor]:
    """Both moments of all parameters."""
    return {name: tensor for name, tensor in state.items() if ".exp_avg" in name}


def reset(state: State) -> dict[str, Tensor]:
    """An optimizer that begins anew."""
    return {**state, **{name: torch.zeros_like(tensor) for name, tensor in moments_of(state).items()}}


def in_blocks(state: State) -> dict[str, Tensor]:
    """First moments and roots of second ones in 8 bits, scaled by the largest of each block."""
    changed = dict(state)
    for name, tensor in moments_of(state).items():
        is_second = name.endswith("_sq")
        flat = tensor.sqrt().reshape(-1) if is_second else tensor.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).reshape(-1, BLOCK)
        scale = padded.abs().amax(1, keepdim=True).clamp(min=1e-30) / (255 if is_second else 127)
        restored = ((padded / scale).round() * scale).reshape(-1)[: len(flat)].reshape(tensor.shape)
        # A root restored as zero would make the next step explode.
        lowest = scale.repeat_interleave(BLOCK)[: len(flat)].reshape(tensor.shape)
        changed[name] = torch.maximum(restored, lowest).square() if is_second else restored
    return changed


def through_file(
    state: State, moments: Moments, folder: Path, base: State | None = None
) -> tuple[dict[str, Tensor], int]:
    """The state with moments restored from a file of them, and the file's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, part in (("base", base), ("moments", state)):
        if part is not None:
            paths.append(folder / f"{name}.safetensors")
            save_file(moments_of(part), paths[-1])
    packed = [folder / f"{path.stem}.ckptz" for path in paths]
    for path, out in zip(paths, packed, strict=True):
        base_file = packed[0] if out != packed[0] else None
        compress([path], out, config=Grid(moments=moments), base=base_file, force=True)
    restored = folder / "restored.safetensors"
    restore(packed[-1], restored, force=True)
    return {**state, **load_file(restored)}, packed[-1].stat().st_size


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """What a replacement does to the loss, in percent of the exact one's: mean over the resumed points."""

    first: float
    resumed: float


def gap_of(study: Study, states: Mapping[int, State], changed: Mapping[int, State]) -> Gap:
    """Train on from changed states."""
    pairs = [(study.resumed(states[step]), study.resumed(changed[step])) for step in study.steps]
    first = statistics.mean(new.validation[0] / exact.validation[0] - 1 for exact, new in pairs)
    resumed = statistics.mean(new.resumed / exact.resumed - 1 for exact, new in pairs)
    return Gap(100 * first, 100 * resumed)


def row_of(
    name: str, bits: float | None, gap: Gap, target: str = "", is_met: bool | None = None
) -> Mapping[str, object]:
    """One row of the table of gaps."""
    return {
        "moments": name,
        "bits / parameter, both": "" if bits is None else f"{bits:.3f}",
        "gap after 10 steps": f"{gap.first:+.3f} %",
        "gap resumed": f"{gap.resumed:+.3f} %",
        "target": target,
        "verdict": "" if is_met is None else verdict(is_met),
    }


def gap_rows(study: Study) -> list[Mapping[str, object]]:
    """Rivals, and files of several steps."""
    states = {step: load_file(study.path(step)) for step in study.steps}
    n = sum(t.numel() for name, t in states[study.steps[0]].items() if name.startswith("model."))

    def with_change(change: Change) -> Gap:
        return gap_of(study, states, {step: change(state) for step, state in states.items()})

    noise = with_change(lambda state: disturbed(state, 1))
    rows = [
        row_of("exact, weights disturbed by 1 % (noise floor)", 64.0, noise),
        row_of(f"8 bits in blocks of {BLOCK}", 16 + 64 / BLOCK, with_change(in_blocks)),
        row_of("reset", 0.0, with_change(reset)),
    ]
    limit = max(2 * abs(noise.resumed), 0.05)
    for moments in STEPS_OF_MOMENTS:
        files = {s: through_file(state, moments, study.folder / "files") for s, state in states.items()}
        bits = statistics.mean(8 * n_bytes / n for _, n_bytes in files.values())
        gap = gap_of(study, states, {step: state for step, (state, _) in files.items()})
        is_default = moments == Moments()
        target = f"<= 0.5 bits, gap <= {limit:.2f} %" if is_default else ""
        met = bits <= 0.5 and gap.resumed <= limit
        rows.append(row_of(_name(moments), bits, gap, target, met if is_default else None))
    return [*rows, _delta_row(study, states, n)]


def _delta_row(study: Study, states: Mapping[int, State], n: int) -> Mapping[str, object]:
    last, base = study.steps[-1], load_file(study.path(study.base_step))
    changed, n_bytes = through_file(states[last], Moments(), study.folder / "files", base)
    gap = gap_of(replace(study, steps=(last,)), states, {last: changed})
    return row_of(f"{_name(Moments())}, against step {study.base_step}", 8 * n_bytes / n, gap)


def _name(moments: Moments) -> str:
    first = f"{moments.first_step:g} roots, dead zone {moments.first_dead_zone:g}"
    return f"{moments.second_step:g} octaves / {first}"


def prediction_rows(study: Study) -> list[Mapping[str, object]]:
    """Bits of second moments behind each prediction, by an ideal coder, vectors not counted."""
    before, state = (load_file(study.path(step)) for step in (study.base_step, study.steps[-1]))
    names = [n for n, t in state.items() if n.endswith("_sq") and t.ndim > 1]
    n = sum(state[name].numel() for name in names)
    rows = []
    for octaves in (1, 2, 4, 8):
        step, bits = ladder_step(octaves, floats.F32), dict.fromkeys(("zero", "base", "sums", "logs"), 0.0)
        for name in names:
            found, base = (s[name].numpy() for s in (state, before))
            live = found != 0
            for kind, predicted in _predicted(found, base, step).items():
                distances = _orders(found)[live] - predicted[live]
                bits[kind] += entropy_of(best_ladder(distances, step).indices(distances))
        rows.append(
            {
                "step, octaves": octaves,
                "from zero": round(bits["zero"] / n, 3),
                "from the base, restored": round(bits["base"] / n, 3),
                "row and column sums (Adafactor)": round(bits["sums"] / n, 3),
                "row and column means of logarithms": round(bits["logs"] / n, 3),
            }
        )
    return rows


def _orders(values: np.ndarray) -> np.ndarray:
    return floats.order(values.view(np.uint32)).astype(np.int64)


def _predicted(found: np.ndarray, base: np.ndarray, step: int) -> dict[str, np.ndarray]:
    zero = 1 << 31
    rows, columns = found.sum(1, dtype=np.float64), found.sum(0, dtype=np.float64)
    sums = np.outer(rows, columns) / max(rows.sum(), 1e-300)
    logs = LogSums.of(found.reshape(-1).astype(np.float64), 0, found.shape).factors()
    outer = np.outer(*(vector.view(np.float32) for vector in logs))
    predicted_base = zero + (_orders(base) - zero + step // 2) // step * step
    return {
        "zero": np.full(found.shape, zero),
        "base": predicted_base,
        "sums": _orders(sums.astype(np.float32)),
        "logs": _orders(outer),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Optimizer moments: bits and resumed gaps.")
    parser.add_argument("--quick", action="store_true", help="a toy model, to see that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    study = SHORT if options.quick else FULL
    study.trained()
    predictions, gaps = prediction_rows(study), gap_rows(study)
    if options.quick:
        print(*predictions, *gaps, sep="\n")
        return
    save_rows("moments_predictions", predictions)
    save_rows("moments_gaps", gaps)
    finish("moments", machine())


if __name__ == "__main__":
    main()
