"""Interface of a method: the user's settings, and for each tensor a recipe that plans its frame.

A method is a frozen dataclass that checks its settings, in its own module, registered in
`ckptz.codec.registry`. `ckptz.search.spaces` defines which of its settings a search varies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Self, TypeVar

from ckptz.codec.tensor import TensorToEncode
from ckptz.codec.tensor_plan import TensorPlan
from ckptz.errors import ConfigError, coerce_numeric_fields
from ckptz.format.dtypes import DType
from ckptz.format.sources import TensorSource
from ckptz.format.values import FLOAT_KINDS
from ckptz.state.roles import Role

if TYPE_CHECKING:
    from ckptz.codec.chunk import Encoded
    from ckptz.codec.effort import Effort
    from ckptz.codec.partitions import Partitions

Setting = int | float | bool | str
MOMENT_ROLES: Final = ("exp_avg", "exp_avg_sq", "factor", "momentum")
# Kinds of side information that a method may use.
MOMENTS_FROM, CALIBRATION, SENSITIVITY = "moments_from", "calibration", "sensitivity"


class Recipe:
    """The settings that a method has chosen for one tensor. Frozen; equal recipes write equal frames.

    Attributes:
        name: name of the method in the file's record of the tensor.
        is_lossy: whether the restored tensor may differ.
        may_be_low_rank: whether the tensor may be stored as a sum of outer products if its update scale is
            known (`SideInformation.update_scale`).
        may_have_products: whether the tensor may be stored with contexts by products.
        is_joint: whether plans depend on the mean `movement` of all tensors of the file with such a recipe.
        is_batched: whether tensors of one chunk are encoded with `plan_and_encode`, in batches if they are
            small.
        partitions: levels and shares if the codes depend on a histogram of the values only; else None.
        context_tensor: name of the tensor of the same file on whose restored values the contexts depend, or
            None.
    """

    __slots__ = ()
    name: ClassVar[str]
    is_lossy: ClassVar[bool] = True
    may_be_low_rank: ClassVar[bool] = False
    may_have_products: ClassVar[bool] = False
    is_joint: ClassVar[bool] = False
    is_batched: ClassVar[bool] = False
    partitions: Partitions | None = None
    context_tensor: str | None = None

    def settings(self) -> dict[str, Setting]:
        """Return the settings for the file's record, by name."""
        return {}

    def movement(self, tensor: TensorToEncode) -> float | None:
        """Return the mean distance of elements from the base in steps, clipped to 1; None without base."""
        raise NotImplementedError

    def plan(self, tensor: TensorToEncode) -> TensorPlan:
        """Plan the frame of a non-empty tensor."""
        raise NotImplementedError

    def plan_and_encode(
        self, sources: Sequence[TensorSource], bases: Sequence[TensorSource], effort: Effort
    ) -> list[Encoded]:
        """Plan and encode tensors of the same dtype with one chunk each; all or none have a base."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Method:
    """A compression method. Subclasses are frozen dataclasses of settings and implement `recipe`.

    Attributes:
        name: name in files, plans, reports and on the command line.
        is_lossy: whether restored tensors may differ.
        reads: kinds of side information it uses: MOMENTS_FROM, CALIBRATION, SENSITIVITY.
        fits_whole_tensors: whether the shards of a tensor need a common histogram.
    """

    name: ClassVar[str]
    is_lossy: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset()
    fits_whole_tensors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        coerce_numeric_fields(self)

    def recipe(self, role: Role, dtype: DType, shape: tuple[int, ...]) -> Recipe:
        """Return the recipe of one tensor."""
        raise NotImplementedError

    def recipes(
        self, tensors: Mapping[str, TensorSource], roles: Mapping[str, Role], trained: Collection[str] = ()
    ) -> dict[str, Recipe]:
        """Return the recipe of each tensor of a file, by name.

        Args:
            tensors: the tensors of the file.
            roles: the role of each tensor.
            trained: parameters whose moments are in another file.
        """
        del trained
        return {
            name: self.recipe(roles[name], source.dtype, source.shape) for name, source in tensors.items()
        }

    @property
    def loses_state(self) -> bool:
        """True if restored optimizer state may differ."""
        return False

    @property
    def least_elements(self) -> int:
        """Number of elements below which a tensor stays lossless."""
        return 0

    def for_restarts(self, n: int, *, is_guided: bool = True, late_factor: float = 1.0) -> Self:
        """Return the settings for a run that restarts `n` times (at least 1) from its lossy files.

        Args:
            n: the expected number of restarts.
            is_guided: whether the optimizer has second moments, which measure sensitivity.
            late_factor: factor of the steps of weights, below 1 near the end of training, when little
                training is left to correct errors.
        """
        del n, is_guided, late_factor
        return self

    def for_shards(self) -> Self:
        """Return the settings for shards, from whose sizes the sizes of their tensors do not follow.

        Raises:
            ConfigError: a setting needs complete tensors.
        """
        return self


M = TypeVar("M", bound=Method)
USUAL_RESTORES: Final = 10  # number of restarts from lossy files that the default steps are chosen for
MIN_ELEMENTS: Final = 4096  # smaller tensors stay lossless: map and tables would take more than they save


def is_large_weight(
    role: Role, dtype: DType, shape: tuple[int, ...], min_elements: int = MIN_ELEMENTS
) -> bool:
    """Return whether a tensor is a floating-point weight of two or more dimensions and enough elements."""
    is_weight = role.role == "weight" and dtype.name in FLOAT_KINDS
    return is_weight and len(shape) >= 2 and dtype.n_patterns(shape) >= min_elements


METHODS: Final[dict[str, type[Method]]] = {}  # by name; `ckptz.codec.registry` registers the built-in ones


def register(method: type[M]) -> type[M]:
    """Register a method; usable as a decorator.

    Raises:
        ConfigError: another method has the same name.
    """
    if METHODS.setdefault(method.name, method) is not method:
        raise ConfigError(f"a method called {method.name!r} is registered already")
    return method


def checked(config: object) -> Method:
    """Return `config` if it is the configuration of a registered method.

    Raises:
        ConfigError: it is not, or its method is not registered.
    """
    if not isinstance(config, Method):
        raise ConfigError(f"config must be a configuration, ckptz.LOSSLESS or ckptz.Grid(), got {config!r}")
    if METHODS.get(config.name) is not type(config):
        raise ConfigError(f"method {config.name!r} is not registered; call ckptz.register")
    return config
