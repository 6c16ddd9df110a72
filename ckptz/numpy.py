"""numpy arrays in and out of `.ckptz` files: the names and arguments of `safetensors.numpy`.

    from ckptz.numpy import load_file, save_file

`load_file` and `load` also read plain safetensors files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from ckptz.api.read import PathLike, load_bytes, open_whole
from ckptz.api.save import check_tensor_names, job_of, save_to_bytes, save_to_file
from ckptz.errors import DTypeError
from ckptz.format.dtypes import DTYPE_CODES, DType, dtype_of
from ckptz.format.sources import PATTERN_TYPES, ArraySource
from ckptz.run.step_files import model_prefix

if TYPE_CHECKING:
    from ckptz.codec.effort import EffortName
    from ckptz.codec.method import Method

Arrays = dict[str, NDArray[Any]]

__all__ = ["load", "load_file", "save", "save_file"]


def save(
    tensor_dict: Arrays,
    metadata: dict[str, str] | None = None,
    *,
    config: Method | None = None,
    effort: EffortName = "default",
    jobs: int | None = None,
) -> bytes:
    """Return the bytes of a `.ckptz` file with these arrays.

    Args:
        tensor_dict: arrays by name, of any layout.
        metadata: strings to store with the tensors.
        config: the method and its settings; lossless by default.
        effort: "fast", "default" or "small": time to spend on a smaller file.
        jobs: number of threads, by default one for each core.

    Example:
        >>> import numpy as np
        >>> from ckptz.numpy import load, save
        >>> load(save({"weight": np.ones(2)}))
        {'weight': array([1., 1.])}
    """
    return save_to_bytes(job_of(_sources(tensor_dict), metadata, config, effort), jobs)


def save_file(
    tensor_dict: Arrays,
    filename: PathLike,
    metadata: dict[str, str] | None = None,
    *,
    config: Method | None = None,
    base: PathLike | None = None,
    effort: EffortName = "default",
    jobs: int | None = None,
) -> None:
    """Write arrays to a `.ckptz` file, published atomically.

    Args:
        tensor_dict: arrays by name, of any layout.
        filename: the file, replaced if it exists.
        metadata: strings to store with the tensors.
        config: the method and its settings; lossless by default.
        base: store a delta to this `.ckptz` or `.safetensors` file. Reading needs the base: keep it in the
            folder of `filename`.
        effort: "fast", "default" or "small": time to spend on a smaller file.
        jobs: number of threads, by default one for each core.

    Example:
        >>> import numpy as np
        >>> from ckptz.numpy import load_file, save_file
        >>> save_file({"weight": np.ones(2)}, "step-1.ckptz")
        >>> save_file({"weight": np.ones(2) * 1.01}, "step-2.ckptz", base="step-1.ckptz")
        >>> load_file("step-2.ckptz")
        {'weight': array([1.01, 1.01])}
    """
    save_to_file(job_of(_sources(tensor_dict), metadata, config, effort), filename, base, jobs)


def load(
    data: bytes,
    *,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Arrays:
    """Load the arrays of a `.ckptz` or a safetensors file from its bytes.

    Args:
        data: the bytes of the file.
        search_path: folders to search for bases.
        max_decoded_bytes: largest decoded size in bytes; by default the free memory.
        jobs: number of threads, by default one for each core.

    Example:
        >>> import numpy as np
        >>> from ckptz.numpy import load, save
        >>> load(save({"weight": np.ones(2)}))
        {'weight': array([1., 1.])}
    """
    tensors = load_bytes(data, "numpy", search_path, max_decoded_bytes, jobs)
    return dict(safetensors.numpy.load(data)) if tensors is None else tensors


def load_file(
    filename: PathLike,
    *,
    backend: str = "mmap",
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Arrays:
    """Load all arrays of a `.ckptz` or a `.safetensors` file by name.

    The prefix "model." in the weights files of a `Checkpointer` is removed.

    Args:
        filename: the file; bases are searched beside it and in `search_path`.
        backend: "mmap" or "pread", as in safetensors.
        search_path: more folders to search for bases.
        max_decoded_bytes: largest decoded size in bytes; by default the free memory.
        jobs: number of threads, by default one for each core.

    Example:
        >>> import numpy as np
        >>> from ckptz.numpy import load_file, save_file
        >>> save_file({"weight": np.ones(2)}, "model.ckptz")
        >>> load_file("model.ckptz")
        {'weight': array([1., 1.])}
    """
    limits: dict[str, Any] = {"max_decoded_bytes": max_decoded_bytes, "jobs": jobs}
    with open_whole(filename, "np", backend=backend, search_path=search_path, **limits) as file:
        prefix = model_prefix(os.fspath(filename), file.metadata(), file.keys())
        return {name.removeprefix(prefix): tensor for name, tensor in file.get_tensors().items()}


def _sources(tensor_dict: Mapping[str, NDArray[Any]]) -> dict[str, ArraySource]:
    sources = {name: _source(name, array) for name, array in tensor_dict.items()}
    check_tensor_names(sources)
    return sources


def _source(name: str, array: NDArray[Any]) -> ArraySource:
    if not isinstance(array, np.ndarray):
        # safetensors raises AttributeError here too.
        what = f"{type(array).__name__!r} object has no attribute 'dtype'"
        raise AttributeError(f"{what}: tensor {name!r} is no numpy array")
    dtype, layout = _layout(array.dtype)
    if dtype is None:
        raise DTypeError(
            f"tensor {name!r} has dtype {array.dtype}, which the format does not have; convert it"
        )
    little = np.ascontiguousarray(array, layout)
    patterns = little.reshape(-1).view(PATTERN_TYPES[dtype.pattern_bytes])
    if not patterns.flags.aligned:
        patterns = patterns.copy()
    return ArraySource(dtype, array.shape, patterns)


@functools.cache  # dtype.name is slow in numpy
def _layout(array_dtype: np.dtype[Any]) -> tuple[DType | None, np.dtype[Any]]:
    """Return the dtype of the format, or None, and the little-endian dtype of arrays."""
    code = DTYPE_CODES.get(array_dtype.name)
    dtype = None if code is None or code == "F4" else dtype_of(code)
    return dtype, array_dtype.newbyteorder("<")
