"""Qualities that budgets call: functions of a state, and those that compare it with the exact state.

A plain quality is a function of a state. One that compares has a method `against` instead: it sees the
exact state once, and returns what is called with trials. Who decodes states is no concern of this module.

Agreement is that of a model with the exact one, from the logits of both on the same inputs:

    kl      mean over positions of sum(p * (log p - log q)), in nats; p of the exact tensors
    top1    share of positions where both rank the same entry first

Both see what a loss averages away: a model can be as good on average and yet answer otherwise.

The resume probe is the loss of a training run that goes on from the restored state. A loss at once flatters
what sends too little: stale weights act like an average over steps. What a checkpoint is for is to train
on, so that is measured. Two more runs say what the measurement is worth: the exact state again, and the
exact state with a little noise on its weights. A third, twice as long, says how many steps of training a
difference stands for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import ConfigError, check_int, coerce_numeric_fields
from ckptz.kernels.blas import product
from ckptz.kernels.floats import Reals

State: TypeAlias = dict[str, Any]  # name -> CPU torch tensor, the callee's to change
Quality: TypeAlias = Callable[[State], Any]
Logits: TypeAlias = NDArray[np.float32]
KL, TOP1 = "kl", "top1"
ANSWER: Final = "answer"  # what one value is, where an evaluation does not say
CHUNK_ENTRIES: Final = 1 << 18  # of a softmax in double precision at once: a few arrays of 2 MiB
DISTURBANCE: Final = 0.01  # of the spread of a tensor: changes less than any budget is about
METRIC: Final = "resume"
HOW = "give package.module:function or file.py:function"


class ExactState(Protocol):
    """The exact state, decoded as often as it is wanted."""

    def state(self) -> State:
        """Decode a fresh copy."""
        ...

    def disturbed(self, share: float, seed: int) -> State:
        """Decode a copy with noise of `share` of their spread on weights of two or more dimensions."""
        ...


@dataclass(frozen=True, slots=True)
class Baseline:
    """A quality that has seen the exact state."""

    quality: Quality  # called with trials
    exact: Any  # what it would return for the exact state
    noise: float = 0.0  # differences up to this one say nothing
    per_step: float | None = None  # what a step of training lowers it by, if that is known


class Comparing(Protocol):
    """A quality that needs the exact state before it can judge another."""

    def against(self, exact: ExactState) -> Baseline:
        """Return the function to call with trials, and its result for the exact state."""
        ...


def prepare(quality: Quality | Comparing, exact: ExactState) -> Baseline:
    """Measure the exact state: by `against`, or by calling a quality that has none."""
    if callable(quality) and not hasattr(quality, "against"):
        return Baseline(quality, quality(exact.state()))
    comparing: Comparing = quality
    return comparing.against(exact)


def number(value: Any, name: str) -> float:
    """Read the result of a function as a number.

    Raises:
        ConfigError: it is none; names the function.
    """
    # An array, or a tensor of several elements, is none.
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if hasattr(value, "__float__") and not isinstance(value, str | bytes | bool):
            return float(value)
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    raise ConfigError(f"{name} returned {shown}, which is not a number")


def values_of(given: Any, name: str) -> Reals:
    """Read the result of a function as values in double precision: those of a vector [n], or a number [1].

    Raises:
        ConfigError: it is neither; names the function.
    """
    if hasattr(given, "detach"):
        try:
            given = given.detach().cpu()
            given = given.numpy() if given.is_complex() else given.double().numpy()  # numpy has no bfloat16
        except (TypeError, RuntimeError) as error:  # sparse, nested, or without memory
            raise ConfigError(f"{name} returned a tensor whose values cannot be read: {error}") from None
    if isinstance(given, list | tuple):
        raise ConfigError(
            f"{name} returned a {type(given).__name__} of {len(given)}; return the values of all answers in "
            "one tensor or array, as torch.tensor(losses)"
        )
    if isinstance(given, np.ndarray) and given.dtype.kind in "bfiu":
        if given.size != 1 and (given.ndim != 1 or not given.size):
            raise ConfigError(
                f"{name} returned values of shape {list(given.shape)}; return one number, or those of all "
                "answers in one dimension [n_answers]"
            )
        return given.reshape(-1).astype(np.float64)
    return np.array([number(given, name)])


def name_of(function: Any) -> str:
    """Name a function: by its `metric`, or its own name."""
    return str(getattr(function, "metric", getattr(function, "__name__", "quality")))


def unit_of(function: Any) -> str:
    """Ask a function what one of its values is, such as "token"."""
    return str(getattr(function, "unit", None) or ANSWER)


def digest_of(function: Any) -> str | None:
    """Ask a function what data it measures on, or None."""
    digest = getattr(function, "data_digest", None)
    digest = digest() if callable(digest) else digest
    return None if digest is None else str(digest)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measures "kl" and "top1" of a budget; one instance for both calls `logits` once a trial.

    The exact logits are kept in float32 while a search runs: 4 bytes times positions times entries.

    Attributes:
        logits: called with a state, returns logits [..., entries] of the same inputs in the same order each
            time, as a torch tensor or an array. It builds its own model.

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
            raise ConfigError(f"an agreement needs a function for its logits, got {self.logits!r}")

    @property
    def metric(self) -> str:
        """The metric's name in messages."""
        return name_of(self.logits)

    @property
    def data_digest(self) -> str | None:
        """A digest of the data, as `logits` gives it."""
        return digest_of(self.logits)

    def against(self, exact: ExactState) -> Baseline:
        """Keep the logits of the exact state, for trials to be compared with."""
        kept = _rows_of(self.logits(exact.state()), self.metric).copy()  # theirs may be a buffer
        if not kept.size:
            raise ConfigError(f"{self.metric} returned no logits: shape {list(kept.shape)}")
        if not np.isfinite(kept.max(axis=1)).all():
            raise ConfigError(f"{self.metric}: logits of the exact tensors hold NaN or infinity")
        return Baseline(_Compared(self.logits, kept), {KL: 0.0, TOP1: 1.0})


@dataclass(frozen=True, slots=True)
class _Compared:
    """Compares logits with those that are kept; can be sent to another process."""

    logits: Callable[[State], Any]
    kept: Logits

    @property
    def metric(self) -> str:
        return name_of(self.logits)

    def __call__(self, state: State) -> dict[str, float]:
        """Return divergence and agreement; not finite if the logits are not."""
        decoded = _rows_of(self.logits(state), self.metric)
        if decoded.shape != self.kept.shape:
            n_found, n_kept = (" x ".join(map(str, logits.shape)) for logits in (decoded, self.kept))
            raise ConfigError(
                f"{self.metric} returned {n_found} logits for a trial and {n_kept} for the exact tensors; "
                "evaluate the same inputs each time"
            )
        return agreement_of(self.kept, decoded)


def agreement_of(exact: Logits, decoded: Logits) -> dict[str, float]:
    """Compare logits, float32 [positions, entries]: "kl" in nats, and "top1", the share of equal first ranks.

    Both are NaN if `decoded` has rows without a largest finite logit.
    """
    if not np.isfinite(decoded.max(axis=1)).all():
        return {KL: float("nan"), TOP1: float("nan")}
    divergence, n_equal = 0.0, 0
    n_rows = max(CHUNK_ENTRIES // exact.shape[1], 1)
    for begin in range(0, len(exact), n_rows):
        own, other = exact[begin : begin + n_rows], decoded[begin : begin + n_rows]
        divergence += _divergence(_log_shares(own), _log_shares(other))
        n_equal += int((own.argmax(axis=1) == other.argmax(axis=1)).sum())
    return {KL: max(divergence, 0.0) / len(exact), TOP1: n_equal / len(exact)}


def _log_shares(logits: Logits) -> Reals:
    """Logarithms of softmax shares, in double precision."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def _divergence(exact: Reals, decoded: Reals) -> float:
    """Sum the divergence over positions; entries that the exact model excludes count nothing."""
    shares = np.exp(exact)
    apart = np.subtract(exact, decoded, out=np.zeros_like(exact), where=shares > 0)
    return float(product(shares.ravel(), apart.ravel()))


def _rows_of(logits: Any, name: str) -> Logits:
    """Logits [positions, entries] from a tensor or an array."""
    if hasattr(logits, "detach"):
        logits = logits.detach().cpu().float()  # numpy has no bfloat16
    try:
        rows: Logits = np.asarray(logits, np.float32)
    except (TypeError, ValueError):
        rows = np.zeros((), np.float32)
    if not rows.ndim:
        raise ConfigError(f"{name} returned no logits [..., entries] but {type(logits).__name__}")
    return rows.reshape(-1, rows.shape[-1]) if rows.size else rows.reshape(0, 1)


@dataclass(frozen=True, slots=True)
class ResumeProbe:
    """A budget's quality: the loss after some steps of training from a state.

    Before the first trial it runs four times: from the exact state, from it again, from it with noise, and
    from it twice as far. The larger of the first two differences is the noise floor. Where that is above the
    budget, the budget cannot be measured, and counts as not met. The last one is the slope: what is lost,
    over what a step gains, are steps of training lost. Where the loss falls by less than the noise floor,
    that is not measurable.

    Attributes:
        resume: `resume(state, n_steps) -> loss`: trains on from the state and returns a validation loss, best
            a mean over its last steps. It builds its own model and optimizer, and restores its own position
            in the data and its own random numbers. The state has all tensors of the checkpoint, optimizer
            state included, by their names in it.
        n_steps: how far to train.
        noise_floor: if it is known; two runs less then.

    Example:
        >>> from ckptz import Budget, ResumeProbe
        >>> probe = ResumeProbe(lambda state, n_steps: 2.0 + float(state["weight"].var()), n_steps=10)
        >>> Budget(probe, 0.002).name
        'resume'
    """

    resume: Callable[[State, int], Any]
    n_steps: int = 20
    noise_floor: float | None = None
    metric: ClassVar[str] = METRIC
    trains: ClassVar[bool] = True  # and so needs optimizer state

    def __post_init__(self) -> None:
        if not callable(self.resume):
            raise ConfigError(f"a resume probe needs a function, got {self.resume!r}")
        coerce_numeric_fields(self)
        check_int("n_steps", self.n_steps, 1)
        if self.noise_floor is not None and not self.noise_floor >= 0:
            raise ConfigError(f"a noise floor must be a number from 0, got {self.noise_floor}")

    @property
    def data_digest(self) -> str | None:
        """A digest of the data, as `resume` gives it."""
        return digest_of(self.resume)

    def against(self, exact: ExactState) -> Baseline:
        """Measure the exact state and the noise of the measurement, for trials to be compared with."""
        resumed = _Resumed(self.resume, self.n_steps)
        loss, noise = resumed(exact.state()), self.noise_floor
        if not math.isfinite(loss):
            return Baseline(resumed, loss, noise or 0.0)
        if noise is None:
            others = (resumed(exact.state()), resumed(exact.disturbed(DISTURBANCE, seed=0)))
            apart = [abs(other - loss) for other in others]
            noise = max(one if math.isfinite(one) else math.inf for one in apart)
        gain = loss - replace(resumed, n_steps=2 * self.n_steps)(exact.state())
        return Baseline(resumed, loss, noise, gain / self.n_steps if gain > noise else None)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """The loss after the steps; can be sent to another process."""

    resume: Callable[[State, int], Any]
    n_steps: int
    metric: ClassVar[str] = METRIC
    trains: ClassVar[bool] = True

    def __call__(self, state: State) -> float:
        return number(self.resume(state, self.n_steps), name_of(self.resume))


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function that is loaded where it is called, in another process too."""

    text: str  # as the user wrote it

    def __post_init__(self) -> None:
        if not all(self.text.rpartition(":")):
            raise ConfigError(f"{self.text!r} names no function; {HOW}")

    def load(self) -> Callable[..., Any]:
        """Load the function's module and find it there.

        Raises:
            ConfigError: there is none; or its module fails to load.
        """
        return _load(self.text)

    def __call__(self, *args: Any) -> Any:
        """Call the function; what it prints goes to stderr, as stdout is for the report."""
        function = self.load()
        with contextlib.redirect_stdout(sys.stderr):
            return function(*args)

    @property
    def metric(self) -> str:
        """The metric's name in messages."""
        return name_of(self.load())

    @property
    def unit(self) -> str:
        """The name of what one value is, as the function says."""
        return unit_of(self.load())

    @property
    def data_digest(self) -> Any:
        """A digest of the data, as the function gives it; None if it does not."""
        return getattr(self.load(), "data_digest", None)


@functools.cache
def _load(text: str) -> Callable[..., Any]:
    where, _, name = text.rpartition(":")
    try:
        module = _module_of_file(Path(where)) if where.endswith(".py") else _module_named(where)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {type(error).__name__} while it was loaded: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{where}: has no function {name!r}; {HOW}")
    return function


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; {HOW}")
    _make_importable(str(path.absolute().parent))  # as if it were run as a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be loaded as Python; {HOW}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _module_named(name: str) -> ModuleType:
    _make_importable(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # found, and one of its own imports is missing
        raise ConfigError(f"no module {error.name!r} is found from {os.getcwd()}; {HOW}") from None


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
