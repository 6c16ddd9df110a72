"""A run's folder without files: sizes follow a formula, bases and deletions those of `ckptz.run`."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ckptz import KeepPolicy
from ckptz.format.index import BaseRef
from ckptz.run.chain import N_REMEMBERED, base_of_next, files_of_kind
from ckptz.run.prune import decide, item_of
from ckptz.run.step_files import METRIC_KEY, POSITION_KEY, ChainRule, FileFacts, FileKind, Listing, StepFile

PLAIN: Final = 10_000  # bytes of an uncompressed file
KIND: Final[FileKind] = "weights"


@dataclass(frozen=True, slots=True)
class Case:
    """A run: its keep rule, the sizes of its files, and the number of saves.

    Attributes:
        keep: arguments of `KeepPolicy`.
        full: size of a full file, as a share of a plain file.
        delta: size of a delta against the previous save, as a share of a full file.
        growth: additional share of a delta for every doubling of its distance.
        jump: number of the save from which on deltas are three times as large; None for never.
        n_saves: number of saves.
        rule: the chain rule that the user asks for.
        seed: seed of the metrics and of the variation of sizes.
    """

    keep: dict[str, Any]
    full: float
    delta: float
    growth: float
    jump: int | None
    n_saves: int
    rule: ChainRule
    seed: int

    def n_bytes(self, save: int, distance: int, rng: random.Random) -> int:
        """Return the size of a file whose base is `distance` saves older, 0 for a full file."""
        if distance == 0:
            return round(PLAIN * self.full)
        delta = self.delta if self.jump is None or save < self.jump else 3 * self.delta
        share = min(1.0, delta + self.growth * math.log2(distance)) * rng.uniform(0.97, 1.0)
        return round(PLAIN * self.full * share)


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes on disk and of plain files at a moment of a run, before or after a deletion."""

    taken: int
    plain: int


KEEPS: Final[tuple[dict[str, Any], ...]] = (
    *({"last": n} for n in (1, 2, 3, 5, 10, 20, None)),
    *({"last": 1, "every": 50}, {"last": 3, "every": 30}, {"last": 3, "every": 70}),
    *({"last": 1, "best": 1}, {"last": 2, "best": 2}, {"last": 5, "best": 3}),
    {"last": 3, "best": 1, "every": 100},
)


def cases(n: int) -> Iterator[Case]:
    """Yield the same cases at every call, with each keep rule equally often."""
    rng = random.Random(1)
    for seed in range(n):
        yield Case(
            keep=KEEPS[seed % len(KEEPS)],
            full=rng.choice([1.0, 0.95, 0.82, 0.5, 0.2, 0.1]),
            delta=rng.choice([0.02, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99]),
            growth=rng.choice([0.0, 0.01, 0.03, 0.1]),
            jump=rng.choice([None, 5, 10]),
            n_saves=rng.choice([6, 10, 24]),
            rule=ChainRule(rng.choice([4, 16, 16, 32]), rng.random() < 0.5),
            seed=seed,
        )


def moments(case: Case, forced_rule: ChainRule | None = None) -> list[Moment]:
    """Simulate a run that saves every ten steps; `forced_rule` is followed without a choice of policy."""
    policy, rng = KeepPolicy(**case.keep), random.Random(case.seed)
    rule = case.rule if forced_rule is None else forced_rule
    sizes: dict[StepFile, int] = {}
    facts: dict[StepFile, FileFacts] = {}
    hidden: frozenset[StepFile] = frozenset()
    written: list[tuple[int, int]] = []
    history = []
    for save in range(1, case.n_saves + 1):
        step, base, position = 10 * save, None, 0
        listing = Listing(dict(sizes), hidden, ())
        if steps := listing.steps_of(KIND):
            files = files_of_kind(KIND, policy.by_kind[KIND], listing, facts)
            kept_long = None if forced_rule else policy.by_kind[KIND]
            base = base_of_next(files, rule, kept_long, steps, (written, PLAIN, 0))
            position = 0 if base is None else files[StepFile(steps[-1], KIND)].position + 1
        distance = 0 if base is None else position - facts[base].position
        n_bytes = case.n_bytes(save, distance, rng)
        written = [*written, (distance, n_bytes)][-N_REMEMBERED:]
        for file, size, against in (
            (StepFile(step, KIND), n_bytes, base),
            (StepFile(step, "state"), 0, None),
        ):
            ref = None if against is None else BaseRef(against.name, against.name, 1)
            metadata = {POSITION_KEY: str(position)}
            metadata |= {METRIC_KEY: repr(rng.random())} if "best" in case.keep else {}
            sizes[file] = size
            facts[file] = FileFacts(file.name, ref, step, metadata, 0, PLAIN)
        history.append(_moment(sizes, hidden))
        items = {f: item_of(f, size, facts[f], is_hidden=f in hidden) for f, size in sizes.items()}
        _, needed, removed, _ = decide("", [*items.values()], policy)
        hidden = frozenset(file for file in sizes if items[file] in needed)
        sizes = {file: size for file, size in sizes.items() if items[file] not in removed}
        facts = {file: facts[file] for file in sizes}
        history.append(_moment(sizes, hidden))
    return history


def _moment(sizes: dict[StepFile, int], hidden: frozenset[StepFile]) -> Moment:
    seen = [file for file in sizes if file.kind == KIND and file not in hidden]
    return Moment(sum(sizes.values()), PLAIN * len(seen))
