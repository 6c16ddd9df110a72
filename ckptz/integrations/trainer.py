"""Checkpoints of the Hugging Face Trainer as `.ckptz` files.

    class MyTrainer(CkptzTrainerMixin, Trainer): ...

    trainer = MyTrainer(model, args, ckptz=ChainOptions(full_every=8))
    trainer.train(resume_from_checkpoint=True)

A folder `checkpoint-N` has model.ckptz, state.ckptz (optimizer, scheduler, scaler), rng-RANK.ckptz, hard
links to their bases, residual files in the newest folder if files are lossy, and the JSON files of the
Trainer itself; no pickle. Each folder is complete, so `save_total_limit` may delete any of them. See
docs/frameworks.md.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckptz import lazy

try:
    import torch
    import transformers
except ModuleNotFoundError as error:
    raise lazy.needs_extra(error, "trainer") from None

from ckptz.codec.method import MOMENT_ROLES
from ckptz.codec.tensor import SideInformation, mean_sensitivity_of
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.foreign.adapters import STORED_PREFIX
from ckptz.format.publish import make_folder
from ckptz.format.sources import TensorSource
from ckptz.format.suffixes import SUFFIX
from ckptz.format.values import FLOAT_KINDS
from ckptz.guidance.momentum import Momentum, UpdateTracker
from ckptz.integrations.linked import (
    DEFAULTS,
    Chain,
    ChainOptions,
    job_of,
    read_newest,
    warn_of_differences,
    warn_of_no_gain,
)
from ckptz.integrations.versions import warn_untested
from ckptz.run.keep import KeepPolicy
from ckptz.run.step_files import FROZEN_KEY, METRIC_KEY, TRAINER_STATE, Kept, is_written
from ckptz.state.modules import name_without_wrappers, names_in_model, names_without_wrappers
from ckptz.state.roles import Rule
from ckptz.state.torch import to_plain
from ckptz.store.resolve import open_checkpoint
from ckptz.torch import load_state
from ckptz.training.compare import differences, fingerprint
from ckptz.training.files import lossy_tensors, moment_roles
from ckptz.training.frozen import FrozenId, frozen_weights, with_frozen
from ckptz.training.optimizers import check_optimizers_fit, comparable, load_optimizers, optimizer_state
from ckptz.training.state import (
    SCALARS,
    check_training,
    random_state,
    sampled_weights,
    set_random_state,
    trained_weights,
    with_scalars_together,
)
from ckptz.write.job import WriteJob

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the class that uses the mixin has Trainer as a base

TESTED: Final = ((5, 23), (5, 23))  # first and last version that the tests ran with
warn_untested("transformers", transformers.__version__, TESTED)

__all__ = ["ChainOptions", "CkptzTrainerMixin"]

MODEL_NAME: Final = f"model{SUFFIX}"
STATE_NAME: Final = f"state{SUFFIX}"
_OVERRIDDEN: Final = (
    *("save_model", "_save_checkpoint", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"),
    *("_load_from_checkpoint", "_load_best_model", "_load_optimizer_and_scheduler", "_load_scaler"),
    *("_load_rng_state", "_issue_warnings_after_load"),
)
# Parts of the state without weights or moments; they are lossless under every method.
_PARTS: Final = ("groups", "scheduler", "scaler", "rng", SCALARS)
_EXACT: Final = tuple(Rule(f"{name}.*", role="other") for name in _PARTS)
_EXACT_WEIGHTS: Final = (Rule(f"{STORED_PREFIX}*", role="other"),)


class CkptzTrainerMixin(Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """Makes a Trainer store checkpoints as `.ckptz` files; a class names it before `Trainer` as a base.

    Only checkpoints change: `save_model` called by users writes the files that the Trainer writes.

    Args:
        args: arguments of the Trainer.
        ckptz: settings of the files.
        trainable_only: leave out parameters without gradients; required for adapters of PEFT. Their content
            id is in the metadata, and the model must have the same values when training resumes.
        kwargs: arguments of the Trainer.

    Raises:
        UnsupportedError: FSDP, DeepSpeed or XLA, which have checkpoints of their own; an adapter without
            `trainable_only`; or a version of transformers without a method that the mixin overrides.
    """

    def __init__(
        self, *args: Any, ckptz: ChainOptions = DEFAULTS, trainable_only: bool = False, **kwargs: Any
    ) -> None:
        parent = super()
        if missing := [name for name in _OVERRIDDEN if not hasattr(parent, name)]:
            raise UnsupportedError(
                f"transformers {transformers.__version__}: its Trainer has no {missing[0]}, which "
                f"CkptzTrainerMixin overrides; put the mixin before Trainer, or install transformers=="
                f"{TESTED[1][0]}.{TESTED[1][1]}.*"
            )
        super().__init__(*args, **kwargs)
        _check_plain(self, trainable_only)
        self._ckptz = ckptz
        self._ckptz_tracker = (
            UpdateTracker() if ckptz.config.loses_state and not self.args.save_only_model else None
        )
        self._ckptz_frozen = FrozenId() if trainable_only else None
        kept = ckptz.kept(_kept(self.args), "save_total_limit")
        _check_best(self.args, ckptz.keep)
        warn_of_no_gain(ckptz, kept["weights"])
        self._ckptz_chains = {
            MODEL_NAME: Chain(ckptz, kept["weights"]),
            STATE_NAME: Chain(replace(ckptz, base=None), kept["state"]),
        }

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; True resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_complete(Path(self.args.output_dir))
        elif isinstance(resume_from_checkpoint, str):
            folder = Path(resume_from_checkpoint)
            if (folder / MODEL_NAME).is_file() and not (folder / TRAINER_STATE).exists():
                raise ConfigError(
                    f"{folder}: has no {TRAINER_STATE}, as of a save that was cut off; resume from another "
                    "checkpoint, or load its weights with from_pretrained of ckptz.integrations.transformers"
                )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a model as the Trainer does; in a checkpoint, write its weights to model.ckptz."""
        if not _internal_call or output_dir is None:
            super().save_model(output_dir, _internal_call)
            return
        if not self.args.should_save:
            return
        folder, model = Path(output_dir), _unwrapped(self)
        make_folder(folder)
        _save_settings(self, model, folder)
        job = _weights_job(self, model)
        chain, path = self._ckptz_chains[MODEL_NAME], folder / MODEL_NAME
        if not self._ckptz.config.is_lossy:
            chain.write(path, job)
            return
        training = _training_job(self)
        roles = (training.roles or {}).values()
        trained_names = {one.parameter.removeprefix("model.") for one in roles if one.role in MOMENT_ROLES}
        job = replace(job, guides=_guides(job.tensors, training.tensors), trained=trained_names)
        if self._ckptz_tracker is None:
            chain.write(path, job)
            return
        # The momentum that a lossy state loses is known after it is written.
        trained = trained_weights(_optimizers_of(self), job.tensors, training.tensors)
        momentum = Momentum(self._ckptz_tracker, self.state.global_step, trained)
        training = replace(training, guides=momentum.guides())
        self._ckptz_chains[STATE_NAME].write(folder / STATE_NAME, training)
        with contextlib.closing(open_checkpoint(folder / STATE_NAME)) as stored:
            momentum = replace(momentum, restored=lossy_tensors(stored))
            chain.write(path, replace(job, momentum=momentum))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            _put_times_right(Path(self.args.output_dir))
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            # A step that is saved again is complete when the Trainer has written its own state.
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()  # no rank writes to a step that still counts as complete
        super()._save_checkpoint(model, trial)
        for chain in self._ckptz_chains.values():  # the step is complete
            chain.settle()
        if self.args.should_save:
            best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
            always_kept = () if best is None else (Path(best).name,)
            self._ckptz.prune(Path(self._get_output_dir(trial=trial)), always_kept)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save and self._ckptz_tracker is None:  # else it was written before the weights
            self._ckptz_chains[STATE_NAME].write(Path(output_dir) / STATE_NAME, _training_job(self))

    def _save_scaler(self, output_dir: str) -> None:
        """Write nothing, because the scaler is in state.ckptz."""

    def _save_rng_state(self, output_dir: str) -> None:
        job = job_of({"rng": random_state()}, self.state.global_step)
        Chain(ChainOptions(jobs=1)).write(_rng_path(self, output_dir), job)
        self.accelerator.wait_for_everyone()  # what makes the step complete, the Trainer writes next

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / MODEL_NAME
        if not path.is_file():  # a checkpoint of the plain Trainer
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        _load_weights(self, path, self.model if model is None else model)
        self._ckptz_chains[MODEL_NAME].resume_from(path)

    def _load_best_model(self) -> None:
        path = Path(self.state.best_model_checkpoint) / MODEL_NAME
        if path.is_file():
            _load_weights(self, path, self.model)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        path = None if checkpoint is None else Path(checkpoint) / STATE_NAME
        if path is None or not path.is_file():
            if path is not None and _is_weights_alone(path.parent):
                if not self.args.save_only_model:
                    raise ConfigError(
                        f"{path.parent}: only the weights of this step were kept; resume from a newer "
                        "checkpoint, or load them with from_pretrained of ckptz.integrations.transformers"
                    )
                what = "optimizer and scheduler: they begin anew, because save_only_model=True saves neither"
                warn_of_differences(path.parent, [what])
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        _check_resumed(path.with_name(TRAINER_STATE), self.state.global_step)
        state = read_newest(path, self._ckptz.jobs)
        check_training(state, str(path))
        model, optimizers = _unwrapped(self), [_bare(self.optimizer)]
        check_optimizers_fit(model, optimizers, state, str(path))
        others = {name: _plain(state[name]) for name in ("scheduler", "scaler")}
        saved = fingerprint({**comparable(state, state), **others})
        load_optimizers(model, optimizers, state)
        self.lr_scheduler.load_state_dict(state["scheduler"])
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(state["scaler"])
        live = comparable(optimizer_state(model, optimizers), state)
        live["scheduler"] = _plain(self.lr_scheduler.state_dict())
        live["scaler"] = None if scaler is None else _plain(scaler.state_dict())
        warn_of_differences(path, list(differences(saved, fingerprint(live))))
        self._ckptz_chains[STATE_NAME].resume_from(path)
        if self._ckptz_tracker is not None:  # the weights were loaded before
            trained = trained_weights(_optimizers_of(self), sampled_weights(model.state_dict()))
            self._ckptz_tracker.snapshot(trained, self.state.global_step, is_restored=True)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / STATE_NAME).is_file():
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        path = None if checkpoint is None else _rng_path(self, checkpoint)
        if path is None or not path.is_file():
            super()._load_rng_state(checkpoint)
            if path is not None and path.with_name(STATE_NAME).is_file():
                warn_of_differences(path.parent, [f"random states: there is no {path.name} for this process"])
            return
        saved = load_state(path, jobs=1).get("rng")
        set_random_state(saved)
        live = random_state()
        lines = differences(fingerprint(saved), fingerprint({name: live.get(name) for name in saved}))
        warn_of_differences(path, list(lines))


def _check_resumed(path: Path, step: int) -> None:
    """Raise if the Trainer did not read its own state of the step that is resumed.

    If a disk fails, the Trainer takes its file as missing, starts at step 0 and overwrites checkpoints.
    """
    if path.exists() and json.loads(path.read_bytes())["global_step"] != step:
        raise OSError(errno.EIO, "could not be read when training was to go on from it; try again", str(path))


def _newest_complete(folder: Path) -> str | bool | None:
    """Return the newest complete checkpoint: one with the Trainer's own state, which is written last.

    None, which starts from scratch, if none is complete; True, which the Trainer refuses, if there is none.
    """
    folders = folder.glob("checkpoint-*") if folder.is_dir() else ()
    steps = {int(number): path for path in folders if (number := path.name.rpartition("-")[2]).isdecimal()}
    for _, path in sorted(steps.items(), reverse=True):
        if is_written(path / TRAINER_STATE):
            return str(path)
        what = f"{path}: is passed over, because it was not written to its end"
        warnings.warn(what, RuntimeWarning, stacklevel=3)
    return None if steps else True


def _put_times_right(folder: Path) -> None:
    """Set the modification time of each folder to its completion, as the Trainer deletes the oldest folder.

    A failed deletion changes the time of its folder, and a newer folder would be deleted in its place.
    Incomplete folders are deleted first.
    """
    for path in folder.glob("checkpoint-*"):
        if path.name.rpartition("-")[2].isdecimal():
            with contextlib.suppress(OSError):  # the times only matter after such a failure
                state = path / TRAINER_STATE
                complete = state.stat().st_mtime_ns if state.exists() else 0
                os.utime(path, ns=(complete, complete))


def _is_weights_alone(folder: Path) -> bool:
    """Return whether a checkpoint of this module has only weights, because its state was pruned."""
    return (folder / MODEL_NAME).is_file() and not (folder / "optimizer.pt").is_file()


def _metric(trainer: Any) -> str | None:
    """Return the metric of this step that the Trainer selects the best model by, or None."""
    name = trainer.args.metric_for_best_model
    if name is None:
        return None
    name = name if name.startswith("eval_") else f"eval_{name}"
    step = trainer.state.global_step
    logs = (log[name] for log in reversed(trainer.state.log_history) if log["step"] == step and name in log)
    return next((repr(float(metric)) for metric in logs), None)


def _check_best(args: Any, keep: KeepPolicy | None) -> None:
    """Refuse rules for the best steps without a metric, or with the opposite direction.

    Raises:
        ConfigError: the rules and the Trainer's arguments do not agree.
    """
    for rules in () if keep is None else filter(None, (keep, keep.weights)):
        if rules.best and args.metric_for_best_model is None:
            raise ConfigError(f"keep: best={rules.best} needs metric_for_best_model in TrainingArguments")
        if rules.best and rules.lower_is_better == bool(args.greater_is_better):
            raise ConfigError(
                f"keep: lower_is_better={rules.lower_is_better}, but the Trainer has greater_is_better="
                f"{args.greater_is_better}; say the same in both"
            )


def _kept(args: Any) -> Kept:
    """Convert the Trainer's `save_total_limit` to keep rules; the best model is kept if it will be loaded."""
    limit, is_best_kept = args.save_total_limit, args.load_best_model_at_end
    if limit is None or limit < 1:
        return Kept()
    return Kept(last=max(1, limit - is_best_kept), best=int(is_best_kept))


def _check_plain(trainer: Any, trainable_only: bool) -> None:
    """Refuse models and backends that save their state themselves."""
    ways = {
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "XLA": trainer.args.device.type == "xla",
    }
    if hasattr(trainer.model, "peft_config") and not trainable_only:
        raise UnsupportedError(
            "CkptzTrainerMixin: the model has an adapter, and its other weights are frozen; pass "
            "trainable_only=True to keep what is trained"
        )
    for name, is_used in ways.items():
        if is_used:
            raise UnsupportedError(
                f"CkptzTrainerMixin: {name} has checkpoints of its own; leave the mixin out, and save "
                "sharded state with ckptz.integrations.dcp"
            )


def _unwrapped(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate wraps."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _save_settings(trainer: Any, model: Any, folder: Path) -> None:
    """Write the files that the Trainer writes beside the weights."""
    parts = [trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)]
    if hasattr(model, "peft_config"):
        lazy.module("ckptz.integrations.peft_adapters").save_configs(model, folder)
    else:
        config = copy.deepcopy(getattr(model, "config", None))
        # As `save_pretrained` of a model does.
        if isinstance(model, transformers.PreTrainedModel) and isinstance(
            config, transformers.PreTrainedConfig
        ):
            config.architectures = [type(model).__name__]
            config.dtype = str(model.dtype).removeprefix("torch.")
        parts += [config, getattr(model, "generation_config", None)]
    for part in parts:
        if part is not None and hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


def _weights_job(trainer: Any, model: Any) -> WriteJob:
    """Make the job of model.ckptz, without frozen weights if they are left out, with PEFT's own tensors."""
    frozen = {} if trainer._ckptz_frozen is None else frozen_weights(model)
    state, metadata = model.state_dict(), dict[str, str]()
    stored = {name: v for name, v in state.items() if name_without_wrappers(model, name) not in frozen}
    if hasattr(model, "peft_config"):
        adapters = lazy.module("ckptz.integrations.peft_adapters")
        stored, metadata = adapters.with_adapters(model, state, stored)
    if frozen and (frozen_id := trainer._ckptz_frozen.of(frozen)) is not None:
        metadata[FROZEN_KEY] = frozen_id
    if (metric := _metric(trainer)) is not None:
        metadata[METRIC_KEY] = metric
    return replace(job_of(stored, trainer.state.global_step, _EXACT_WEIGHTS), metadata=metadata or None)


def _rng_path(trainer: Any, folder: str) -> Path:
    return Path(folder) / f"rng-{trainer.args.process_index:05d}{SUFFIX}"


def _optimizers_of(trainer: Any) -> dict[str, Any]:
    return optimizer_state(_unwrapped(trainer), [_bare(trainer.optimizer)])


def _training_job(trainer: Any) -> WriteJob:
    """Make the job of state.ckptz: the optimizer by parameter name, the scheduler and the scaler."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    state = {
        **_optimizers_of(trainer),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    if trainer._ckptz.config.loses_state:
        state = with_scalars_together(state)
    job = job_of(state, trainer.state.global_step, _EXACT)
    return replace(job, roles=dict(moment_roles(state["optimizer"], job.tensors)))


def _plain(state: Any) -> Any:
    return to_plain(state)


def _guides(
    weights: Mapping[str, TensorSource], state: Mapping[str, TensorSource]
) -> dict[str, SideInformation]:
    """Return the second moments of weights as side information, if they have the weight's shape."""
    moments = {}
    for name, weight in weights.items():
        moment = state.get(f"optimizer.{name}.exp_avg_sq")
        if moment is not None and moment.shape == weight.shape and moment.dtype.name in FLOAT_KINDS:
            moments[name] = moment
    pairs = ((weights[name], moment) for name, moment in moments.items())
    mean = mean_sensitivity_of((w, moment) for w, moment in pairs if w.dtype.name in FLOAT_KINDS)
    return {n: SideInformation(second_moment=m, mean_sensitivity=mean) for n, m in moments.items()}


def _load_weights(trainer: Any, path: Path, model: Any) -> None:
    saved = read_newest(path, trainer._ckptz.jobs)
    state = {name: value for name, value in saved.items() if not name.startswith(STORED_PREFIX)}
    target = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    live = target.state_dict()
    names, wrapped = names_in_model(target, live, state), names_without_wrappers(target, live)
    state = {name_without_wrappers(target, names[name]): value for name, value in state.items()}
    with contextlib.closing(open_checkpoint(path)) as opened:
        state = with_frozen(target, state, opened.metadata, str(path))
    state = {wrapped.get(name, name): value for name, value in state.items()}
    saved = fingerprint(state)
    trainer._issue_warnings_after_load(target.load_state_dict(state, strict=False))
    live = {name: value for name, value in target.state_dict().items() if name in saved}
    warn_of_differences(path, list(differences(saved, fingerprint(live))))
