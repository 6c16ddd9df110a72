"""Converts checkpoint folders of `CkptzTrainerMixin` to those of transformers' Trainer.

    model.ckptz      ->  model.safetensors, or adapter_model.safetensors in the folder of each adapter
    state.ckptz      ->  optimizer.pt, by numbers of parameters, scheduler.pt, scaler.pt
    rng-00000.ckptz  ->  rng_state.pth, or one for each of several ranks

The other files, which the Trainer wrote, are copied. Plain files with the same state, which an earlier
restore into the folder may have left, are not copied, because they may be of another step.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptz.errors import CorruptionError, UnsupportedError, error_context
from ckptz.foreign.adapters import ADAPTERS_KEY, CONFIG_FILE, WEIGHTS_FILE, key_of, parse_adapters
from ckptz.foreign.folders import Carried, Input, find_carried, stage_carried
from ckptz.foreign.inputs import STATE, WEIGHTS, open_input
from ckptz.foreign.torch_files import dump_state
from ckptz.format.envelope import plain_regions, write_plain
from ckptz.format.publish import publish_together
from ckptz.format.sources import TensorSource
from ckptz.format.suffixes import SUFFIX
from ckptz.run.residuals import residual_or_file
from ckptz.run.step_files import FROZEN_KEY
from ckptz.state.flatten import Chunks, tied_names, unflatten
from ckptz.state.skeleton import parse_tree

# Plain files from which the Trainer and PEFT load state.
_PLAIN_STATE: Final = re.compile(
    r"(?:(?:pytorch_|adapter_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?"
    r"|optimizer\.(?:pt|bin)|scheduler\.pt|scaler\.pt|rng_state(?:_\d+)?\.pth)"
)


@dataclass(frozen=True)
class TrainerFolder:
    """The open files of a checkpoint.

    Attributes:
        weights: weights of the model, or of its adapter.
        state: state of optimizer, scheduler and scaler.
        rngs: random states of each rank.
        carried: the other files, which are copied.
        stale: names of plain files with the same state, which are not copied.
    """

    weights: Input
    state: Input
    rngs: tuple[Input, ...]
    carried: tuple[Carried, ...]
    stale: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Input, ...]:
        """All inputs with tensors."""
        return (self.weights, self.state, *self.rngs)

    @property
    def is_adapter(self) -> bool:
        """True if the weights are those of PEFT adapters."""
        is_recorded = ADAPTERS_KEY in (self.weights.metadata or {})
        return is_recorded or any(name == CONFIG_FILE for name, _ in self.carried)

    @property
    def lacks_frozen(self) -> bool:
        """True if frozen weights are missing that a model needs; an adapter does not need them."""
        return FROZEN_KEY in (self.weights.metadata or {}) and not self.is_adapter

    @cached_property
    def weights_files(self) -> dict[str, dict[str, TensorSource]]:
        """The tensors of each plain weights file. Tied tensors are in it once; adapters have all names.

        Raises:
            CorruptionError: the record of adapters is damaged.
        """
        tensors = self.weights.tensors
        if not self.is_adapter:
            return {"model.safetensors": dict(tensors)}
        stored = {name: name for name in tensors} | tied_names(self.weights.tree, tensors)
        record = (self.weights.metadata or {}).get(ADAPTERS_KEY)
        if record is None:  # written by an older version, for one adapter called "default"
            keys_by_folder = {"": {key_of(name, "default"): name for name in tensors}}
        else:
            keys_by_folder = parse_adapters(record, stored)
        return {
            f"{folder}/{WEIGHTS_FILE}".lstrip("/"): {key: tensors[stored[name]] for key, name in keys.items()}
            for folder, keys in keys_by_folder.items()
        }

    @property
    def written(self) -> list[str]:
        """The names of the plain files to write."""
        return [*self.weights_files, "optimizer.pt", "scheduler.pt", "scaler.pt", *self.rng_files]

    @property
    def rng_files(self) -> list[str]:
        """The names of the plain files of random states."""
        n_ranks = len(self.rngs)
        return ["rng_state.pth"] if n_ranks == 1 else [f"rng_state_{i}.pth" for i in range(n_ranks)]


def read_trainer_folder(
    folder: Path, search_path: Sequence[Path], stack: contextlib.ExitStack
) -> TrainerFolder:
    """Read all files of a checkpoint, exact where there are residual files.

    Args:
        folder: of the checkpoint.
        search_path: folders in which bases are searched.
        stack: closes the files.

    Raises:
        FormatError: a file is damaged.
        MissingBaseError: a base is not found.
    """

    def open_file(path: Path) -> Input:
        return stack.enter_context(contextlib.closing(open_input(residual_or_file(path), search_path)))

    paths = (folder / WEIGHTS, folder / STATE, *sorted(folder.glob(f"rng-*{SUFFIX}")))
    weights, state, *rngs = map(open_file, paths)
    trainer = TrainerFolder(weights, state, tuple(rngs), tuple(find_carried(folder)[0]))
    stale = [
        name
        for name, _ in trainer.carried
        if name in trainer.written or _PLAIN_STATE.fullmatch(name) is not None
    ]
    carried = tuple((name, path) for name, path in trainer.carried if name not in stale)
    return replace(trainer, carried=carried, stale=tuple(stale))


def plain_state_in(folder: Path) -> list[str]:
    """List the plain files of a folder from which the Trainer or PEFT would load state."""
    files = [entry.name for entry in os.scandir(folder) if _PLAIN_STATE.fullmatch(entry.name)]
    return sorted([*files, *(f"{path.parent.name}/{path.name}" for path in folder.glob("*/adapter_model.*"))])


def write_plain_trainer(
    folder: Path, trainer: TrainerFolder, chunks: Chunks, like: Sequence[Path] = ()
) -> None:
    """Write the folder of the plain Trainer; all files appear when all are complete.

    Args:
        folder: an existing folder; other files in it stay.
        trainer: the open checkpoint.
        chunks: yields the patterns of all tensors of a file in order.
        like: files whose permissions the new files get.

    Raises:
        CorruptionError: a file was not written by the mixin.
        UnsupportedError: weights that a safetensors file cannot hold.
    """
    _check_tied(trainer.weights)
    with publish_together() as files:
        for file, weights in trainer.weights_files.items():
            with files.file(folder / file, like) as sink:
                write_plain(sink, plain_regions(weights), {"format": "pt"}, chunks(weights))
        for file, state in _torch_files(trainer, folder, chunks).items():
            with files.file(folder / file, like) as sink:
                dump_state(sink, state, folder / file)
        stage_carried(files, trainer.carried, folder)


def _check_tied(weights: Input) -> None:
    """Refuse weights that share memory in part; tied ones, which share all of it, are written once."""
    if weights.tree is None:
        return
    with error_context(weights.name):
        names = set(parse_tree(weights.tree).root)
        tied = tied_names(weights.tree, weights.tensors)
    if odd := sorted(names - weights.tensors.keys() - tied.keys()):
        raise UnsupportedError(
            f"{weights.name}: {odd[0]!r} shares a part of its memory with others, which a safetensors "
            "file cannot hold; restore model.ckptz by itself"
        )


def _torch_files(trainer: TrainerFolder, folder: Path, chunks: Chunks) -> dict[str, Any]:
    """Return the state for each torch file by file name."""

    def state_of(file: Input) -> Any:
        from ckptz.state.torch import from_plain

        with error_context(file.name):
            return from_plain(unflatten(file.tensors, file.tree, folder, chunks))

    try:
        state = state_of(trainer.state)
        files = {"optimizer.pt": _numbered(state), "scheduler.pt": state["scheduler"]}
        if state["scaler"] is not None:
            files["scaler.pt"] = state["scaler"]
        for file, rng in zip(trainer.rng_files, trainer.rngs, strict=True):
            files[file] = _random_numbers(state_of(rng)["rng"], is_alone=len(trainer.rngs) == 1)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{trainer.state.name}: was not written by CkptzTrainerMixin ({type(error).__name__}: {error})"
        raise CorruptionError(what) from None
    return files


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in the form of `state_dict`, with numbers for parameter names."""
    names = [name for group in state["groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        "state": {number[name]: values for name, values in state["optimizer"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]} for group in state["groups"]
        ],
    }


def _random_numbers(state: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """Return the random states in the Trainer's form.

    Args:
        state: random states of a rank.
        is_alone: there is only one rank; it then has the state of one CUDA device.
    """
    python, legacy = state["python"], state["numpy"]
    keys = legacy["keys"].numpy().astype(np.uint32)
    states = {
        "python": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        "numpy": (legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]),
        "cpu": state["torch"],
    }
    if "cuda" in state:
        states["cuda"] = state["cuda"][0] if is_alone else state["cuda"]
    return states
