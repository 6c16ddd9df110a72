"""Kill jobs in the middle of their work, at times that follow their progress instead of the clock."""

import mmap
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.checkpointer_support import in_child

LONGEST: Final = 60.0  # seconds after which a process has certainly ended
CALLS: Final = ("replace", "link", "mkdir", "fsync", "unlink")  # calls that change a folder, or precede one
PATIENCE: Final = 600.0  # seconds for the progress of a job on a busy machine


def let_run(pid: int, seconds: float) -> None:
    """Wait until a process has used more CPU seconds; without /proc/self/schedstat, wait by the clock."""
    if not Path("/proc/self/schedstat").exists():
        time.sleep(seconds)
        return
    begin, last = _cpu_seconds(pid), time.monotonic() + LONGEST
    while _cpu_seconds(pid) < begin + seconds and time.monotonic() < last:
        time.sleep(0.0005)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
    return total / 1e9


class Reported:
    """Shared memory that outlives jobs: the last step reported as saved, and the number of jobs begun."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    def _get(self, at: int) -> int:
        return int.from_bytes(self._memory[at : at + 8], "little")

    @property
    def step(self) -> int:
        return self._get(0)

    @step.setter
    def step(self, value: int) -> None:
        self._memory[:8] = value.to_bytes(8, "little")

    @property
    def n_begun(self) -> int:
        return self._get(8)

    def begin(self) -> None:
        self._memory[8:] = (self.n_begun + 1).to_bytes(8, "little")


Job = Callable[[Reported, int], object]


def forked(job: Job, reported: Reported, rank: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)  # a fork does not copy the threads of its parent
            job(reported, rank)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def kill_again_and_again(
    job: Job, check: Callable[[int], None], n_kills: int, longest: float, n_ranks: int = 1
) -> None:
    """Start an endless job, let it save up to two steps, kill it during the next one, check, and repeat.

    Args:
        job: resumes from what the folder has and saves step after step; gets the shared memory and its rank.
        check: called with the last reported step.
        n_kills: number of repetitions.
        longest: maximum number of seconds before a kill.
        n_ranks: number of processes of the job; they are killed shortly after each other.
    """
    rng, reported = random.Random(0), Reported()
    steps = set()
    for number in range(1, n_kills + 1):
        end, goal = time.monotonic() + PATIENCE, reported.step + rng.randrange(3)
        children = [forked(job, reported, rank) for rank in range(n_ranks)]
        while (reported.n_begun < number or reported.step < goal) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, longest))
        rng.shuffle(children)
        for child in children:
            os.kill(child, signal.SIGKILL)
            time.sleep(rng.choice([0, 0.01]) if n_ranks > 1 else 0)
        codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
        assert codes == {-signal.SIGKILL}, "the job ended before it was killed"
        assert reported.step >= goal, "the job did not save the expected steps in time"
        steps.add(reported.step)
        check(reported.step)
    assert len(steps) > n_kills // 2


def killed_after(n_calls: int, work: Callable[[], object]) -> bool:
    """Kill a child process that runs `work` after `n_calls` of CALLS; return False if it ended before."""

    def run() -> None:
        n_left = n_calls

        def counted(call: Any) -> Any:
            def count(*args: Any, **kwargs: Any) -> Any:
                nonlocal n_left
                if not n_left:
                    os.kill(os.getpid(), signal.SIGKILL)
                n_left -= 1
                return call(*args, **kwargs)

            return count

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        work()

    code = in_child(run)
    assert code in (0, -signal.SIGKILL)
    return code != 0
