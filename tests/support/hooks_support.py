"""Shared code of the tests of hooks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.numpy
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

Change = Callable[[dict[str, Any], dict[str, str]], Any]


def rewrite(path: Path, change: Change) -> None:
    """Change the tensors and the metadata of a safetensors file."""
    with safetensors.safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
        metadata = dict(file.metadata())
    change(tensors, metadata)
    safetensors.numpy.save_file(tensors, path, metadata)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Initialize a process group of one rank without threads, which gloo would start."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
