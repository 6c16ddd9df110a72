"""`safe_open`: lazy reading with the names and the behaviour of safetensors' own.

A plain safetensors file is handed to safetensors itself; a `.ckptz` file is read here, with its chain
of bases.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

import safetensors

from ckptz.api.describe import described
from ckptz.api.read import check_limit, read_selection, read_tensors
from ckptz.errors import CkptzError
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.reader import FrameSource
from ckptz.state.arrays import Framework, framework, parse_backend, parse_device, parse_framework
from ckptz.store.resolve import Checkpoint, open_checkpoint, open_source

PathLike: TypeAlias = str | os.PathLike[str]


class _NoSuchFile(FileNotFoundError):
    """Says that a file is missing in the words of safetensors."""

    def __str__(self) -> str:
        return f"{self.strerror}: {self.filename}"


class _Opened:
    """An open checkpoint, shared by a handle and its slices; closed when the last of them lets go."""

    __slots__ = ("checkpoint", "framework", "jobs", "max_decoded_bytes", "sources")

    def __init__(
        self, checkpoint: Checkpoint, made_by: Framework, max_decoded_bytes: int | None, jobs: int | None
    ) -> None:
        assert checkpoint.container is not None
        self.checkpoint = checkpoint
        self.sources = checkpoint.container.tensors
        self.framework = made_by
        self.max_decoded_bytes = max_decoded_bytes
        self.jobs = jobs

    def __del__(self) -> None:
        if hasattr(self, "checkpoint"):
            self.checkpoint.close()

    def source(self, name: str) -> FrameSource:
        """Find a tensor by name."""
        if not isinstance(name, str):
            raise TypeError(f"a tensor name is a str, got {type(name).__name__}")
        if name not in self.sources:
            raise CkptzError(f"File does not contain tensor {name} ({self.checkpoint.name})")
        return self.sources[name]

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read whole tensors by name."""
        sources = {name: self.source(name) for name in names}
        n_bytes = sum(source.n_bytes for source in sources.values())
        check_limit(n_bytes, self.max_decoded_bytes, self.checkpoint.name)
        return dict(read_tensors(sources, self.framework, self.jobs))


class SafeSlice:
    """A tensor that is read when it is indexed, and only where; made by `safe_open.get_slice`.

    Ints, slices, None and an ellipsis decode what they pick; for lists, arrays, tensors and booleans PyTorch
    indexes the whole tensor. It reads on after its handle was closed. Chunks that an index touches in part
    are kept for the next index, up to 64 MiB for one open file.

    Example:
        >>> import numpy as np, ckptz
        >>> from ckptz.numpy import save_file
        >>> save_file({"weight": np.arange(6.0).reshape(2, 3)}, "model.ckptz")
        >>> with ckptz.safe_open("model.ckptz", framework="np") as f:
        ...     part = f.get_slice("weight")
        >>> part.get_shape(), part.get_dtype(), part[:, 1]
        ([2, 3], 'F64', array([1., 4.]))
    """

    __slots__ = ("_opened", "_source")

    def __init__(self, opened: _Opened, source: FrameSource) -> None:
        self._opened = opened
        self._source = source

    def get_shape(self) -> list[int]:
        """Give the shape of the whole tensor."""
        return list(self._source.shape)

    def get_dtype(self) -> str:
        """Give the code safetensors has for the dtype, such as "BF16"."""
        return self._source.dtype.name

    def __getitem__(self, index: Any) -> Any:
        """The tensor's elements that `index` picks, in a tensor of their own."""
        opened, source = self._opened, self._source
        selection = opened.framework.select(index, source.dtype, source.shape)
        n_bytes = selection.window.n_patterns * source.dtype.pattern_bytes
        check_limit(n_bytes, opened.max_decoded_bytes, f"{opened.checkpoint.name}: {source.entry.name!r}")
        return read_selection(source, selection, opened.framework, opened.jobs)


class safe_open:
    """Opens a `.ckptz` or a `.safetensors` file; reads tensors, or parts of them, when asked.

    Everything up to `backend` is as in safetensors. For a plain safetensors file the result *is*
    safetensors' own handle. Threads may share a handle.

    Args:
        filename: the file; a delta finds its bases beside it and in `search_path`.
        framework: "pt" or "np", or a longer spelling.
        device: where PyTorch tensors go.
        backend: "mmap" or "pread". A `.ckptz` file is read by position under both; as in safetensors,
            "pread" restricts PyTorch slices to ints, slices and an ellipsis.
        search_path: more folders with bases.
        max_decoded_bytes: most bytes that one call may decode to; by default, the memory that is free.
        jobs: threads for one call, all cores by default.

    Raises:
        FileNotFoundError: no such file.
        SafetensorError: an unknown framework, device or backend, or a damaged file (`FormatError`).
        MissingBaseError: a base of a delta is not found.

    Example:
        >>> import numpy as np, ckptz
        >>> from ckptz.numpy import save_file
        >>> save_file({"weight": np.arange(6.0).reshape(2, 3)}, "model.ckptz")
        >>> with ckptz.safe_open("model.ckptz", framework="np") as f:
        ...     f.keys(), f.get_tensor("weight"), f.get_slice("weight")[0, 1:]
        (['weight'], array([[0., 1., 2.],
               [3., 4., 5.]]), array([1., 2.]))
    """

    __slots__ = ("_opened",)
    _opened: _Opened | None

    def __new__(
        cls,
        filename: PathLike,
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
        search_path: Sequence[PathLike] = (),
        max_decoded_bytes: int | None = None,
        jobs: int | None = None,
    ) -> Any:
        path = checked_path(filename)
        name, place, served_by = parse_framework(framework), parse_device(device), parse_backend(backend)
        try:
            checkpoint = open_checkpoint(path, search_path)
        except FileNotFoundError as error:
            raise _NoSuchFile(*error.args[:2], error.filename) from None
        if checkpoint.container is None:
            checkpoint.close()
            return safetensors.safe_open(path, framework, device, backend=backend)
        return _handle(cls, checkpoint, (name, place, served_by), max_decoded_bytes, jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._opened = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle a safe_open handle; open the file where it is needed")

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise CkptzError("File is closed")
        return self._opened

    def _repr_html_(self) -> str | None:
        """Show in a notebook how the file is stored, without decoding it; nothing of a closed file."""
        if self._opened is None:
            return None
        checkpoint = self._opened.checkpoint
        assert checkpoint.container is not None
        return described(checkpoint.container, checkpoint, None)._repr_html_()

    def keys(self) -> list[str]:
        """Name the tensors, sorted."""
        return sorted(self._open.sources)

    def offset_keys(self) -> list[str]:
        """Name the tensors in the order in which they are stored."""
        return list(self._open.sources)

    def metadata(self) -> dict[str, str] | None:
        """Give the text that was saved with the tensors; None if there was none."""
        metadata = self._open.checkpoint.metadata
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Read a whole tensor, into memory of its own."""
        return self._open.read([name])[name]

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors by name, in the order in which they are stored."""
        opened = self._open
        return opened.read(list(opened.sources))

    def get_slice(self, name: str) -> SafeSlice:
        """Give a tensor to be indexed: only what the index touches is decoded."""
        opened = self._open
        return SafeSlice(opened, opened.source(name))


def _handle(
    cls: type[Any],
    checkpoint: Checkpoint,
    wanted: tuple[str, str | int, str],
    max_decoded_bytes: int | None,
    jobs: int | None,
) -> Any:
    try:
        made_by = framework(*wanted)
    except BaseException:
        checkpoint.close()
        raise
    handle = object.__new__(cls)
    handle._opened = _Opened(checkpoint, made_by, max_decoded_bytes, jobs)
    return handle


def checked_path(filename: PathLike) -> str:
    """Give the path as text; bytes and file descriptors are refused, as by safetensors."""
    path = os.fspath(filename)
    if not isinstance(path, str):
        raise TypeError(f"filename must be a str or a path of str, got {type(path).__name__}")
    return path


def load_bytes(
    data: bytes,
    framework_name: str,
    search_path: Sequence[PathLike],
    max_decoded_bytes: int | None,
    jobs: int | None,
) -> dict[str, Any] | None:
    """Load all tensors of a `.ckptz` file in memory; None if the bytes are a plain safetensors file."""
    if not isinstance(data, bytes):
        raise TypeError(f"data must be bytes, got {type(data).__name__}")
    checkpoint = open_source(MemoryBytes(data), [Path(folder) for folder in search_path])
    if checkpoint.container is None:
        return None
    handle = _handle(safe_open, checkpoint, (framework_name, "cpu", "mmap"), max_decoded_bytes, jobs)
    tensors: dict[str, Any] = handle.get_tensors()
    return tensors
