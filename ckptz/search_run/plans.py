"""Plans: a configuration as a small JSON file, to be replayed; and the one that a file records.

A plan holds settings and nothing else: it never names code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from ckptz.codec.units import TensorSource
from ckptz.container.envelope import strict_json
from ckptz.container.publish import publish
from ckptz.container.reader import FrameSource
from ckptz.errors import CkptzError, ConfigError
from ckptz.methods.method import Method, checked
from ckptz.methods.table import METHODS

VERSION: Final = 1


def save_plan(path: Path, config: Method) -> None:
    """Write a configuration to a plan, a JSON file.

    Raises:
        OSError: the disk refused it.
    """
    document = {"ckptz_plan": VERSION, "method": checked(config).name, "settings": asdict(config)}
    with publish(path) as sink:
        sink.write((json.dumps(document, indent=1) + "\n").encode())


def load_plan(path: Path) -> Method:
    """Read the configuration of a plan.

    Raises:
        ConfigError: not a plan, of a newer version, or with settings that no method has.
    """
    try:
        document = strict_json(path.read_bytes(), "plan")
        version, method, settings = (document[key] for key in ("ckptz_plan", "method", "settings"))
    except (CkptzError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a plan; --save-plan writes one") from None
    if version != VERSION:
        raise ConfigError(f"{path}: a plan of another version than {VERSION}, which this ckptz reads")
    if type(method) is not str or method not in METHODS:
        raise ConfigError(f"{path}: plans for a method that this ckptz does not have: {str(method)[:40]}")
    try:
        return config_of(method, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_of(method: str, settings: Any) -> Method:
    """Make a configuration from the name of its method and its settings as plain values.

    Raises:
        msgspec.ValidationError: settings that the method does not have.
        ConfigError: values out of range.
    """
    kind = METHODS[method]
    known = {one.name for one in fields(kind)}
    if isinstance(settings, dict) and (unknown := sorted(set(settings) - known)):
        raise msgspec.ValidationError(f"unknown setting {unknown[0]!r}")
    return msgspec.convert(settings, kind)


def recorded_in(bases: Mapping[str, TensorSource], template: Method) -> Method | None:
    """Find the settings that the tensors of a base record; `template` has what they do not tell."""
    records = [source.entry.lossy for source in bases.values() if isinstance(source, FrameSource)]
    return template.recorded([record for record in records if record is not None])
