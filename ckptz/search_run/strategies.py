"""The way that one search goes: strategies for the method that it is for, and predicted sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptz.container.frame_writer import matching_base
from ckptz.encoding.draft import MapFunction, Subject
from ckptz.encoding.guide import NO_GUIDE
from ckptz.errors import ConfigError
from ckptz.methods.method import Cube, Method
from ckptz.pipeline import Job, Prepared
from ckptz.search.guided import Exhaustive, Guided, Neighbourhood
from ckptz.search.one_knob import CLOSE_LATER, MAX_LATER, OneKnob
from ckptz.search.rate import SizeModel
from ckptz.search.trials import Predict, Strategy
from ckptz.search_run.options import SearchOptions
from ckptz.search_run.plans import recorded_in
from ckptz.search_run.quality import is_of_training


def searched_template(options: SearchOptions) -> Method:
    """Give the template of a search, as its budgets need it."""
    return options.template.searched(trains=any(map(is_of_training, options.budgets)))


def parent_config(options: SearchOptions, job: Job) -> Method | None:
    """Give what the user says, or what the checkpoint before was written with, if by the same method."""
    template = searched_template(options)
    parent = options.parent if options.parent is not None else recorded_in(job.bases, template)
    if parent is None or not template.is_scalable:
        return parent
    return template.scaled(parent.multiplier)


# Strategies, one after another; sizes of configurations before they are tried, if these need them; how many.
Route = tuple[Sequence[Strategy], Predict | None, int]


def route_of(options: SearchOptions, ready: Prepared, run: MapFunction) -> Route:
    """Find the strategies for the options of a search; `run` maps a function over tensors.

    Raises:
        ConfigError: the strategy needs a parent, and there is none.
    """
    template, parent = searched_template(options), parent_config(options, ready.job)
    if template.is_scalable:
        first = OneKnob(template=template)
        if parent is None:
            return [first], None, 0
        # Where the parent's multiplier leads nowhere near, the search goes on as if it were the first.
        first = replace(first, start=parent.multiplier)
        return [replace(first, most=MAX_LATER, close=CLOSE_LATER), first], None, 0
    lossy = ready.lossy(template)
    guides = [ready.guides[name] for name in lossy if name in ready.guides]
    is_ranked = any(guide.gradient or guide.second_moment for guide in guides)
    layer_types = {ready.roles[name].layer_type for name in lossy}
    cubes = template.cubes(options.cubes, layer_types, is_ranked=is_ranked)
    subjects = {}
    for name, tensor in ready.job.tensors.items():
        base = matching_base(tensor, ready.job.bases.get(name))
        subjects[name] = Subject(tensor, base, ready.guides.get(name, NO_GUIDE))
    configs = list(dict.fromkeys(cube.config(point) for cube in cubes for point in cube.points))
    predict = SizeModel(subjects, ready.roles, configs, run)
    return _cube_stages(options.strategy, parent, cubes, predict), predict, len(configs)


def _cube_stages(
    strategy: str, parent: Method | None, cubes: Sequence[Cube], predict: Predict
) -> list[Strategy]:
    if strategy == "exhaustive":
        return [Exhaustive(cubes=cubes, predict=predict)]
    guided = Guided(cubes=cubes, predict=predict)
    if strategy != "guided" and parent is not None:
        return [Neighbourhood(parent=parent, cubes=cubes, predict=predict), guided]
    if strategy == "neighbourhood":
        raise ConfigError("strategy neighbourhood begins at settings of a base or a plan, and there are none")
    return [guided]
