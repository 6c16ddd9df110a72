"""200 random runs of publishing, dropping, restarting and folding: no bit is ever wrong."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptz import compress
from ckptz.errors import MissingBaseError
from ckptz.run.versions import Version, versions_in
from ckptz.sync import Follower, Publisher
from ckptz.torch import apply_, load_file
from tests.support.sync_support import State, cloned, moved, same

N_ACTIONS = 9
SHARES = (0.0, 0.01, 0.01, 0.1, 0.4, 1.0)  # sparse, dense, and both in one file


def small_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(600, generator=generator)
    return {
        "w.bf16": raw.bfloat16().reshape(30, 20),
        "w.f32": raw[:250].clone(),
        "counts": torch.arange(40),
        "frozen": torch.ones(64, dtype=torch.float16),
    }


class Engine:
    """Inference engine: tensors, and the follower that updates them."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.tensors = small_state(rng.randrange(100))
        self.restart()

    def restart(self) -> None:
        check = self.rng.choice(["base", "stored"])
        self.follower = Follower(self.folder, check=check, jobs=1)


class World:
    """Folder, publisher and engines, with every published state."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.run = folder, folder / "run"
        self.published: dict[int, State] = {}
        self.state = small_state(seed)
        self.restart_publisher()
        self.engines = [Engine(self.run, self.rng) for _ in range(2)]

    def files(self) -> list[Version]:
        return versions_in({path.name: path.stat().st_size for path in self.run.glob("*.ckptz")})

    # --- events ------------------------------------------------------------------------

    def publish(self) -> None:
        self.state = moved(self.state, self.rng.randrange(1 << 30), self.rng.choice(SHARES))
        step = max(self.published, default=-1) + self.rng.choice([1, 1, 1, 3])
        self.publisher.publish(self.state, step)
        self.published[step] = cloned(self.state)

    def drop(self) -> None:
        if files := self.files():
            (self.run / self.rng.choice(files).name).unlink()

    def restart_publisher(self) -> None:
        options = {"full_every": self.rng.randint(1, 5), "keep_full": self.rng.choice([1, 2, None])}
        self.publisher = Publisher(self.run, smallest=self.rng.random() < 0.3, jobs=1, **options)

    def restart_engine(self) -> None:
        engine = self.rng.choice(self.engines)
        if self.rng.random() < 0.3:  # it was killed while it wrote
            engine.tensors["w.bf16"].view(torch.int16).view(-1)[: self.rng.randrange(1, 600)] ^= 2
        engine.restart()

    def follow(self) -> None:
        self.check_follow(self.rng.choice(self.engines))

    def fold(self) -> None:
        files = self.files()
        if len(files) < 2:
            return
        first, last = sorted(self.rng.sample(files, 2), key=lambda v: v.step)
        folded = Version(last.step, first.step)
        target = self.run / folded.name
        if first.step == last.step or target.exists():
            return
        try:
            base = self.run / first.name
            compress(self.run / last.name, self.folder / "folded.ckptz", base=base, jobs=1)
        except MissingBaseError:
            return  # the chain of one of them was dropped
        (self.folder / "folded.ckptz").rename(target)
        live = cloned(self.published[first.step])
        apply_(live, target)
        assert same(live, self.published[last.step])

    # --- invariants -------------------------------------------------------------------------

    def check_follow(self, engine: Engine) -> None:
        before = cloned(engine.tensors)
        try:
            step = engine.follower.apply_to(engine.tensors).step
        except MissingBaseError:
            reached = engine.follower.step  # as far as the files lead
            expected = before if reached is None else self.published[reached]
            assert same(engine.tensors, expected)
        else:
            assert step == max((version.step for version in self.files()), default=step)
            assert same(engine.tensors, self.published[step])

    def check_files(self) -> None:
        for version in self.files():
            try:
                tensors = load_file(self.run / version.name, jobs=1)
            except MissingBaseError:
                continue
            assert same(tensors, self.published[version.step])

    def check_recovery(self) -> None:
        self.publisher = Publisher(self.run, full_every=1, jobs=1)
        self.publish()
        for engine in self.engines:
            assert engine.follower.apply_to(engine.tensors).step == max(self.published)
            assert same(engine.tensors, self.state)


QUICK = range(40)


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 400))]
)
def test_every_engine_has_the_bits_of_the_step_that_it_reports(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    actions: list[tuple[Callable[[], None], int]] = [
        (world.publish, 5),
        (world.follow, 4),
        (world.drop, 1),
        (world.fold, 2),
        (world.restart_publisher, 1),
        (world.restart_engine, 1),
    ]
    chosen = world.rng.choices([a for a, _ in actions], [weight for _, weight in actions], k=N_ACTIONS)
    for action in (world.publish, *chosen):
        action()
    world.check_files()
    world.check_recovery()


def test_the_states_of_the_random_runs_differ() -> None:
    states = [moved(small_state(0), seed, 0.1) for seed in range(3)]
    assert not same(states[0], states[1])
    assert not same(states[1], states[2])
    assert np.count_nonzero(states[0]["frozen"] != 1) == 0
