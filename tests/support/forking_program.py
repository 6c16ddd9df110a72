"""A training program that forks while a thread writes: WHAT N_FORKS FOLDER.

`factors` forks while a thread factors matrices, `pools` while it compresses by zstd, computes on torch's
threads and runs compiled kernels, `saves` while the background writer saves lossy moments, `loader` as
DataLoader workers start in every epoch. Prints how often the thread did its work. Ends with a traceback and
code 1 where nothing goes on.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard
from torch.utils.data import DataLoader, TensorDataset

from ckptz import Checkpointer, Grid, KeepPolicy, Moments
from ckptz.codec.column_rounding import ColumnRounding
from ckptz.codec.low_rank import low_rank
from ckptz.format.dtypes import dtype_of
from ckptz.format.sources import ArraySource
from ckptz.torch import save

PATIENCE = 60.0  # seconds in which something must go on; kernels may be compiled first
FORKS_PER_WORK = 5


def go_on() -> None:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


def fork() -> None:
    """Fork a process that multiplies matrices, and wait for it."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        matrix = np.ones((100, 100))
        os._exit(0 if (matrix @ matrix).sum() == 1e6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def forks_while(work: Callable[[], object], n_forks: int) -> None:
    is_over, errors, n_done = list[bool](), list[BaseException](), [0]

    def again_and_again() -> None:
        try:
            while not is_over:
                work()
                n_done[0] += 1
                go_on()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=again_and_again)
    thread.start()
    for number in range(n_forks):
        while not errors and n_done[0] < number // FORKS_PER_WORK:  # or all forks come in the first call
            time.sleep(0.001)
        fork()
    is_over.append(True)
    thread.join()
    assert not errors, errors
    print("work", n_done[0])


def factors(n_forks: int) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((300, 60)) @ rng.standard_normal((60, 300))).astype(np.float32)
    source = ArraySource(dtype_of("F32"), values.shape, values.view(np.uint32).reshape(-1))
    inputs = values.T @ values

    def work() -> None:
        low_rank(source, None, 3.0)
        ColumnRounding.of(inputs)

    expected = low_rank(source, None, 3.0)
    forks_while(work, n_forks)
    actual = low_rank(source, None, 3.0)
    assert expected is not None
    assert actual is not None
    assert (expected.scales == actual.scales).all()


def pools(n_forks: int) -> None:
    torch.set_num_threads(2)
    matrix = torch.randn(400, 400)
    data = matrix.numpy().tobytes()
    expected = save({"matrix": matrix}), zstandard.ZstdCompressor(3, threads=2).compress(data)
    product = matrix @ matrix

    def work() -> None:
        assert zstandard.ZstdCompressor(3, threads=2).compress(data) == expected[1]
        assert torch.equal(matrix @ matrix, product)
        assert save({"matrix": matrix}, jobs=2) == expected[0]

    forks_while(work, n_forks)


def trained(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, Checkpointer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    config = Grid(moments=Moments())
    keep = KeepPolicy(last=2, exact=0)
    return model, optimizer, Checkpointer(folder, model, optimizer, config=config, keep=keep)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def saves(n_forks: int, folder: Path) -> None:
    model, optimizer, checkpointer = trained(folder)
    with checkpointer:
        for number in range(1, n_forks + 1):
            go_on()
            if number % 10 == 1:
                step(model, optimizer, torch.randn(32, 256))
                checkpointer.save(number)
            fork()
        checkpointer.wait()
        assert checkpointer.restore_latest() == checkpointer.steps()[-1]


def loader(n_forks: int, folder: Path) -> None:
    model, optimizer, checkpointer = trained(folder)
    data = DataLoader(TensorDataset(torch.randn(64, 256)), batch_size=16, num_workers=4)
    with checkpointer:
        for epoch in range(1, n_forks // 4 + 1):
            for (inputs,) in data:
                go_on()
                step(model, optimizer, inputs)
            checkpointer.save(epoch)
        checkpointer.wait()
        assert checkpointer.restore_latest() == n_forks // 4


if __name__ == "__main__":
    case, n, where = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    go_on()
    if case in ("factors", "pools"):
        {"factors": factors, "pools": pools}[case](n)
    else:
        {"saves": saves, "loader": loader}[case](n, where)
    faulthandler.cancel_dump_traceback_later()
    print("went on")
