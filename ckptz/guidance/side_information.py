"""Collects side information for encoders: second moments, gradients, layer inputs.

It is not stored, so the files that it comes from are not needed to restore the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptz.codec.coded import CodedSource
from ckptz.codec.method import CALIBRATION, METHODS, MOMENTS_FROM, SENSITIVITY, Method
from ckptz.codec.tensor import InputCovariance, SideInformation, mean_sensitivity_of
from ckptz.errors import CalibrationError, ConfigError
from ckptz.format.sources import TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.guidance.files import CalibrationFile, RecordedInputs, Recordings, SensitivityFile, Shapes
from ckptz.guidance.optimizer_layout import roles_beside
from ckptz.state.roles import Role, Rule, role_of

if TYPE_CHECKING:
    from ckptz.foreign.inputs import Input

UNCALIBRATED: Final = "no calibration given: weights rounded to nearest"
Calibrated: TypeAlias = Path | Recordings[RecordedInputs]  # calibration file, or recordings in memory
# In order of preference: a weight that is both embedding and head is rounded for the head's inputs.
INPUT_KINDS: Final = ("linear", "conv", "conv1d_t", "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideInformationFiles:
    """Sources of side information."""

    moments_from: Path | None = None  # a checkpoint with Adam's second moments
    calibration: Calibrated | None = None  # recordings of `ckptz.hooks.Calibration`
    sensitivity: Path | None = None  # a file of `ckptz.hooks.SensitivityTracker`


NO_FILES: Final = SideInformationFiles()


def check_files(config: Method, files: SideInformationFiles) -> None:
    """Check that a method uses all given files.

    Raises:
        ConfigError: the method would ignore a file.
    """
    for name in (MOMENTS_FROM, CALIBRATION, SENSITIVITY):
        source = getattr(files, name)
        if source is None or name in config.reads:
            continue
        where = f"{source}: " if isinstance(source, Path) else ""
        what = name.replace("_", "-")
        if not config.is_lossy:
            raise ConfigError(f"{where}lossless compression reads no {what} file; name a --method")
        readers = " and ".join(method.name for method in METHODS.values() if name in method.reads)
        raise ConfigError(f"{where}the method {config.name} reads no {what}; a {what} guides {readers} only")


def guides_of(
    tensors: Mapping[str, TensorSource],
    roles: Mapping[str, Role],
    config: Method,
    files: SideInformationFiles,
    stack: contextlib.ExitStack,
    *,
    tree: dict[str, Any] | None = None,
    rules: Sequence[Rule] = (),
) -> tuple[dict[str, SideInformation], list[str]]:
    """Collect the side information for the tensors of a checkpoint.

    Args:
        tensors: tensors of the checkpoint and of its optimizer state, by name.
        roles: role of each tensor.
        config: the method; only the kinds of side information that it reads are collected.
        files: further sources.
        stack: keeps these files open while side information is used.
        tree: tree of the checkpoint, as in `Index.tree`.
        rules: the user's additions to the table of roles.

    Returns:
        The side information by tensor name, and notes for the user.

    Raises:
        ConfigError: a file does not belong to this checkpoint.
        CalibrationError: a calibration or sensitivity file does not belong to this checkpoint.
        FileNotFoundError: a file is missing.
    """
    check_files(config, files)
    if not config.reads:
        return {}, []
    weights = {
        name: source
        for name, source in tensors.items()
        if roles[name].role == "weight"
        and source.dtype.name in FLOAT_KINDS
        and not isinstance(source, CodedSource)
    }
    notes: list[str] = []
    moments = _own_moments(tensors, weights, roles, notes)
    if files.moments_from is not None:
        from ckptz.foreign.inputs import open_input  # slow import that most saves do not need

        opened = stack.enter_context(contextlib.closing(open_input(files.moments_from)))
        moments = _read_moments(opened, weights, roles, tree, rules, notes)
    gradients = {}
    if files.sensitivity is not None:
        gradients = _read_gradients(files.sensitivity, weights, stack, notes)
    inputs: dict[str, InputCovariance] = {}
    if files.calibration is not None:
        inputs = read_inputs(files.calibration, _shapes(weights), stack, notes)
    elif CALIBRATION in config.reads:
        notes.append(UNCALIBRATED)
    mean = mean_sensitivity_of((source, moments[name]) for name, source in weights.items() if name in moments)
    guides = {
        name: SideInformation(
            gradient=gradients.get(name),
            second_moment=moments.get(name),
            inputs=inputs.get(name),
            mean_sensitivity=mean,
        )
        for name in weights
    }
    return guides, notes


def _own_moments(
    tensors: Mapping[str, TensorSource],
    weights: Mapping[str, TensorSource],
    roles: Mapping[str, Role],
    notes: list[str],
) -> dict[str, TensorSource]:
    """Return the second moments in the same file, by the names of their weights."""
    squares = {roles[n].parameter: s for n, s in tensors.items() if roles[n].role == "exp_avg_sq"}
    matching = {n: squares[roles[n].parameter] for n in weights if roles[n].parameter in squares}
    fitting = {name: moments for name, moments in matching.items() if _fits(moments, weights[name])}
    unlike = [name for name in matching if name not in fitting]
    if unlike:
        notes.append(
            f"{len(unlike)} weights have second moments of another shape or type, which are not used, "
            f"first {unlike[0]!r}"
        )
    return fitting


def _fits(moments: TensorSource, weight: TensorSource) -> bool:
    return moments.dtype.name in FLOAT_KINDS and moments.shape == weight.shape


def _read_moments(
    opened: Input,
    weights: Mapping[str, TensorSource],
    roles: Mapping[str, Role],
    tree: dict[str, Any] | None,
    rules: Sequence[Rule],
    notes: list[str],
) -> dict[str, TensorSource]:
    """Return the second moments from another checkpoint, by the names of the weights.

    Raises:
        ConfigError: a second moment does not fit its weight, or there is none for any weight.
    """
    path = opened.name
    known, reasons = roles_beside(opened.tensors, opened.tree, weights, tree, rules)
    squares = {}
    for name, source in opened.tensors.items():
        role = known.get(name) or role_of(name, source.shape, source.dtype.is_float, rules)
        if role.role == "exp_avg_sq":
            squares[role.parameter] = source
    of_weights = {n: squares[roles[n].parameter] for n in weights if roles[n].parameter in squares}
    for name, moments in of_weights.items():
        if not _fits(moments, weights[name]):
            raise ConfigError(
                f"{path}: the second moment of {name!r} is {moments.dtype.name} {list(moments.shape)}, "
                f"the weight has shape {list(weights[name].shape)}; pass the optimizer state of this model, "
                "in F32, BF16 or F16"
            )
    if not of_weights:
        reason = "".join(f" ({note})" for note in reasons[:1])
        raise ConfigError(
            f"{path}: has no second moment (exp_avg_sq) of any of the {len(weights)} weights{reason}; pass "
            "the optimizer state of this model, or name its tensors with --set input.tensor_roles=FILE"
        )
    without = [name for name, weight in weights.items() if name not in of_weights and len(weight.shape) > 1]
    if without:
        notes.append(f"{path}: holds no second moment of {len(without)} weights, first {without[0]!r}")
    return of_weights


def _read_gradients(
    path: Path, weights: Mapping[str, TensorSource], stack: contextlib.ExitStack, notes: list[str]
) -> dict[str, TensorSource]:
    """Return average gradients by the names of weights."""
    file = stack.enter_context(SensitivityFile(path))
    matched, unmatched = file.match(_shapes(weights))
    if unmatched:
        notes.append(
            f"{path}: {len(unmatched)} of its {len(file.recorded)} parameters are not in the checkpoint, "
            f"first {unmatched[0]!r}"
        )
    return {name: file.region(one.names[0], ("F32",)) for name, one in matched.items()}


def read_inputs(
    calibration: Calibrated, shapes: Shapes, stack: contextlib.ExitStack, notes: list[str]
) -> dict[str, InputCovariance]:
    """Read the input covariances of layers, by the names of their weights.

    Raises:
        CalibrationError: it was recorded from another model.
    """
    if isinstance(calibration, Path):
        calibration = stack.enter_context(CalibrationFile(calibration))
    matched, unmatched = calibration.match(shapes)
    where, n = calibration.where, len(calibration.recorded)
    if not matched:
        example = f", not even {unmatched[0]!r}" if unmatched else ""
        raise CalibrationError(
            f"{where}: none of its {n} modules is in the checkpoint{example}; record it with this model"
        )
    if unmatched:
        notes.append(
            f"{where}: {len(unmatched)} of its {n} modules are not in the checkpoint, first {unmatched[0]!r}"
        )
    without = [name for name, shape in shapes.items() if name not in matched and len(shape) > 1]
    if without:
        notes.append(f"{len(without)} weights have no calibration, first {without[0]!r}")
    return {
        name: next(one.covariances[kind] for kind in INPUT_KINDS if kind in one.covariances)
        for name, one in matched.items()
    }


def _shapes(weights: Mapping[str, TensorSource]) -> dict[str, tuple[int, ...]]:
    return {name: source.shape for name, source in weights.items()}
