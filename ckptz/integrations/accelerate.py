"""Models in accelerate's `save_state` as `.ckptz` files.

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    register(accelerator)
    accelerator.save_state("checkpoints/100")     # model.ckptz in place of model.safetensors
    accelerator.load_state("checkpoints/100")

The hooks store models only; accelerate itself writes optimizers, schedulers and random states. After
`load_state`, models, optimizers, schedulers, the scaler, registered objects and random states are compared
with the files.
See docs/frameworks.md.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptz import lazy

try:
    import accelerate
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, load
    from accelerate.utils.constants import OPTIMIZER_NAME, RNG_STATE_NAME, SCALER_NAME, SCHEDULER_NAME
except ModuleNotFoundError as error:
    raise lazy.needs_extra(error, "accelerate") from None

from ckptz.errors import ConfigError, UnsupportedError
from ckptz.format.publish import publish
from ckptz.format.suffixes import SUFFIX
from ckptz.integrations.linked import (
    DEFAULTS,
    Chain,
    ChainOptions,
    checked_options,
    job_of,
    read_newest,
    warn_of_differences,
)
from ckptz.integrations.versions import warn_untested
from ckptz.run.names import step_of_folder
from ckptz.run.step_files import COMPLETE, Kept
from ckptz.state.modules import names_in_model
from ckptz.torch import nothing_matches
from ckptz.training.compare import differences, fingerprint

TESTED: Final = ((1, 15), (1, 15))  # first and last version that the tests ran with
warn_untested("accelerate", accelerate.__version__, TESTED)

__all__ = ["ChainOptions", "Registration", "register"]

_OWN_WAYS: Final = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


@dataclass(slots=True)
class Registration:
    """The hooks of one accelerator."""

    options: ChainOptions
    _accelerator: Any
    _chains: dict[int, Chain] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _strict: bool = True  # argument of the running `load_state`
    _folder: Path | None = None  # folder of the running `save_state` or `load_state`

    def remove(self) -> None:
        """Remove the hooks; accelerate saves and loads models itself again."""
        while self._handles:
            self._handles.pop().remove()
        for name in ("load_state", "save_state"):
            self._accelerator.__dict__.pop(name, None)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Call accelerate's `save_state`, and mark the folder as complete when all processes are done."""
        self._folder = None
        result = type(self._accelerator).save_state(self._accelerator, *args, **kwargs)
        self._accelerator.wait_for_everyone()
        if self._folder is not None and self._accelerator.is_main_process:
            with publish(self._folder / COMPLETE) as sink:
                sink.write(b"{}\n")
            self.options.prune(self._folder.parent)
        return result

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Call accelerate's `load_state`, which hides `strict` from hooks, and compare the restored state."""
        strict = kwargs.get("strict", True)
        if not isinstance(strict, bool):
            raise ConfigError(f"strict must be True or False, got {strict!r}")
        self._strict, self._folder = strict, None
        try:
            type(self._accelerator).load_state(self._accelerator, *args, **kwargs)
        finally:
            self._strict = True
        if self._folder is not None:
            warn_of_differences(self._folder, list(self._differences(self._folder)))

    def _differences(self, folder: Path) -> Iterator[str]:
        """Yield a line for each entry of accelerate's own files that differs from the restored value."""
        accelerator = self._accelerator
        parts = {
            **{_numbered(OPTIMIZER_NAME, i, ".bin"): part for i, part in enumerate(accelerator._optimizers)},
            **{_numbered(SCHEDULER_NAME, i, ".bin"): part for i, part in enumerate(accelerator._schedulers)},
            **({} if accelerator.scaler is None else {SCALER_NAME: accelerator.scaler}),
            **{f"custom_checkpoint_{i}.pkl": part for i, part in enumerate(accelerator._custom_objects)},
        }
        for name, part in parts.items():
            try:
                saved = fingerprint(load(folder / name, map_location="cpu"))
            except pickle.UnpicklingError:
                yield f"{name}: not compared, because it holds more than tensors and plain values"
            else:
                yield from differences(saved, fingerprint(part.state_dict()), name)
        yield from self._random_differences(folder / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl")

    def _random_differences(self, path: Path) -> Iterator[str]:
        """Yield a line for each generator that differs; accelerate passes over a file that it cannot load."""
        try:
            saved = load(path)
        except Exception as error:
            yield f"{path.name}: not restored ({type(error).__name__})"
            return
        live = {
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            live["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
        saved = {name: saved.get(name) for name in live}
        for states in (saved, live):  # one note for the 625 words of Python's generator, not one for each
            if isinstance(states["random_state"], tuple):
                version, words, gauss = states["random_state"]
                states["random_state"] = version, np.array(words), gauss
        yield from differences(fingerprint(saved), fingerprint(live), path.name)

    def chain(self, i: int) -> Chain:
        """Return the files of the i-th model."""
        if i not in self._chains:
            kept = self.options.kept(_limit(self._accelerator), "total_limit")["weights"]
            self._chains[i] = Chain(self.options, None if kept == Kept() else kept)
        return self._chains[i]

    def save(self, models: Sequence[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        """Write the models, and remove them from the list that accelerate writes."""
        del models
        self._folder = Path(output_dir)
        if self.options.keep is not None and step_of_folder(self._folder) is None:
            raise ConfigError(f"{output_dir}: keep needs a folder named after its step, as step-100")
        # Every process writes its random states, and none may write to a folder that counts as complete.
        (self._folder / COMPLETE).unlink(missing_ok=True)
        if self._accelerator.is_main_process:
            for i, state in enumerate(weights):
                self.chain(i).settle()  # for the previous save, because no hook follows a complete one
                self.chain(i).write(_path(output_dir, i), job_of(dict(state)))
        weights.clear()

    def load(self, models: list[Any], input_dir: str) -> None:
        """Read the models and remove them from accelerate's list, unless accelerate itself wrote them."""
        if not _path(input_dir, 0).is_file():
            return
        self._folder = Path(input_dir)
        if self._accelerator._optimizers and not (Path(input_dir) / f"{OPTIMIZER_NAME}.bin").is_file():
            raise ConfigError(
                f"{input_dir}: only the weights of this step were kept; load a newer checkpoint, or "
                "the weights with ckptz.torch.load_model"
            )
        for i, model in enumerate(models):
            path = _path(input_dir, i)
            target = self._accelerator.unwrap_model(model, keep_torch_compile=False)
            self._load_model(target, read_newest(path, self.options.jobs), path)
            self.chain(i).resume_from(path)
        models.clear()

    def _load_model(self, model: Any, state: dict[str, Any], path: Path) -> None:
        """Load a state by names without wrappers; warn of the names that `strict=False` ignores."""
        live = model.state_dict()
        names = names_in_model(model, live, state)
        state = {names[name]: value for name, value in state.items()}
        if not self._strict and live and live.keys().isdisjoint(state):
            raise ConfigError(nothing_matches(str(path), state, live))
        saved = fingerprint(state)
        missing, unexpected = model.load_state_dict(state, strict=self._strict)
        live = {name: value for name, value in model.state_dict().items() if name in saved}
        lines = differences({name: saved[name] for name in live}, fingerprint(live))
        warn_of_differences(path, list(lines))
        if missing or unexpected:
            note = f"{path}: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            warnings.warn(f"{note}; all other names were loaded", RuntimeWarning, stacklevel=5)


def _limit(accelerator: Any) -> Kept:
    """Convert accelerate's `total_limit` to keep rules."""
    settings = accelerator.project_configuration
    limit = settings.total_limit if settings.automatic_checkpoint_naming else None
    return Kept() if limit is None else Kept(last=max(1, limit))


def _path(folder: str, i: int) -> Path:
    return Path(folder) / _numbered("model", i, SUFFIX)


def _numbered(name: str, i: int, suffix: str) -> str:
    """Return the name of the i-th file of a kind, as accelerate counts them."""
    return f"{name}_{i}{suffix}" if i else f"{name}{suffix}"


def register(accelerator: Accelerator, options: ChainOptions = DEFAULTS) -> Registration:
    """Make `save_state` and `load_state` store models as `.ckptz` files.

    `load_state(folder, strict=False)` loads matching tensors, and warns of missing and unexpected names.

    Args:
        accelerator: the accelerator.
        options: settings of the files.

    Returns:
        The registration; its method `remove` undoes it.

    Raises:
        ConfigError: `options.keep` and accelerate's `total_limit` would both delete checkpoints.
        UnsupportedError: FSDP, DeepSpeed or Megatron, which have checkpoints of their own.
    """
    if accelerator.distributed_type in _OWN_WAYS:
        raise UnsupportedError(
            f"accelerate with {accelerator.distributed_type.value} has checkpoints of its own; save sharded "
            "state with ckptz.integrations.dcp"
        )
    checked_options(options).kept(_limit(accelerator), "total_limit")
    made = Registration(options, accelerator)
    accelerator.load_state = made.load_state
    accelerator.save_state = made.save_state
    made._handles += [
        accelerator.register_save_state_pre_hook(made.save),
        accelerator.register_load_state_pre_hook(made.load),
    ]
    return made
