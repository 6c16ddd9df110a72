"""Which strategies a search runs, by the method whose settings it looks for.

Grids have one knob, their multiplier. The settings of k-means maps are a cube, and their sizes are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from ckptz.codec.choices import choose_all
from ckptz.codec.planner import MapFunction
from ckptz.codec.units import UnitSource
from ckptz.config import Config, Grid, KMeans
from ckptz.container.contents import Contents
from ckptz.container.frame_writer import matching_base
from ckptz.convert.plans import parent_of, step_of
from ckptz.convert.quality import is_of_training
from ckptz.errors import ConfigError
from ckptz.roles import Role
from ckptz.search.guided import Exhaustive, Guided
from ckptz.search.neighbourhood import Neighbourhood
from ckptz.search.one_knob import CLOSE_LATER, MAX_LATER, OneKnob, grid_at
from ckptz.search.rate import SizeModel, Sources
from ckptz.search.space import Cube
from ckptz.search.trials import Predict, Strategy

if TYPE_CHECKING:
    from ckptz.convert.search_options import SearchOptions

REFERENCE: Final = Grid()  # what a search is for, unless a template says otherwise
StrategyName = Literal["auto", "one-knob", "guided", "neighbourhood", "exhaustive"]
STRATEGIES: Final[Mapping[str, tuple[StrategyName, ...]]] = {
    "grid": ("auto", "one-knob"),
    "kmeans": ("auto", "guided", "neighbourhood", "exhaustive"),
}


def method_name(config: KMeans | Grid) -> str:
    """What a method is called in plans and reports."""
    return "grid" if isinstance(config, Grid) else "kmeans"


def check_strategy(strategy: str, template: KMeans | Grid, parent: KMeans | Grid | None) -> None:
    """Refuse what belongs to another method.

    Raises:
        ConfigError: names it.
    """
    method = method_name(template)
    if strategy not in STRATEGIES[method]:
        known = ", ".join(STRATEGIES[method])
        raise ConfigError(f"the strategy of {method} must be one of {known}, got {strategy!r}")
    if parent is not None and method_name(parent) != method:
        raise ConfigError(f"a search for {method} cannot begin at settings of {method_name(parent)}")


def searched_template(options: SearchOptions) -> KMeans | Grid:
    """The template of a search: moments stay exact where no budget would notice what becomes of them."""
    template = options.template
    if isinstance(template, Grid) and not any(map(is_of_training, options.budgets)):
        return replace(template, moments=None)
    return template


def parent_config(options: SearchOptions, contents: Contents) -> Config | None:
    """What the user says, or the checkpoint before was written with, if by the same method."""
    template = searched_template(options)
    if isinstance(template, KMeans):
        return options.parent if options.parent is not None else parent_of(contents.bases)
    step = options.parent.step if isinstance(options.parent, Grid) else step_of(contents.bases)
    return None if step is None else grid_at(template, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a search goes.

    Attributes:
        stages: strategies, one after another.
        predict: sizes of configurations before they are tried, if the strategies need them.
        n_predicted: configurations that it was prepared for.
    """

    stages: Sequence[Strategy]
    predict: Predict | None = None
    n_predicted: int = 0


def route_of(
    options: SearchOptions,
    tensors: Mapping[str, UnitSource],
    roles: Mapping[str, Role],
    contents: Contents,
    run: MapFunction,
) -> Route:
    """The strategies for the options.

    Args:
        options: of the search.
        tensors: the exact ones, by name.
        roles: of each of them.
        contents: bases and guides.
        run: maps a function over tensors.

    Raises:
        ConfigError: the strategy needs a parent, and there is none.
    """
    template, parent = searched_template(options), parent_config(options, contents)
    if isinstance(template, Grid):
        return Route(stages=_knob_stages(template, parent))
    cubes = _cubes(template, options.prune_metrics, tensors, roles, contents)
    predict, n_predicted = _size_model(tensors, roles, contents, cubes, run)
    stages = _cube_stages(options.strategy, parent, cubes, predict)
    return Route(stages=stages, predict=predict, n_predicted=n_predicted)


def _knob_stages(template: Grid, parent: Config | None) -> list[Strategy]:
    if not isinstance(parent, Grid):
        return [OneKnob(template=template)]
    # Where the parent's multiplier leads nowhere near, the search goes on as if it were the first.
    later = OneKnob(template=template, start=parent.step, most=MAX_LATER, close=CLOSE_LATER)
    return [later, OneKnob(template=template, start=parent.step)]


def _cubes(
    template: KMeans,
    prune_metrics: Sequence[str],
    tensors: Mapping[str, UnitSource],
    roles: Mapping[str, Role],
    contents: Contents,
) -> tuple[Cube, ...]:
    lossy = [n for n, choice in choose_all(template, tensors, roles).items() if choice.method]
    guides = [contents.guides[name] for name in lossy if name in contents.guides]
    is_ranked = any(guide.gradient or guide.second_moment for guide in guides)
    template = template if is_ranked else replace(template, protect_by="magnitude")
    has_embeddings = any(roles[name].layer_type == "embedding" for name in lossy)
    metrics = [m for m in prune_metrics if is_ranked or m == "magnitude"] or ["magnitude"]
    return tuple(Cube(template=template, prune_by=m, has_embeddings=has_embeddings) for m in metrics)


def _size_model(
    tensors: Mapping[str, UnitSource],
    roles: Mapping[str, Role],
    contents: Contents,
    cubes: Sequence[Cube],
    run: MapFunction,
) -> tuple[Predict, int]:
    """Predicts sizes, and how many configurations it was prepared for."""
    sources = {}
    for name, tensor in tensors.items():
        base = matching_base(tensor, contents.bases.get(name))
        guide = contents.guides.get(name)
        sources[name] = Sources(tensor, base, roles[name], *([guide] if guide else []))
    configs = list(dict.fromkeys(cube.config(point) for cube in cubes for point in cube.points))
    return SizeModel(sources, configs, run), len(configs)


def _cube_stages(
    strategy: str, parent: Config | None, cubes: Sequence[Cube], predict: Predict
) -> list[Strategy]:
    if strategy == "exhaustive":
        return [Exhaustive(cubes=cubes, predict=predict)]
    guided = Guided(cubes=cubes, predict=predict)
    if strategy == "guided":
        return [guided]
    if isinstance(parent, KMeans):
        return [Neighbourhood(parent=parent, cubes=cubes, predict=predict), guided]
    if strategy == "neighbourhood":
        raise ConfigError("the neighbourhood of no configuration: neither a base nor a plan records one")
    return [guided]
