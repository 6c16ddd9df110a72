"""Search spaces: the settings of a method that a search varies, and how they are read from a file's records.

A `MultiplierSpace` has one number that scales all steps of a method. A `CubeSpace` has several axes, each
with values from the mildest to the most aggressive one. Only methods in `SPACES` can be searched for; a
package that registers a method adds its space: `SPACES["sign"] = MultiplierSpace("gain")`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from ckptz.codec.grid import Grid
from ckptz.codec.kmeans import KMeans
from ckptz.codec.method import Method, Setting
from ckptz.errors import ConfigError
from ckptz.format.index import LossyRecord

Point: TypeAlias = tuple[int, ...]  # of a cube: the index of a value on each axis, 0 is the mildest
M = TypeVar("M", bound=Method)
DEFAULT_METHOD: Final = Grid
SMALLEST, LARGEST = 2.0**-6, 2.0**6  # multipliers; at the smallest, weights take 8 bits and more
PROTECTED_BITS: Final = 24.0  # approximate bits of a protected element of k-means
MAX_LEVELS: Final = 255
MAX_PROTECTED: Final = 0.9  # share of k-means; a lossless file is smaller with more
# Settings at a position on a scale along which sizes grow, the lowest position, and the highest.
Scale: TypeAlias = tuple[Callable[[float], Method], float, float]


class Space:
    """The settings of one method that a search may vary. Spaces have no state."""

    def template(self, config: M, *, trains: bool, restarts: bool) -> M:
        """Return the settings that a search starts from.

        Args:
            config: the user's settings.
            trains: True if a budget resumes training, and so measures optimizer state too.
            restarts: True if training will resume from the file.
        """
        del trains, restarts
        return config

    def recorded(self, template: M, records: Sequence[LossyRecord]) -> M | None:
        """Return the settings that a file was written with, or None if it was written by another method.

        Args:
            template: supplies the settings that records do not contain.
            records: of the file's lossy tensors.
        """
        del template, records
        return None

    def scale(self, template: Method) -> Scale:
        """Return a scale of settings along which files become finer and larger.

        Raises:
            ConfigError: the method has none.
        """
        raise ConfigError(f"method {template.name} has no scale of file sizes; use another --method")


@dataclass(frozen=True, slots=True)
class MultiplierSpace(Space):
    """A space of one number that scales all steps; a larger multiplier makes a smaller, worse file.

    Attributes:
        field: the method's field with this number.
    """

    field: str

    def multiplier(self, config: Method) -> float:
        """Return the multiplier of a configuration."""
        value: float = getattr(config, self.field)
        return value

    def scaled(self, config: M, multiplier: float) -> M:
        """Return the configuration with another multiplier."""
        return replace(config, **{self.field: multiplier})

    def scale(self, template: Method) -> Scale:
        return lambda x: self.scaled(template, math.exp(-x)), -math.log(LARGEST), -math.log(SMALLEST)

    def recorded(self, template: M, records: Sequence[LossyRecord]) -> M | None:
        value = _usual([record for record in records if record.method == template.name], self.field)
        recorded = None if value is None else _config_or_none(type(template), {self.field: value})
        return None if recorded is None else replace(template, **{self.field: getattr(recorded, self.field)})


class GridSpace(MultiplierSpace):
    """The multiplier of grid steps; steps of moments are scaled in proportion (`Grid.scaled`)."""

    __slots__ = ()

    def template(self, config: Any, *, trains: bool, restarts: bool) -> Any:
        """Keep moments exact if no budget measures their loss."""
        purpose = "resume" if restarts and config.purpose == "auto" else config.purpose
        return replace(config, moments=config.moments if trains else None, purpose=purpose)

    def scaled(self, config: Any, multiplier: float) -> Any:
        return config.scaled(multiplier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube:
    """All combinations of values along some axes; quality and size fall along each axis."""

    space: CubeSpace
    template: Method  # settings that are not on an axis
    axes: Mapping[str, tuple[float, ...]]  # values along each axis, the mildest first
    name: str = ""  # of a space with several cubes

    @property
    def points(self) -> list[Point]:
        """All points of the cube."""
        return list(itertools.product(*(range(len(values)) for values in self.axes.values())))

    def config(self, point: Point) -> Method:
        """Return the configuration of a point."""
        steps = zip(point, self.axes.items(), strict=True)
        return self.space.at(self.template, {name: values[step] for step, (name, values) in steps})

    def point(self, config: Method) -> Point:
        """Return the coarsest point that is at least as fine as `config` on every axis."""
        coordinates, point = self.space.coordinates(config), []
        for name, values in self.axes.items():  # rising or falling
            sign = 1 if values[-1] > values[0] else -1
            n_as_fine = sum(sign * value <= sign * coordinates[name] for value in values)
            point.append(max(n_as_fine - 1, 0))
        return tuple(point)


@dataclass(frozen=True, slots=True)
class CubeSpace(Space):
    """A space of several settings, each with a few values.

    Attributes:
        axes: the values of each setting, from the mildest to the most aggressive one.
        cube_field: a setting whose values have a cube each, or empty.
        cube_names: the values of `cube_field`.
    """

    axes: Mapping[str, tuple[float, ...]]
    cube_field: str = ""
    cube_names: tuple[str, ...] = ()

    def cubes(
        self, template: Method, names: Sequence[str], layer_types: Collection[str], *, is_ranked: bool
    ) -> tuple[Cube, ...]:
        """Return the cubes to search.

        Args:
            template: settings that are not on an axis.
            names: names of cubes to search; empty for all.
            layer_types: layer types of the lossy tensors.
            is_ranked: True if the sensitivities of some of these tensors are known.
        """
        del names, layer_types, is_ranked
        return (Cube(space=self, template=template, axes=self.axes),)

    def finer(self, template: M) -> tuple[M, ...]:
        """Return configurations milder than every cube, the smallest file first; a search tries them last."""
        del template
        return ()

    def cube_name(self, config: Method) -> str:
        """Return the name of the cube that a configuration belongs to."""
        return str(getattr(config, self.cube_field)) if self.cube_field else ""

    def at(self, config: M, coordinates: Mapping[str, Any]) -> M:
        """Return the configuration with other values along the axes."""
        return replace(config, **coordinates)

    def coordinates(self, config: Method) -> Mapping[str, Any]:
        """Return the values of a configuration along the axes."""
        return {name: getattr(config, name) for name in self.axes}


class KMeansSpace(CubeSpace):
    """The cubes of Inshrinkerator (arXiv 2306.11800, section 5), one for each way to rank what is pruned."""

    __slots__ = ()

    def cubes(
        self, template: Any, names: Sequence[str], layer_types: Collection[str], *, is_ranked: bool
    ) -> tuple[Cube, ...]:
        """Return 216 settings for each way to prune, 108 where the file has no embedding."""
        template = template if is_ranked else replace(template, protect_by="magnitude")
        axes = {n: v for n, v in self.axes.items() if n != "embedding_levels" or "embedding" in layer_types}
        usable = [name for name in names or self.cube_names if is_ranked or name == "magnitude"]
        return tuple(
            Cube(space=self, template=replace(template, prune_by=name), axes=axes, name=name)
            for name in usable or ["magnitude"]
        )

    def scale(self, template: Any) -> Scale:
        """Return a scale of increasing levels; between two numbers of levels, more elements are protected.

        Beyond the largest number of levels, up to `MAX_PROTECTED` of the elements that are not pruned are
        protected.
        """
        most_pruned = max((template.prune, *(share for _, share in template.layer_prune)))
        most_protected = max(MAX_PROTECTED * (1 - most_pruned), template.protect)

        def config_at(x: float) -> Method:
            levels = min(math.floor(math.exp(x)), MAX_LEVELS)
            if levels < MAX_LEVELS:
                share = (math.exp(x) - levels) * math.log2((levels + 1) / levels) / PROTECTED_BITS
            else:
                share = (x - math.log(MAX_LEVELS)) * (most_protected - template.protect)
            finer: Method = replace(template, levels=levels, protect=template.protect + max(share, 0.0))
            return finer

        return config_at, math.log(2.0), math.log(MAX_LEVELS) + 1.0

    def finer(self, template: Any) -> Any:
        template = replace(template, prune=0.0, layer_prune=(), embedding_levels=None)
        return tuple(replace(template, levels=levels) for levels in FINER_LEVELS)

    def at(self, config: Any, coordinates: Mapping[str, Any]) -> Any:
        """Return the configuration with other values along the axes; `prune_by` only matters with pruning."""
        prune_by = config.prune_by if coordinates["prune"] else "magnitude"
        return replace(config, **{"embedding_levels": None, **coordinates, "prune_by": prune_by})

    def coordinates(self, config: Any) -> Mapping[str, Any]:
        values = {name: getattr(config, name) for name in self.axes}
        return values | {"embedding_levels": config.embedding_levels or config.levels}

    def recorded(self, template: M, records: Sequence[LossyRecord]) -> M | None:
        """Return the most frequent settings of the file's tensors."""
        records = [record for record in records if record.method == template.name]
        embeddings = [record for record in records if record.layer_type == "embedding"]
        layers = [record for record in records if record.layer_type != "embedding"] or embeddings
        if not layers:
            return None
        settings = {name: _usual(layers, name) for name in RECORDED}
        settings["embedding_levels"] = _usual(embeddings, "levels")
        return _config_or_none(type(template), {n: v for n, v in settings.items() if v is not None})


# Levels to try if no point of the cubes is within the budget; a lossless file takes 26 bits per weight.
FINER_LEVELS: Final = (64, 255)
RECORDED: Final = ("levels", "prune", "protect", "prune_by", "protect_by", "protect_as")
SPACES: Final[dict[str, Space]] = {
    Grid.name: GridSpace("step"),
    KMeans.name: KMeansSpace(
        axes={
            "levels": (32, 16, 12, 8, 6, 4),
            "prune": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
            "protect": (0.01, 0.005, 0.0005),
            "embedding_levels": (32, 16),
        },
        cube_field="prune_by",
        cube_names=("magnitude", "sensitivity"),
    ),
}
# Default settings of a search, if they differ from the method's. The paper stores protected elements in BF16.
REFERENCES: Final[dict[str, Method]] = {KMeans.name: KMeans(protect_as="bf16", protect_by="either")}


def space_of(method: Method | type[Method]) -> Space:
    """Return the search space of a method.

    Raises:
        ConfigError: the method cannot be searched for.
    """
    if method.name not in SPACES:
        raise ConfigError(f"method {method.name} has no search space; searchable are {', '.join(SPACES)}")
    return SPACES[method.name]


def reference(method: type[Method]) -> Method:
    """Return the default settings of a search for a method."""
    return REFERENCES.get(method.name) or method()


def _usual(records: Sequence[LossyRecord], name: str) -> Setting | None:
    """Return the most frequent value of a setting; None if no record has it."""
    values = [record.settings[name] for record in records if name in record.settings]
    return Counter(values).most_common(1)[0][0] if values else None


def _config_or_none(method: type[M], settings: Mapping[str, Any]) -> M | None:
    """Build a configuration from recorded settings; None if this version of the method lacks one of them."""
    try:
        return msgspec.convert(settings, method)
    except (msgspec.ValidationError, ConfigError):
        return None
