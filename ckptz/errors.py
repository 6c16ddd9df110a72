"""Every error ckptz raises on purpose, by cause.

    CkptzError(SafetensorError)      anything below; code that catches safetensors' error catches ours
     + FormatError(ValueError)       the bytes are wrong                                      exit 3
     |  - TruncatedError             they end early
     |  - ChecksumError              they were changed
     |  - CorruptionError            they contradict themselves or the specification
     + LimitError                    decoding would exceed the memory that is free or allowed   exit 3
     + UnsupportedError              valid, but outside what this reader knows: upgrade       exit 4
     |  - DTypeError                 a dtype that the framework cannot hold
     + MissingBaseError              the chain needs a file that is not here                  exit 5
     + ConfigError(ValueError)       the caller asked for something impossible                exit 2
     + CalibrationError              the calibration does not belong to this model            exit 2
     + BudgetError                   no setting met the quality budget                        exit 6
     + WriteError(OSError)           the disk refused a file, or has too little room for it   exit 7
     + WireError                     a message that must not be trained on                    exit 3

A missing input is the built-in FileNotFoundError (exit 5) and a disk that fails while reading the
built-in OSError (exit 7), as in safetensors.
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
    """Base of the tree; `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class FormatError(CkptzError, ValueError):
    """The bytes of a file or message are wrong."""

    exit_code = 3


class TruncatedError(FormatError):
    """The bytes end before the structure they announce."""


class ChecksumError(FormatError):
    """The bytes were changed after they were written."""


class CorruptionError(FormatError):
    """The bytes contradict themselves or the specification."""


class LimitError(CkptzError):
    """Decoding would take more memory than is free, or more than the caller allowed."""

    exit_code = 3


class UnsupportedError(CkptzError):
    """Valid, but newer than or outside of what this reader knows."""

    exit_code = 4


class DTypeError(UnsupportedError, TypeError, AttributeError, KeyError):
    """A dtype that the framework cannot hold; safetensors raises each of these classes for some of them."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError's own would put the message in quotes


class MissingBaseError(CkptzError):
    """A delta's base is missing, or what stands in its place is another checkpoint."""

    exit_code = 5


class ConfigError(CkptzError, ValueError):
    """The caller asked for something impossible."""

    exit_code = 2


class CalibrationError(CkptzError):
    """A calibration that does not belong to this model."""

    exit_code = 2


class BudgetError(CkptzError):
    """No configuration met the quality budget; the lossless file was written."""

    exit_code = 6


class WriteError(CkptzError, OSError):
    """The disk refused a file that was being saved, or has too little room for it."""

    exit_code = 7


class WireError(CkptzError):
    """A message on a link that must not be trained on."""

    exit_code = 3


def with_context(error: CkptzError, where: str) -> CkptzError:
    """Make an error of the same kind with `where` (a file, a tensor) put before its message."""
    return type(error)(f"{where}: {error}")


class error_context:  # used like a function
    """Put `where` (a file, a tensor) before the message of an error of ours that is raised within."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CkptzError):
            raise with_context(error, self._where) from None


# --- arguments of a wrong type ------------------------------------------------------------------


def check_int(name: str, given: object, least: float = -inf, most: float = inf) -> int:
    """Return an argument as a built-in int, whichever library it comes from.

    Raises:
        ConfigError: it is none, or not within `least`..`most`.
    """
    plain = _plain(given)
    if not isinstance(plain, Integral):
        raise ConfigError(f"{name} must be a whole number, got {given!r:.80}")
    number = int(plain)
    if not least <= number <= most:
        bounds = f"at least {least}" if most == inf else f"{least}..{most}"
        raise ConfigError(f"{name} must be {bounds}, got {number}")
    return number


def check_float(name: str, given: object) -> float:
    """Return an argument as a built-in int or float, whichever library it comes from.

    Raises:
        ConfigError: it is none, or beyond those that a float can hold.
    """
    value = _plain(given)
    with contextlib.suppress(OverflowError):
        if isinstance(value, Real):
            near = float(value)
            return int(value) if isinstance(value, Integral) else near
    raise ConfigError(f"{name} must be a number, got {given!r:.80}")


def _switch(name: str, given: object) -> bool:
    value = _plain(given)
    if not (isinstance(value, Real) and value in (0, 1)):
        raise ConfigError(f"{name} must be True or False, got {given!r:.80}")
    return bool(value)


def _plain(given: Any) -> Any:
    """Take a number out of an array or tensor of no dimensions, which scalars of numpy's are, too."""
    return given.item() if getattr(given, "ndim", None) == 0 else given


_TAKEN: Final[Mapping[str, Callable[[str, object], object]]] = {
    "int": check_int,
    "float": check_float,
    "bool": _switch,
}


def coerce_numeric_fields(settings: Any) -> None:
    """Convert numeric fields of a dataclass to built-in int, float and bool.

    So what is written does not depend on whose numbers they were.

    Raises:
        ConfigError: names a field that holds something else.
    """
    for field in dataclasses.fields(settings):
        written = getattr(field.type, "__name__", str(field.type))  # text where annotations are not evaluated
        kind, _, other = written.partition(" | ")
        given = getattr(settings, field.name)
        if kind in _TAKEN and not (given is None and other == "None"):
            object.__setattr__(settings, field.name, _TAKEN[kind](field.name, given))
