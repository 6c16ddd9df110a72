"""The error classes of ckptz, by cause, and checks of numeric arguments.

    CkptzError(SafetensorError)      base of all; code that catches safetensors' error catches ours
     + FormatError(ValueError)       the bytes of a file or message are invalid            exit 3
     |  - TruncatedError             the bytes end early
     |  - ChecksumError              the bytes were changed
     |  - CorruptionError            the bytes violate the specification
     + LimitError                    decoding would exceed the free or the allowed memory   exit 3
     + UnsupportedError              valid, but not known to this version: upgrade          exit 4
     |  - DTypeError                 the framework has no such dtype
     + MissingBaseError              a base of the chain is missing                        exit 5
     + ConfigError(ValueError)       an argument or option is invalid                      exit 2
     + CalibrationError              the calibration does not belong to this model         exit 2
     + BudgetError                   no configuration met the quality budget               exit 6
     + WriteError(OSError)           a file cannot be written, or the disk is full         exit 7
     + WireError                     a link message is invalid                             exit 3

As in safetensors, a missing input file is the built-in FileNotFoundError (exit 5), and a failing read is
the built-in OSError (exit 7).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from math import inf
from numbers import Integral, Real
from typing import Any, ClassVar, Final

from safetensors import SafetensorError


class CkptzError(SafetensorError):
    """Base class of all errors of ckptz; `exit_code` is the exit status of the command line."""

    exit_code: ClassVar[int] = 1


class FormatError(CkptzError, ValueError):
    """The bytes of a file or message are invalid."""

    exit_code = 3


class TruncatedError(FormatError):
    """The bytes end early: their header announces more."""


class ChecksumError(FormatError):
    """The bytes were changed after they were written."""


class CorruptionError(FormatError):
    """The bytes violate the specification."""


class LimitError(CkptzError):
    """Decoding would take more memory than is free or than the caller allows."""

    exit_code = 3


class UnsupportedError(CkptzError):
    """The file or request is valid, but this version does not support it."""

    exit_code = 4


class DTypeError(UnsupportedError, TypeError, AttributeError, KeyError):
    """The framework has no such dtype; for some dtypes safetensors raises each of these base classes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # that of KeyError puts the message in quotes


class MissingBaseError(CkptzError):
    """The base of a delta is missing, or another checkpoint has its file name."""

    exit_code = 5


class ConfigError(CkptzError, ValueError):
    """An argument or option is invalid."""

    exit_code = 2


class CalibrationError(CkptzError):
    """The calibration does not belong to this model."""

    exit_code = 2


class BudgetError(CkptzError):
    """No configuration met the quality budget; the lossless file was written."""

    exit_code = 6


class WriteError(CkptzError, OSError):
    """A file cannot be written, or the disk has too little space for it."""

    exit_code = 7


class WireError(CkptzError):
    """A link message is damaged or out of turn; training on its tensor would be wrong."""

    exit_code = 3


def with_context(error: CkptzError, where: str) -> CkptzError:
    """Return an error of the same class, its message prefixed with `where` (a file or tensor name)."""
    return type(error)(f"{where}: {error}")


class error_context:  # lower case, as it is used like a function
    """Context manager that prefixes the message of a `CkptzError` with `where` (a file or tensor name)."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CkptzError):
            raise with_context(error, self._where) from None


# --- numeric arguments --------------------------------------------------------------------------


def check_int(name: str, value: object, least: float = -inf, most: float = inf) -> int:
    """Convert an argument to a built-in int, from any library's integer or 0-d array.

    Args:
        name: the argument, for the message.
        value: what the caller passed.
        least, most: the allowed range, inclusive.

    Raises:
        ConfigError: the value is not an integer, or not in range.
    """
    scalar = _to_scalar(value)
    if not isinstance(scalar, Integral):
        raise ConfigError(f"{name} must be a whole number, got {value!r:.80}")
    number = int(scalar)
    if not least <= number <= most:
        bounds = f"at least {least}" if most == inf else f"{least}..{most}"
        raise ConfigError(f"{name} must be {bounds}, got {number}")
    return number


def check_float(name: str, value: object) -> float:
    """Convert an argument to a built-in int or float, from any library's number or 0-d array.

    Args:
        name: the argument, for the message.
        value: what the caller passed.

    Raises:
        ConfigError: the value is not a number, or an integer beyond the range of a float.
    """
    scalar = _to_scalar(value)
    with contextlib.suppress(OverflowError):
        if isinstance(scalar, Real):
            number = float(scalar)
            return int(scalar) if isinstance(scalar, Integral) else number
    raise ConfigError(f"{name} must be a number, got {value!r:.80}")


def _check_bool(name: str, value: object) -> bool:
    scalar = _to_scalar(value)
    if not (isinstance(scalar, Real) and scalar in (0, 1)):
        raise ConfigError(f"{name} must be True or False, got {value!r:.80}")
    return bool(scalar)


def _to_scalar(value: Any) -> Any:
    """Unwrap numpy scalars and 0-d arrays and tensors; return other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


_CHECKS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "int": check_int,
    "float": check_float,
    "bool": _check_bool,
}


def coerce_numeric_fields(settings: Any) -> None:
    """Convert numeric fields of a dataclass to built-in int, float and bool.

    Written files then do not depend on the library that the numbers came from.

    Raises:
        ConfigError: a field holds a value of another type.
    """
    for field in dataclasses.fields(settings):
        annotation = getattr(field.type, "__name__", str(field.type))  # a string if it is not evaluated
        expected, _, alternative = annotation.partition(" | ")
        value = getattr(settings, field.name)
        if expected in _CHECKS and not (value is None and alternative == "None"):
            object.__setattr__(settings, field.name, _CHECKS[expected](field.name, value))
