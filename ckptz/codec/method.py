"""What every method is made of: a configuration that a user gives, and the recipes that tensors get from it.

A method is a frozen dataclass of settings, checked when it is made, in a file of its own and a row of
`ckptz.codec.registry`. Everything that other rooms want to know of it is said here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias, TypeVar

import msgspec

from ckptz.codec.tensor import TensorToEncode
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.errors import ConfigError, own_numbers
from ckptz.format.dtypes import DType
from ckptz.format.index import LossyRecord
from ckptz.format.sources import TensorSource
from ckptz.format.values import KINDS
from ckptz.state.roles import Role

if TYPE_CHECKING:
    from ckptz.codec.partitions import Partitions

Setting = int | float | bool | str
Point: TypeAlias = tuple[int, ...]  # of a cube: steps from the mildest value along each axis
MOMENT_ROLES: Final = ("exp_avg", "exp_avg_sq", "factor", "momentum")
READ_OPTIMIZER, CALIBRATION, SENSITIVITY = "read_optimizer", "calibration", "sensitivity"  # what guides


class Recipe:
    """The settings that a method gives one tensor. Frozen; equal ones write equal frames.

    Attributes:
        name: in the file's record of the tensor.
        is_lossy: whether the tensor may come back changed.
        may_be_low_rank: whether the tensor may become a sum of outer products, where a guide has its reach.
        is_joint: whether plans depend on the movement of all such tensors of a file.
    """

    __slots__ = ()
    name: ClassVar[str]
    is_lossy: ClassVar[bool] = True
    may_be_low_rank: ClassVar[bool] = False
    is_joint: ClassVar[bool] = False

    @property
    def prunes(self) -> bool:
        """Whether elements become zero by a share."""
        return False

    @property
    def partitions(self) -> Partitions | None:
        """Levels and shares, where the codes follow from one histogram of the values alone; else None."""
        return None

    @property
    def context_tensor(self) -> str | None:
        """Name of the tensor of the same file whose restored values the recipe looks at, or None."""
        return None

    def settings(self) -> dict[str, Setting]:
        """Give the settings that the file's record holds, by name."""
        raise NotImplementedError

    def movement(self, tensor: TensorToEncode) -> float | None:
        """Measure how far a tensor is from its base, in steps; None where it is not stored against it."""
        raise NotImplementedError

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan a tensor that is not empty."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Option:
    """One option of `ckptz compress` that sets a field of a method.

    Attributes:
        flag: as it is written, such as "--levels".
        type: int, float, or the words that there are.
        help: one sentence, with the default.
        metavar: what the help calls the value; unused for words.
        is_searched: whether a search looks for it, so that it cannot be given with one.
        is_cube: whether its value names the only cube that a search then looks through.
        name: of the field of the method, where it is not that of the flag.
        parse: what makes the field of all values, where the option may be repeated.
    """

    flag: str
    type: Any
    help: str
    metavar: str | None = None
    is_searched: bool = False
    is_cube: bool = False
    name: str | None = None
    parse: Callable[[Sequence[str]], Any] | None = None

    @property
    def keyword(self) -> str:
        """The flag as a name of Python."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def field(self) -> str:
        """The field of the method."""
        return self.name or self.keyword


@dataclass(frozen=True, slots=True)
class Method:
    """A way to make the tensors of a file smaller. Subclasses are frozen dataclasses of their settings.

    Attributes:
        name: in plans, reports and on the command line.
        is_lossy: whether tensors may come back changed.
        reads: what guides it beside the values: READ_OPTIMIZER, CALIBRATION, SENSITIVITY.
        options: of the command line.
        axes: settings that a search over a cube tries, each from the mildest to the most aggressive value.
        cube_names: of the cubes that a search can be kept to, where there are several.
        is_scalable: whether one multiplier scales all its steps, which a search turns; see `scaled`.
        fits_whole_tensors: whether the parts of a tensor that is split over ranks need one histogram.
    """

    name: ClassVar[str]
    is_lossy: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset()
    options: ClassVar[tuple[Option, ...]] = ()
    axes: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    cube_names: ClassVar[tuple[str, ...]] = ()
    is_scalable: ClassVar[bool] = False
    fits_whole_tensors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        own_numbers(self)

    @property
    def loses_state(self) -> bool:
        """Whether optimizer state may come back changed."""
        return False

    def expecting(self, restores: int, *, is_guided: bool = True) -> Self:
        """Give the method for a run that will restart so often, 1 or more, from what its files lose.

        Args:
            restores: how often.
            is_guided: whether the optimizer keeps second moments, which tell what weights are worth.
        """
        del restores, is_guided
        return self

    @property
    def least_elements(self) -> int:
        """Elements below which a tensor stays exact."""
        return 0

    def of_parts(self) -> Self:
        """Give the method for tensors that are parts of larger ones, whose own size says nothing.

        Raises:
            ConfigError: a setting needs whole tensors.
        """
        return self

    def recipe(self, role: Role, dtype: DType, shape: tuple[int, ...]) -> Recipe:
        """Choose the recipe of a tensor by itself."""
        raise NotImplementedError

    def recipes(
        self, tensors: Mapping[str, TensorSource], roles: Mapping[str, Role], trained: Collection[str] = ()
    ) -> dict[str, Recipe]:
        """Choose the recipe of each tensor of a file, by name.

        Args:
            tensors: of the file.
            roles: what each of them is.
            trained: parameters whose moments stand in another file.
        """
        del trained
        return {
            name: self.recipe(roles[name], source.dtype, source.shape) for name, source in tensors.items()
        }

    # --- what a search does with it -------------------------------------------------------------

    @classmethod
    def reference(cls) -> Self:
        """Give the settings around which a search looks, unless it is told others."""
        return cls()

    def searched(self, *, trains: bool, restarts: bool = False) -> Self:
        """Give the template of a search.

        Args:
            trains: a budget notices what becomes of optimizer state.
            restarts: training goes on from the files, which then keep on average what it has moved.
        """
        del trains, restarts
        return self

    @property
    def multiplier(self) -> float:
        """The multiplier that `scaled` was last called with."""
        raise NotImplementedError

    def scaled(self, multiplier: float) -> Self:
        """Give the settings with all steps multiplied; a larger multiplier is a smaller, worse file."""
        raise NotImplementedError

    def cubes(
        self, names: Sequence[str], layer_types: Collection[str], *, is_ranked: bool
    ) -> tuple[Cube, ...]:
        """Give the cubes that a search looks through; the receiver has all settings that are no axis.

        Args:
            names: of the cubes that are asked for; empty for all.
            layer_types: of the tensors that become lossy.
            is_ranked: sensitivities of some of them are known.
        """
        del names, layer_types, is_ranked
        return (Cube(template=self, axes=self.axes),)

    def finer(self) -> tuple[Self, ...]:
        """Give settings milder than all of the cubes, the smallest first; a search tries them last."""
        return ()

    @property
    def cube_name(self) -> str:
        """Name of the cube that these settings stand in; empty where there is one alone."""
        return ""

    def at(self, knobs: Mapping[str, Any]) -> Self:
        """Give the settings with other values along the axes of a cube, by name."""
        return replace(self, **knobs)

    def knobs(self) -> Mapping[str, Any]:
        """Give the values that these settings have along `axes`, by name."""
        return {name: getattr(self, name) for name in self.axes}

    def recorded(self, records: Sequence[LossyRecord]) -> Self | None:
        """Give the settings that a file was written with, from what it says of its lossy tensors.

        The receiver is the template: what no record tells. None if the file is of another method.
        """
        del records
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube:
    """Configurations of one method with all values along some axes; quality and size fall along each."""

    template: Method  # everything that is not a knob
    axes: Mapping[str, tuple[float, ...]]  # values along each axis, the mildest first
    name: str = ""  # where a method has several

    @property
    def points(self) -> list[Point]:
        """All points of the cube."""
        return list(itertools.product(*(range(len(values)) for values in self.axes.values())))

    def config(self, point: Point) -> Method:
        """Make the configuration of a point."""
        steps = zip(point, self.axes.items(), strict=True)
        return self.template.at({name: values[step] for step, (name, values) in steps})

    def point(self, config: Method) -> Point:
        """Find the most aggressive point that is not more so than `config` along any axis."""
        wanted = config.knobs()
        return tuple(_last(values, wanted[name]) for name, values in self.axes.items())


def _last(values: Sequence[float], wanted: float) -> int:
    """Find the last of `values`, which rise or fall, that is not beyond `wanted`; 0 if all are beyond it."""
    rises = values[-1] > values[0]
    fits = [value <= wanted if rises else value >= wanted for value in values]
    return max(sum(fits) - 1, 0)


M = TypeVar("M", bound=Method)
USUAL_RESTORES: Final = 10  # from files that lose something, that the steps of methods are made for
THRESHOLD_KEY: Final = "drawn"  # in records: the key of stochastic rounding
MIN_ELEMENTS: Final = 4096  # smaller tensors stay exact: a map and tables would outweigh what they save


def is_large_weight(
    role: Role, dtype: DType, shape: tuple[int, ...], min_elements: int = MIN_ELEMENTS
) -> bool:
    """Tell whether a tensor is a weight of two or more dimensions that a map may pay for."""
    is_weight = role.role == "weight" and dtype.name in KINDS
    return is_weight and len(shape) >= 2 and dtype.n_patterns(shape) >= min_elements


def usual_setting(records: Sequence[LossyRecord], name: str) -> Setting | None:
    """Find the value that a setting has in most records; None if none has it."""
    values = [record.settings[name] for record in records if name in record.settings]
    return Counter(values).most_common(1)[0][0] if values else None


def settings_of(method: type[M], settings: Mapping[str, Any]) -> M | None:
    """Make a configuration of recorded settings; None where they are of another version and mean nothing."""
    try:
        return msgspec.convert(settings, method)
    except (msgspec.ValidationError, ConfigError):
        return None


# --- the table of methods -----------------------------------------------------------------------

METHODS: Final[dict[str, type[Method]]] = {}  # by name; those of ckptz are in it once they are loaded


def register(method: type[M]) -> type[M]:
    """Add a method from elsewhere to the table; usable as a decorator.

    Raises:
        ConfigError: its name is taken.
    """
    if METHODS.setdefault(method.name, method) is not method:
        raise ConfigError(f"a method called {method.name!r} is registered already")
    return method


def checked(config: object) -> Method:
    """Require a configuration of a method of the table.

    Raises:
        ConfigError: it is something else, or of a method that was not registered.
    """
    if not isinstance(config, Method):
        raise ConfigError(f"config must be a configuration, ckptz.LOSSLESS or ckptz.Grid(), got {config!r}")
    if METHODS.get(config.name) is not type(config):
        raise ConfigError(f"method {config.name!r} is not registered; call ckptz.register")
    return config
