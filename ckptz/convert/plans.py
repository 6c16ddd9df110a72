"""Plans: a configuration as a small JSON file, to be replayed; and the one that a file records.

A plan holds settings and nothing else: it never names code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from ckptz.codec.units import UnitSource
from ckptz.config import Config, Grid, KMeans, Lossless
from ckptz.container.envelope import strict_json
from ckptz.container.index import LossyRecord, Setting
from ckptz.container.publish import publish
from ckptz.container.reader import FrameSource
from ckptz.errors import CkptzError, ConfigError

VERSION: Final = 1
METHODS: Final[Mapping[str, type[Config]]] = {"kmeans": KMeans, "grid": Grid, "lossless": Lossless}
SEARCHED: Final = ("levels", "prune", "protect", "prune_by", "protect_by", "protect_as")


def save_plan(path: Path, config: Config) -> None:
    """Write a configuration.

    Raises:
        OSError: the disk refused it.
    """
    method = next(name for name, kind in METHODS.items() if isinstance(config, kind))
    document = {"ckptz_plan": VERSION, "method": method, "settings": asdict(config)}
    with publish(path) as sink:
        sink.write((json.dumps(document, indent=1) + "\n").encode())


def load_plan(path: Path) -> Config:
    """The configuration of a plan.

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


def config_of(method: str, settings: Any) -> Config:
    """A configuration from the name of its method and its settings as plain values.

    Raises:
        msgspec.ValidationError: settings that the method does not have.
        ConfigError: values out of range.
    """
    kind = METHODS[method]
    known = {one.name for one in fields(kind)}
    if isinstance(settings, dict) and (unknown := sorted(set(settings) - known)):
        raise msgspec.ValidationError(f"unknown setting {unknown[0]!r}")
    return msgspec.convert(settings, kind)


def parent_of(bases: Mapping[str, UnitSource]) -> KMeans | None:
    """The configuration that a base's records say it was written with; None if it is not a k-means file."""
    records = [source.entry.lossy for source in bases.values() if isinstance(source, FrameSource)]
    found = [record for record in records if record is not None and record.method == "kmeans"]
    if not found:
        return None
    embeddings = [record for record in found if record.layer_type == "embedding"]
    others = [record for record in found if record.layer_type != "embedding"] or embeddings
    usual = {name: _usual(others, name) for name in SEARCHED}
    usual["embedding_levels"] = _usual(embeddings, "levels")
    try:
        return msgspec.convert({n: v for n, v in usual.items() if v is not None}, KMeans)
    except (msgspec.ValidationError, ConfigError):
        return None  # of another version, with settings that mean nothing here


def _usual(records: Sequence[LossyRecord], name: str) -> Setting | None:
    """The value that a setting has in most records."""
    values = [record.settings[name] for record in records if name in record.settings]
    return Counter(values).most_common(1)[0][0] if values else None


def step_of(bases: Mapping[str, UnitSource]) -> float | None:
    """The multiplier that a base's records say its weights were written with; None if it has no grids."""
    records = [source.entry.lossy for source in bases.values() if isinstance(source, FrameSource)]
    found = _usual([one for one in records if one is not None and one.method == "grid"], "step")
    try:
        return None if found is None else msgspec.convert({"step": found}, Grid).step
    except (msgspec.ValidationError, ConfigError):
        return None  # of another version, as above
