"""A program that Ctrl-C meets at random times: FOLDER SEED DOOR=N_SIGNALS... Prints its counts as JSON.

Each round makes one call of a door under a timer whose signal is handled as Ctrl-C is, and then one without,
whose values are compared. Ends with tracebacks and code 1 where a call takes ten seconds.
"""

import faulthandler
import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from safetensors.torch import save_file as save_plain

from ckptz import Budget, Checkpointer, Grid, compress, warm_up
from ckptz.format.suffixes import TEMPORARY_SUFFIX
from ckptz.search.budget import SearchOptions
from ckptz.sync import Follower, Publisher
from ckptz.torch import load_file, save_file

PATIENCE = 10.0
ARMED = list[bool]()  # whether a signal is an interrupt
PLACE = list[str]()  # where the last one came
N, WIDTH = 6, 1 << 14  # tensors, and elements of each
N_WARM = 5  # calls before the first signal, which import what they need


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(WIDTH, generator=generator) for i in range(N)}
    return {name: tensor + step for name, tensor in tensors.items()}


def is_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Load:
    def __init__(self, folder: Path) -> None:
        self.path, self.expected = folder / "model.ckptz", state(0)
        save_file(self.expected, self.path)

    def call(self, round_: int) -> None:
        assert is_same(load_file(self.path, jobs=2), self.expected)

    check = call


class Save:
    def __init__(self, folder: Path) -> None:
        self.path, self.states = folder / "saved.ckptz", [state(0), state(1)]

    def call(self, round_: int) -> None:
        save_file(self.states[round_ % 2], self.path, jobs=2)

    def check(self, round_: int) -> None:
        read = load_file(self.path, jobs=2)  # a complete file, either the old or the new one
        assert any(is_same(read, state) for state in self.states)


class Restore:
    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Linear(512, 512)
        self.checkpointer = Checkpointer(folder, self.model, jobs=2)
        self.step = 0

    def call(self, round_: int) -> None:
        self.step += 1
        with torch.no_grad():
            self.model.weight.fill_(self.step)
        self.checkpointer.save(self.step)
        self.checkpointer.restore_latest()

    def check(self, round_: int) -> None:
        self.checkpointer.wait()
        step = self.checkpointer.restore_latest()
        assert step is None or (self.model.weight == step).all(), step


class Follow:
    def __init__(self, folder: Path, check: str) -> None:
        self.publisher, self.follower = Publisher(folder, jobs=2), Follower(folder, check=check, jobs=2)
        self.live, self.trained = {name: torch.zeros(WIDTH) for name in state(0)}, state(0)
        self.step = 0

    def call(self, round_: int) -> None:
        self.step += 1
        for tensor in self.trained.values():  # one delta that is applied twice is not the same
            tensor[self.step % WIDTH] += 1
        self.publisher.publish(self.trained, step=self.step)
        self.follower.apply_to(self.live)

    def check(self, round_: int) -> None:
        self.call(round_)
        assert is_same(self.live, self.trained)


class Search:
    def __init__(self, folder: Path) -> None:
        self.exact = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
        self.plain, self.path = folder / "model.safetensors", folder / "model.ckptz"
        save_plain({"head.weight": self.exact}, self.plain)

    def loss(self, state: dict[str, torch.Tensor]) -> float:
        return 2 + float((state["head.weight"] - self.exact).square().mean() / self.exact.square().mean())

    def call(self, round_: int) -> None:
        options = SearchOptions(budgets=(Budget(self.loss, 0.01),), template=Grid(), max_evaluations=3)
        (report,) = compress(self.plain, self.path, search=options, jobs=2, force=True)
        assert report.search is not None
        if report.search.is_interrupted:  # it has written the best file until then
            raise KeyboardInterrupt

    def check(self, round_: int) -> None:
        assert self.loss(load_file(self.path, jobs=2)) <= 2 * 1.01


DOORS = {
    "load": Load,
    "save": Save,
    "restore": Restore,
    "follow": partial(Follow, check="base"),
    "follow-stored": partial(Follow, check="stored"),
    "search": Search,
}


def interrupted(call: Callable[[int], None], round_: int, delay: float) -> tuple[bool, bool]:
    """Send a signal during a call after a delay; return whether it arrived, and whether it was swallowed."""
    try:
        ARMED.append(True)
        signal.setitimer(signal.ITIMER_REAL, delay)
        call(round_)
        if not ARMED:
            time.sleep(1)  # what came in `__del__` is raised again
            print("swallowed:", *PLACE, file=sys.stderr)
            return True, True
    except KeyboardInterrupt:
        return True, False
    finally:
        ARMED.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False, False


def interrupt(number: int, frame: FrameType | None) -> None:
    if ARMED:  # another thread may get the signal of a timer that is over
        ARMED.clear()
        PLACE[:] = traceback.format_stack(frame, 6)
        raise KeyboardInterrupt


def seconds_of(call: Callable[[int], None], round_: int) -> float:
    begin = time.monotonic()
    call(round_)
    return time.monotonic() - begin


def storm(door: str, folder: Path, n_signals: int, rng: random.Random) -> dict[str, int | float]:
    folder.mkdir(parents=True)
    operation, n, n_swallowed, slowest = DOORS[door](folder), 0, 0, 0.0
    longest = [seconds_of(operation.call, round_) for round_ in range(N_WARM)][-1]
    operation.check(N_WARM - 1)
    round_ = N_WARM
    while n < n_signals:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        begin = time.monotonic()
        came, swallowed = interrupted(operation.call, round_, max(rng.uniform(0, 1.1 * longest), 1e-6))
        seconds = time.monotonic() - begin - swallowed
        n, n_swallowed, slowest = n + came, n_swallowed + swallowed, max(slowest, seconds)
        if not came:
            longest = seconds
        operation.check(round_)
        round_ += 1
    faulthandler.cancel_dump_traceback_later()
    left = [path for path in folder.rglob("*") if path.name.endswith(TEMPORARY_SUFFIX)]
    counts = {"signals": n, "rounds": round_, "swallowed": n_swallowed}
    return counts | {"slowest": round(slowest, 3), "temporary": len(left)}


if __name__ == "__main__":
    where, seed, *doors = sys.argv[1:]
    torch.set_num_threads(1)
    warm_up(jobs=1)  # because compiling may take longer than the limit of a call
    signal.signal(signal.SIGALRM, interrupt)
    counts = [(door, int(n)) for door, n in (text.split("=") for text in doors)]
    print(json.dumps({d: storm(d, Path(where, d), n, random.Random(seed)) for d, n in counts}))
