"""Names of the parameters that an optimizer numbers: listed by the user, or of a folder's config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ckptz.errors import CkptzError, ConfigError
from ckptz.format.envelope import strict_json

CONFIG_FILE: Final = "config.json"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_LAYERS: Final = 4096  # a config may claim as many as it likes, and each takes time to build


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """The names of parameters that an optimizer numbers, and where they come from."""

    # a file of the user's with a name on each line, in the order of the optimizer's numbers
    listed_in: Path | None = None
    beside: Path | None = None  # the folder, or a file of it, that may hold a config.json

    def listed(self) -> list[str]:
        """Read the names that the user gives; none without a file.

        Raises:
            ConfigError: not text, or a name occurs twice.
        """
        if self.listed_in is None:
            return []
        try:
            names = [line.strip() for line in self.listed_in.read_text("utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            what = "not a text file in UTF-8; give one name on each line"
            raise ConfigError(f"{self.listed_in}: {what}") from None
        if len(set(names)) < len(names):
            raise ConfigError(f"{self.listed_in}: names a parameter twice; give each of them once")
        return names

    def orders(self) -> Sequence[Sequence[str]]:
        """Return the orders in which an optimizer may number the model's parameters; none without a model."""
        if self.beside is None:
            return ()
        folder = self.beside if self.beside.is_dir() else self.beside.parent
        return _orders(folder / CONFIG_FILE)


@cache
def _orders(config: Path) -> tuple[tuple[str, ...], ...]:
    """List parameter names in the order of the model, and in the Trainer's: weight decay first, then none."""
    try:
        if not config.is_file() or config.stat().st_size > MAX_CONFIG_BYTES or not _is_bounded(config):
            return ()
        import torch
        import transformers
    except (ImportError, OSError, CkptzError):
        return ()
    try:
        model_config = transformers.AutoConfig.from_pretrained(
            config.parent, local_files_only=True, trust_remote_code=False
        )
        kind = getattr(transformers, model_config.architectures[0])
        with torch.device("meta"):
            model = kind(model_config)
        decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    except Exception:  # a model that this transformers does not have, or cannot build so
        return ()
    names = tuple(name for name, _ in model.named_parameters())
    return names, tuple(sorted(names, key=lambda name: name not in decayed))


def _is_bounded(config: Path) -> bool:
    """Return whether the model of a config has few enough layers to be built quickly."""
    layers: list[Any] = []

    def look(node: Any, key: str = "") -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                look(value, name)
        elif isinstance(node, list):
            for value in node:
                look(value, key)
        elif isinstance(node, int) and ("layer" in key or "block" in key or "depth" in key):
            layers.append(node)

    look(strict_json(config.read_bytes(), CONFIG_FILE))
    return all(n <= MAX_LAYERS for n in layers)


NO_NAMES: Final = ParameterNames()
