"""A folder of steps without files: sizes by a formula, all else as `StepStore` and `prune` decide it."""

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

PLAIN: Final = 10_000  # bytes of a whole file, uncompressed
KIND: Final[FileKind] = "weights"


@dataclass(frozen=True, slots=True)
class Case:
    """A run: how files are kept, how large they are, and how often they are saved.

    Attributes:
        keep: arguments of `KeepPolicy`.
        full file: size of a full file, as a share of a plain file.
        delta: of a delta against the save before, as a share of a full file.
        growth: of a delta for every doubling of its distance, the same.
        jump: from this save on deltas are three times as large; None for never.
        n_saves: saves.
        rule: what is asked for.
        seed: of the metrics and of what varies.
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
        """Give the size of a file that reaches so many saves back, 0 for a full file."""
        if distance == 0:
            return round(PLAIN * self.full)
        delta = self.delta if self.jump is None or save < self.jump else 3 * self.delta
        share = min(1.0, delta + self.growth * math.log2(distance)) * rng.uniform(0.97, 1.0)
        return round(PLAIN * self.full * share)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a run, before or after old files were removed: bytes on disk, and those of plain files."""

    taken: int
    plain: int


KEEPS: Final[tuple[dict[str, Any], ...]] = (
    *({"last": n} for n in (1, 2, 3, 5, 10, 20, None)),
    *({"last": 1, "every": 50}, {"last": 3, "every": 30}, {"last": 3, "every": 70}),
    *({"last": 1, "best": 1}, {"last": 2, "best": 2}, {"last": 5, "best": 3}),
    {"last": 3, "best": 1, "every": 100},
)


def cases(n: int) -> Iterator[Case]:
    """Draw cases, the same at every call; every keep rule comes as often."""
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


def moments(case: Case, asked: ChainRule | None = None) -> list[Moment]:
    """Play a case through, a step every ten; `asked` is a rule that is followed as it is."""
    policy, rng = KeepPolicy(**case.keep), random.Random(case.seed)
    rule = case.rule if asked is None else asked
    sizes: dict[StepFile, int] = {}
    facts: dict[StepFile, FileFacts] = {}
    hidden: frozenset[StepFile] = frozenset()
    written: list[tuple[int, int]] = []
    found = []
    for save in range(1, case.n_saves + 1):
        step, base, position = 10 * save, None, 0
        listing = Listing(dict(sizes), hidden, ())
        if steps := listing.steps_of(KIND):
            files = files_of_kind(KIND, policy.by_kind[KIND], listing, facts)
            kept_long = None if asked else policy.by_kind[KIND]
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
        found.append(_moment(sizes, hidden))
        items = {f: item_of(f, size, facts[f], is_hidden=f in hidden) for f, size in sizes.items()}
        _, needed, removed, _ = decide("", [*items.values()], policy)
        hidden = frozenset(file for file in sizes if items[file] in needed)
        sizes = {file: size for file, size in sizes.items() if items[file] not in removed}
        facts = {file: facts[file] for file in sizes}
        found.append(_moment(sizes, hidden))
    return found


def _moment(sizes: dict[StepFile, int], hidden: frozenset[StepFile]) -> Moment:
    seen = [file for file in sizes if file.kind == KIND and file not in hidden]
    return Moment(sum(sizes.values()), PLAIN * len(seen))
