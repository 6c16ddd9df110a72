"""Training of the demo: checkpoints with the complete training state, and resumption from them.

A checkpoint is a flat dict of tensors: `model.<parameter>`, `optimizer.<parameter>.exp_avg` and
`.exp_avg_sq`, `step`, `data.position` and `rng.torch`. Training resumes bit for bit from these tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, loss_of, token_losses
from ckptz.hooks import Calibration

State = Mapping[str, Tensor]

BATCH = 16
DATA_SEED, MODEL_SEED = 1, 0
PEAK_RATE, WARMUP_STEPS, DECAY_STEPS = 1e-3, 20, 400
MOMENTS = ("exp_avg", "exp_avg_sq")
CALIBRATION_SEED, N_CALIBRATION_BATCHES = 99, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Model and length of the run, in steps; the defaults train for about 90 seconds on two cores."""

    model: GPTConfig = field(default_factory=GPTConfig)
    n_checkpoints: int = 6
    steps_between: int = 40
    resume_index: int = 3  # counted from 0: the third delta of the chain
    resume_steps: int = 20
    validate_every: int = 10
    validation_batches: int = 3


QUICK = Settings(
    model=GPTConfig(n_layers=1, width=64, n_heads=2),
    n_checkpoints=3,
    steps_between=3,
    resume_index=1,
    resume_steps=3,
    validate_every=1,
    validation_batches=1,
)


class Trainer:
    """A model, its optimizer, and its position in the training data."""

    def __init__(self, config: GPTConfig, data: Tensor) -> None:
        torch.manual_seed(MODEL_SEED)
        self.model = TinyGPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.step = self.position = 0
        self._data = data

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train(self, n_steps: int) -> list[float]:
        """Train for `n_steps` and return the loss of each step."""
        context = self.model.config.context
        source = batches(self._data, batch=BATCH, context=context, seed=DATA_SEED, start=self.position)
        return [self._train_step(next(source)) for _ in range(n_steps)]

    def _train_step(self, batch: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step)
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self.optimizer.step()
        self.step += 1
        self.position += 1
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        """Return the training state by name; its tensors share the memory of the parameters and moments."""
        parameters = dict(self.model.named_parameters())
        tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            for moment in MOMENTS:
                tensors[f"optimizer.{name}.{moment}"] = self.optimizer.state[parameter][moment]
        tensors["step"] = torch.tensor(self.step)
        tensors["data.position"] = torch.tensor(self.position)
        tensors["rng.torch"] = torch.get_rng_state()
        return tensors

    def load(self, state: State) -> None:
        """Load a training state that `state` returned."""
        prefix = "model."
        weights = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        self.model.load_state_dict(weights)
        self.step, self.position = int(state["step"]), int(state["data.position"])
        for name, parameter in self.model.named_parameters():
            moments = {moment: state[f"optimizer.{name}.{moment}"].clone() for moment in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **moments}
        torch.set_rng_state(state["rng.torch"])

    def calibrate(self, path: Path) -> None:
        """Record the layer inputs of a few batches of training text (forward passes only) in a file."""
        context = self.model.config.context
        source = batches(self._data, batch=BATCH, context=context, seed=CALIBRATION_SEED)
        calibration = Calibration(self.model)
        with calibration:
            for _ in range(N_CALIBRATION_BATCHES):
                self.model(next(source)[:, :-1])
        calibration.save(path)


def learning_rate(step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine decay to a tenth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    done = min(1.0, (step - WARMUP_STEPS) / DECAY_STEPS)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class Resumption:
    """Losses of training that was resumed from a checkpoint.

    Attributes:
        n_threads: number of torch threads.
        tokens: validation loss of each byte right after the restore, float32 [n].
        training: training loss of each further step.
        validation: mean validation loss every `Settings.validate_every` steps.
        digest: SHA-256 of the training state at the end.
    """

    n_threads: int
    tokens: Tensor
    training: list[float]
    validation: list[float]
    digest: str

    @property
    def at_once(self) -> float:
        """Mean validation loss right after the restore."""
        return float(self.tokens.double().mean())

    @property
    def resumed(self) -> float:
        """Mean validation loss over the steps after the restore."""
        return statistics.mean(self.validation)

    def is_bit_equal(self, other: Resumption) -> bool:
        """Return whether all losses and the final states of two resumptions are bit-equal."""
        numbers = (self.at_once, self.training, self.validation, self.digest)
        return numbers == (other.at_once, other.training, other.validation, other.digest)


def resume(state: State, settings: Settings, data: tuple[Tensor, Tensor], n_threads: int) -> Resumption:
    """Load `state` into a new model and optimizer, and continue training.

    Args:
        state: a training state.
        settings: model and number of steps.
        data: training bytes and validation bytes, uint8 [n].
        n_threads: number of torch threads.
    """
    train, held_out = data
    training, validation = [], []
    with threads(n_threads):
        trainer = Trainer(settings.model, train)
        trainer.load(state)
        n_batches = settings.validation_batches
        tokens = token_losses(trainer.model, held_out, n_batches=n_batches)
        for _ in range(settings.resume_steps // settings.validate_every):
            training += trainer.train(settings.validate_every)
            losses = token_losses(trainer.model, held_out, n_batches=n_batches)
            validation.append(float(losses.double().mean()))
    return Resumption(n_threads, tokens, training, validation, digest(trainer.state()))


@contextlib.contextmanager
def threads(n_threads: int) -> Iterator[None]:
    """Set the number of torch threads within a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor, by which -0.0 differs from 0.0, and NaN equals the same NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(state: State) -> str:
    """Return the SHA-256 of all names and bytes of a state, in hexadecimal digits."""
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        total.update(name.encode() + raw_bytes(tensor))
    return total.hexdigest()


def is_same_state(a: State, b: State) -> bool:
    """Return whether two states have the same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        and raw_bytes(a[name]) == raw_bytes(b[name])
        for name in a
    )
