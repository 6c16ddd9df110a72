"""Qualities of a state: plain functions, agreement with the exact model, and the loss of resumed training.

A plain quality is a function of a state. A quality that compares with the exact state has a method `against`,
which gets the exact state and returns the function to call with trials.

`Agreement` compares the logits of a model with those of the exact model on the same inputs:

    kl      mean over positions of sum(p * (log p - log q)), in nats; p of the exact tensors
    top1    share of positions where both rank the same entry first

Both detect changed answers that cancel in a mean loss.

`ResumeProbe` is the loss after training on from the restored state. The loss right after a restore is too
optimistic, because weights that lag behind act like an average over steps. Two further runs, from the
exact state and from the exact state with a little noise on its weights, measure the noise. A third, twice
as long, measures how much one step of training gains.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ConfigError, check_int, coerce_numeric_fields
from ckptz.kernels.blas import product
from ckptz.kernels.floats import Reals

State: TypeAlias = dict[str, Any]  # name -> CPU torch tensor, which the callee may change
Quality: TypeAlias = Callable[[State], Any]
Logits: TypeAlias = NDArray[np.float32]
KL, TOP1, RESUME = "kl", "top1", "resume"
ANSWER: Final = "answer"  # default name of one example; files record it
CHUNK_ENTRIES: Final = 1 << 18  # logits per softmax in float64: a few arrays of 2 MiB
NOISE_SHARE: Final = 0.01  # of a weight's standard deviation: costs less than any useful budget
EVALUATIONS: Final = ("quality", "logits", "resume")  # kinds of `--eval`; see the module
FUNCTION_FORM: Final = "give package.module:function or file.py:function"


@dataclass(frozen=True, slots=True)
class MetricRule:
    """The rules of a metric that ckptz knows by name."""

    lower_is_better: bool
    evaluation: str = "quality"  # the one of `EVALUATIONS` that measures it
    is_one_number: bool = False  # never has a value for each example


METRICS: Final[Mapping[str, MetricRule]] = {
    "loss": MetricRule(lower_is_better=True),
    "accuracy": MetricRule(lower_is_better=False),
    KL: MetricRule(lower_is_better=True, evaluation="logits", is_one_number=True),
    TOP1: MetricRule(lower_is_better=False, evaluation="logits", is_one_number=True),
    RESUME: MetricRule(lower_is_better=True, evaluation="resume"),
}


class ExactState(Protocol):
    """The exact state, which can be decoded several times."""

    def state(self) -> State:
        """Decode a fresh copy of the state."""
        ...

    def noisy_state(self, share: float, seed: int) -> State:
        """Decode a copy with normal noise on weight matrices: `share` of the standard deviation of each."""
        ...


@dataclass(frozen=True, slots=True)
class Baseline:
    """A quality and its result for the exact state."""

    quality: Quality  # to call with trials
    exact: Any  # result for the exact state
    noise: float = 0.0  # noise floor: smaller differences mean nothing
    gain_per_step: float | None = None  # by how much one training step lowers the result, if known


class ComparingQuality(Protocol):
    """A quality that compares trials with the exact state."""

    def against(self, exact: ExactState) -> Baseline:
        """Return the function to call with trials, and its result for the exact state."""
        ...


def prepare(quality: Quality | ComparingQuality, exact: ExactState) -> Baseline:
    """Measure the exact state with a quality, which is a function or has `against`."""
    if callable(quality) and not hasattr(quality, "against"):
        return Baseline(quality, quality(exact.state()))
    comparing: ComparingQuality = quality
    return comparing.against(exact)


def to_float(value: Any, name: str) -> float:
    """Convert the return value of a user's function, called `name`, to a float.

    Raises:
        ConfigError: the value is not a number.
    """
    # Arrays and tensors of several elements raise.
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if hasattr(value, "__float__") and not isinstance(value, str | bytes | bool):
            return float(value)
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    raise ConfigError(f"{name} returned {shown}, which is not a number")


def parse_values(returned: Any, name: str) -> Reals:
    """Convert the return value of a user's function to float64 values [n]; a single number to [1].

    Args:
        returned: a 1-D tensor or array, or a number.
        name: of the function, for messages.

    Raises:
        ConfigError: the value is neither.
    """
    if hasattr(returned, "detach"):
        try:
            tensor = returned.detach().cpu()
            returned = tensor.numpy() if tensor.is_complex() else tensor.double().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, nested, or without memory
            raise ConfigError(f"{name} returned a tensor whose values cannot be read: {error}") from None
    if isinstance(returned, list | tuple):
        raise ConfigError(
            f"{name} returned a {type(returned).__name__} of {len(returned)}; return the values of all "
            "examples in one tensor or array, as torch.tensor(losses)"
        )
    if isinstance(returned, np.ndarray) and returned.dtype.kind in "bfiu":
        if returned.size != 1 and (returned.ndim != 1 or not returned.size):
            raise ConfigError(
                f"{name} returned values of shape {list(returned.shape)}; return one number, or the "
                "values of all examples in one dimension [n_examples]"
            )
        return returned.reshape(-1).astype(np.float64)
    return np.array([to_float(returned, name)])


def name_of(function: Any) -> str:
    """Return the name of a quality: its `metric`, or else its `__name__`."""
    return str(getattr(function, "metric", getattr(function, "__name__", "quality")))


def unit_of(function: Any) -> str:
    """Return what one value of a quality is, such as "token": its `unit`, or else "answer"."""
    return str(getattr(function, "unit", None) or ANSWER)


def function_digest(function: Any) -> str | None:
    """Return the digest of a quality's data: its `data_digest`, a string or a callable, or None."""
    digest = getattr(function, "data_digest", None)
    digest = digest() if callable(digest) else digest
    return None if digest is None else str(digest)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measures "kl" and "top1" for budgets; budgets that share an instance call `logits` once per trial.

    The exact logits are kept in float32 while a search runs: 4 bytes times positions times entries.

    Attributes:
        logits: a function of a state that builds its own model and returns logits [..., entries] as a torch
            tensor or an array, of the same inputs in the same order each time.

    Example:
        >>> from ckptz import Agreement, Budget
        >>> agreement = Agreement(lambda state: state["weight"])
        >>> budgets = (
        ...     Budget(agreement, 5e-3, relative=False, metric="kl"),
        ...     Budget(agreement, 0.01, relative=False, metric="top1"),
        ... )
    """

    logits: Callable[[State], Any]

    def __post_init__(self) -> None:
        if not callable(self.logits):
            raise ConfigError(f"Agreement needs a function that returns logits, got {self.logits!r}")

    @property
    def metric(self) -> str:
        """The name of the quality in messages; its values are called "kl" and "top1"."""
        return name_of(self.logits)

    @property
    def data_digest(self) -> str | None:
        """The digest of the data that `logits` has as an attribute, or None."""
        return function_digest(self.logits)

    def against(self, exact: ExactState) -> Baseline:
        """Compute the logits of the exact state, which trials are compared with."""
        rows = self._rows(exact.state()).copy()  # the function may reuse its memory
        if not rows.size:
            raise ConfigError(f"{self.metric} returned no logits: shape {list(rows.shape)}")
        if not np.isfinite(rows.max(axis=1)).all():
            raise ConfigError(f"{self.metric}: logits of the exact tensors hold NaN or infinity")
        return Baseline(partial(self._compare, rows), {KL: 0.0, TOP1: 1.0})

    def _compare(self, exact: Logits, state: State) -> dict[str, float]:
        """Return "kl" and "top1" of a trial; NaN if a logit is not finite."""
        decoded = self._rows(state)
        if decoded.shape != exact.shape:
            n_decoded, n_exact = (" x ".join(map(str, logits.shape)) for logits in (decoded, exact))
            raise ConfigError(
                f"{self.metric} returned {n_decoded} logits for a trial and {n_exact} for the exact tensors; "
                "evaluate the same inputs each time"
            )
        return agreement_of(exact, decoded)

    def _rows(self, state: State) -> Logits:
        """Return the logits of a state as float32 [positions, entries]."""
        logits = self.logits(state)
        if hasattr(logits, "detach"):
            logits = logits.detach().cpu().float()  # numpy has no bfloat16
        try:
            rows: Logits = np.asarray(logits, np.float32)
        except (TypeError, ValueError):
            rows = np.zeros((), np.float32)
        if not rows.ndim:
            raise ConfigError(f"{self.metric} returned no logits [..., entries] but {type(logits).__name__}")
        return rows.reshape(-1, rows.shape[-1]) if rows.size else rows.reshape(0, 1)


def agreement_of(exact: Logits, decoded: Logits) -> dict[str, float]:
    """Compare the logits of two models on the same inputs.

    Args:
        exact, decoded: float32 [positions, entries].

    Returns:
        "kl" in nats, and "top1", the share of positions with the same first rank; both NaN if the largest
        logit of a row of `decoded` is not finite.
    """
    if not np.isfinite(decoded.max(axis=1)).all():
        return {KL: float("nan"), TOP1: float("nan")}
    divergence, n_equal = 0.0, 0
    n_rows = max(CHUNK_ENTRIES // exact.shape[1], 1)
    for begin in range(0, len(exact), n_rows):
        p, q = exact[begin : begin + n_rows], decoded[begin : begin + n_rows]
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        share = np.exp(log_p)
        difference = np.subtract(log_p, log_q, out=np.zeros_like(log_p), where=share > 0)  # 0 where p is 0
        divergence += float(product(share.ravel(), difference.ravel()))
        n_equal += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
    return {KL: max(divergence, 0.0) / len(exact), TOP1: n_equal / len(exact)}


def _log_softmax(logits: Logits) -> Reals:
    log_p = logits.astype(np.float64)
    log_p -= log_p.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    return log_p


@dataclass(frozen=True, slots=True)
class ResumeProbe:
    """Measures the loss after training on from a state.

    Before the first trial it runs four times: twice from the exact state, once from the exact state with
    noise, and once for twice the number of steps. The larger difference between the first run and the next
    two is the noise floor; a budget below it cannot be measured and counts as not met. The last run measures
    the gain of one step. A loss divided by this gain is a number of training steps; it is unknown if the
    gain is within the noise floor.

    Attributes:
        resume: a function of a state and a number of steps that trains on and returns a validation loss,
            preferably a mean over its last steps. It builds its own model and optimizer, and restores its
            own position in the data and random numbers. The state has all tensors of the checkpoint, with
            optimizer state, by their names in the file.
        n_steps: number of steps to train.
        noise_floor: the noise floor, if it is known; saves two runs.

    Example:
        >>> from ckptz import Budget, ResumeProbe
        >>> probe = ResumeProbe(lambda state, n_steps: 2.0 + float(state["weight"].var()), n_steps=10)
        >>> Budget(probe, 0.002).name
        'resume'
    """

    resume: Callable[[State, int], Any]
    n_steps: int = 20
    noise_floor: float | None = None
    metric: ClassVar[str] = RESUME
    trains: ClassVar[bool] = True  # needs optimizer state

    def __post_init__(self) -> None:
        if not callable(self.resume):
            raise ConfigError(f"ResumeProbe needs a function, got {self.resume!r}")
        coerce_numeric_fields(self)
        check_int("n_steps", self.n_steps, 1)
        if self.noise_floor is not None and not self.noise_floor >= 0:
            raise ConfigError(f"a noise floor must be a number from 0, got {self.noise_floor}")

    @property
    def data_digest(self) -> str | None:
        """The digest of the data that `resume` has as an attribute, or None."""
        return function_digest(self.resume)

    def against(self, exact: ExactState) -> Baseline:
        """Measure the exact state, the noise floor and the gain of a training step."""
        quality = partial(self._loss, self.n_steps)
        loss, noise = quality(exact.state()), self.noise_floor
        if not math.isfinite(loss):
            return Baseline(quality, loss, noise or 0.0)
        if noise is None:
            losses = (quality(exact.state()), quality(exact.noisy_state(NOISE_SHARE, seed=0)))
            differences = [abs(repeated - loss) for repeated in losses]
            noise = max(d if math.isfinite(d) else math.inf for d in differences)
        gain = loss - self._loss(2 * self.n_steps, exact.state())
        return Baseline(quality, loss, noise, gain / self.n_steps if gain > noise else None)

    def _loss(self, n_steps: int, state: State) -> float:
        return to_float(self.resume(state, n_steps), name_of(self.resume))


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function given as "package.module:function" or "file.py:function", which is loaded when called."""

    text: str  # as the user wrote it

    def __post_init__(self) -> None:
        if not all(self.text.rpartition(":")):
            raise ConfigError(f"{self.text!r} names no function; {FUNCTION_FORM}")

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function.

        Raises:
            ConfigError: the module cannot be imported, or has no such function.
        """
        return _load(self.text)

    def __call__(self, *args: Any) -> Any:
        """Call the function; its prints go to stderr, because stdout is for the report."""
        function = self.load()
        with contextlib.redirect_stdout(sys.stderr):
            return function(*args)

    @property
    def metric(self) -> str:
        """The name of the function's value, and of the quality in messages."""
        return name_of(self.load())

    @property
    def unit(self) -> str:
        """The name of one example, such as "token"."""
        return unit_of(self.load())

    @property
    def data_digest(self) -> Any:
        """The attribute `data_digest` of the function, or None."""
        return getattr(self.load(), "data_digest", None)


@functools.cache
def _load(text: str) -> Callable[..., Any]:
    where, _, name = text.rpartition(":")
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise ConfigError(f"{where}: no such file; {FUNCTION_FORM}")
    folder = str(Path(where).absolute().parent) if is_file else os.getcwd()  # as Python does for a script
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _module_of_file(Path(where)) if is_file else importlib.import_module(where)
    except ConfigError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not is_file and missing is not None and f"{where}.".startswith(f"{missing}."):
            raise ConfigError(f"no module {missing!r} is found from {folder}; {FUNCTION_FORM}") from None
        raise ConfigError(f"{where}: {type(error).__name__} while it was loaded: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{where}: has no function {name!r}; {FUNCTION_FORM}")
    return function


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be loaded as Python; {FUNCTION_FORM}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
