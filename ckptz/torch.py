"""PyTorch tensors in and out of `.ckptz` files: the names and arguments of `safetensors.torch`.

    from ckptz.torch import load_file, save_file

`load_file`, `load` and `load_model` also read plain safetensors files. `save_state` and `load_state` replace
`torch.save` and `torch.load` for nested states, without pickle.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptz import lazy

try:
    import safetensors.torch
    import torch
except ModuleNotFoundError as error:
    raise lazy.needs_extra(error, "torch") from None

from ckptz.api.apply import apply_
from ckptz.api.read import PathLike, check_limit, checked_path, decoded_chunks, load_bytes, open_whole
from ckptz.api.save import check_tensor_names, job_of, save_to_bytes, save_to_file
from ckptz.errors import CkptzError, ConfigError, FormatError, with_context
from ckptz.format.sources import PATTERN_TYPES, ArraySource, LazySource, Patterns, TensorSource, tensor_bytes
from ckptz.format.suffixes import SUFFIX
from ckptz.kernels.torch import bytes_of, is_on_device
from ckptz.parallel import Workers
from ckptz.run.step_files import model_prefix
from ckptz.state.flatten import flatten, geometry_of, unflatten
from ckptz.state.modules import names_in_model
from ckptz.state.torch import Mover, from_plain, on_device, stored_type, to_plain
from ckptz.store.resolve import open_checkpoint
from ckptz.wire.policy import LinkPolicy, check_policy

if TYPE_CHECKING:
    from ckptz.codec.effort import EffortName
    from ckptz.codec.method import Method

Tensors = dict[str, torch.Tensor]

__all__ = [
    "apply_",
    "load",
    "load_file",
    "load_model",
    "load_state",
    "save",
    "save_file",
    "save_model",
    "save_state",
]


def save(
    tensors: Tensors,
    metadata: dict[str, str] | None = None,
    *,
    config: Method | None = None,
    effort: EffortName = "default",
    jobs: int | None = None,
) -> bytes:
    """Return the bytes of a `.ckptz` file with these tensors.

    Args:
        tensors: contiguous, dense tensors by name, on any device.
        metadata: strings to store with the tensors.
        config: the method and its settings; lossless by default.
        effort: "fast", "default" or "small": time to spend on a smaller file.
        jobs: number of threads, by default one for each core.

    Raises:
        ValueError: not a dict of tensors, or a tensor is sparse or not contiguous.
        RuntimeError: tensors share memory.

    Example:
        >>> import torch
        >>> from ckptz.torch import load, save
        >>> load(save({"weight": torch.ones(2)}))
        {'weight': tensor([1., 1.])}
    """
    return save_to_bytes(job_of(_sources(tensors), metadata, config, effort), jobs)


def save_file(
    tensors: Tensors,
    filename: PathLike,
    metadata: dict[str, str] | None = None,
    *,
    config: Method | None = None,
    base: PathLike | None = None,
    effort: EffortName = "default",
    jobs: int | None = None,
) -> None:
    """Write tensors to a `.ckptz` file, published atomically.

    Args:
        tensors: contiguous, dense tensors by name, on any device.
        filename: the file, replaced if it exists.
        metadata: strings to store with the tensors.
        config: the method and its settings; lossless by default.
        base: store a delta to this `.ckptz` or `.safetensors` file. Reading needs the base: keep it in the
            folder of `filename`.
        effort: "fast", "default" or "small": time to spend on a smaller file.
        jobs: number of threads, by default one for each core.

    Raises:
        ValueError: not a dict of tensors, or a tensor is sparse or not contiguous.
        RuntimeError: tensors share memory.

    Example:
        >>> import torch
        >>> from ckptz.torch import load_file, save_file
        >>> save_file({"weight": torch.ones(2)}, "step-1.ckptz")
        >>> save_file({"weight": torch.ones(2) * 1.5}, "step-2.ckptz", base="step-1.ckptz")
        >>> load_file("step-2.ckptz")
        {'weight': tensor([1.5000, 1.5000])}
    """
    save_to_file(job_of(_sources(tensors), metadata, config, effort), filename, base, jobs)


def load(
    data: bytes,
    *,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Tensors:
    """Load the tensors of a `.ckptz` or a safetensors file from its bytes.

    Args:
        data: the bytes of the file.
        search_path: folders to search for bases.
        max_decoded_bytes: largest decoded size in bytes; by default the free memory.
        jobs: number of threads, by default one for each core.

    Example:
        >>> import torch
        >>> from ckptz.torch import load, save
        >>> load(save({"weight": torch.ones(2)}))
        {'weight': tensor([1., 1.])}
    """
    tensors = load_bytes(data, "torch", search_path, max_decoded_bytes, jobs)
    return dict(safetensors.torch.load(data)) if tensors is None else tensors


def load_file(
    filename: PathLike,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
    link_policy: LinkPolicy | str | None = None,
) -> Tensors:
    """Load all tensors of a `.ckptz` or a `.safetensors` file by name.

    The prefix "model." in the weights files of a `Checkpointer` is removed.

    Args:
        filename: the file; bases are searched beside it and in `search_path`.
        device: device of the tensors.
        backend: "mmap" or "pread", as in safetensors.
        search_path: more folders to search for bases.
        max_decoded_bytes: largest decoded size in bytes; by default the free memory.
        jobs: number of threads, by default one for each core.
        link_policy: policy of the compressed links that the model will use. A `ckptz.wire.PolicyWarning` is
            issued if the file records training with another policy, which reduces quality.

    Example:
        >>> import torch
        >>> from ckptz.torch import load_file, save_file
        >>> save_file({"weight": torch.ones(2)}, "model.ckptz")
        >>> load_file("model.ckptz")
        {'weight': tensor([1., 1.])}
    """
    limits: dict[str, Any] = {"max_decoded_bytes": max_decoded_bytes, "jobs": jobs}
    with open_whole(filename, "pt", device, backend=backend, search_path=search_path, **limits) as file:
        check_policy(file.metadata(), link_policy)
        prefix = model_prefix(os.fspath(filename), file.metadata(), file.keys())
        return {name.removeprefix(prefix): tensor for name, tensor in file.get_tensors().items()}


def save_model(
    model: torch.nn.Module,
    filename: PathLike,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    config: Method | None = None,
    base: PathLike | None = None,
    effort: EffortName = "default",
    jobs: int | None = None,
) -> None:
    """Write the state of a model; parameters that share memory are stored once, and named in the metadata.

    Args:
        model: the model.
        filename: the file, replaced if it exists.
        metadata: strings to store with the tensors.
        force_contiguous: save non-contiguous tensors as contiguous ones instead of raising.
        config: the method and its settings; lossless by default.
        base: store a delta to this file; see `save_file`.
        effort: "fast", "default" or "small": time to spend on a smaller file.
        jobs: number of threads, by default one for each core.

    Example:
        >>> import torch
        >>> from ckptz.torch import load_model, save_model
        >>> save_model(torch.nn.Linear(2, 2), "model.ckptz")
        >>> missing, unexpected = load_model(torch.nn.Linear(2, 2), "model.ckptz")
        >>> list(missing), unexpected
        ([], [])
    """
    state = model.state_dict()
    dropped = {name: kept for kept, names in _duplicates(state).items() for name in names}
    tensors = {name: tensor for name, tensor in state.items() if name not in dropped}
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    texts = {**dropped, **(metadata or {})} if dropped else metadata
    save_file(tensors, filename, texts, config=config, base=base, effort=effort, jobs=jobs)


def load_model(
    model: torch.nn.Module,
    filename: PathLike,
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
    link_policy: LinkPolicy | str | None = None,
) -> tuple[set[str], list[str]]:
    """Load a file with a model's state into `model`.

    Names of the model and of the file match with or without the components of wrappers (torch.compile,
    DataParallel, checkpoint_wrapper) and the prefix "model." of a `Checkpointer`.

    Args:
        model: the model, changed in place.
        filename: the file.
        strict: raise for missing and unexpected names. If False, they are returned; different shapes, and a
            file without any name of the model, still raise.
        device: device of the tensors before they are copied into the model.
        backend: "mmap" or "pread", as in safetensors.
        search_path: more folders to search for bases.
        max_decoded_bytes: largest decoded size in bytes; by default the free memory.
        jobs: number of threads, by default one for each core.
        link_policy: see `load_file`.

    Returns:
        (names in the model that the file lacks, names in the file that the model lacks).

    Raises:
        RuntimeError: names are missing or unexpected, or shapes differ.
        ConfigError: `strict` is False and no name matches.

    Example:
        >>> import torch
        >>> from ckptz.torch import load_model, save_model
        >>> save_model(torch.nn.Linear(2, 2), "model.ckptz")
        >>> missing, unexpected = load_model(torch.nn.Linear(2, 2), "model.ckptz")
        >>> list(missing), unexpected
        ([], [])
    """
    limits: dict[str, Any] = {"max_decoded_bytes": max_decoded_bytes, "jobs": jobs}
    state = load_file(
        filename, device, backend=backend, search_path=search_path, link_policy=link_policy, **limits
    )
    live = model.state_dict()
    names = names_in_model(model, live, state)
    state = {names[name]: tensor for name, tensor in state.items()}
    if not strict and live and live.keys().isdisjoint(state):
        raise ConfigError(nothing_matches(os.fspath(filename), state, live))
    duplicates = _duplicates(live, preferred=state)
    report = model.load_state_dict(state, strict=False)
    missing, unexpected = set(report.missing_keys), list(report.unexpected_keys)
    for name in (name for names in duplicates.values() for name in names):
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        raise RuntimeError(_mismatch(model, missing, unexpected))
    return missing, unexpected


def save_state(
    state: Any,
    filename: PathLike,
    *,
    config: Method | None = None,
    base: PathLike | None = None,
    effort: EffortName = "default",
    jobs: int | None = None,
) -> None:
    """Write a nested state to a `.ckptz` file, like `torch.save` but without pickle.

    Args:
        state: dicts, lists and tuples of tensors (on any device), numbers, text, bytes, NumPy arrays and
            scalars, paths, sets, dates and devices. Tensors that share memory share it after `load_state`.
        filename: the file, replaced if it exists.
        config: the method for weights and moments; lossless by default.
        base: store a delta to this file; see `save_file`.
        effort: "fast", "default" or "small": time to spend on a smaller file.
        jobs: number of threads, by default one for each core.

    Raises:
        UnsupportedError: a value that cannot be restored without running code; the message has its path.
        WriteError: the disk is full or fails; an existing file does not change.

    Example:
        >>> import torch
        >>> from ckptz.torch import load_state, save_state
        >>> save_state({"model": {"weight": torch.ones(2)}, "step": 10, "lr": (0.1, None)}, "run.ckptz")
        >>> load_state("run.ckptz")
        {'model': {'weight': tensor([1., 1.])}, 'step': 10, 'lr': (0.1, None)}
    """
    move = Mover(torch.device("cpu"))
    try:
        flat = flatten(to_plain(state, lambda tensor, _: move(tensor)))
    except RecursionError:
        raise ConfigError("the state is nested too deeply or contains itself; save a flatter one") from None
    save_to_file(job_of(flat.tensors, None, config, effort, flat.tree), filename, base, jobs)


def load_state(
    filename: PathLike,
    map_location: str | torch.device | None = None,
    *,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Any:
    """Load a nested state from a file of `save_state` or `ckptz compress`.

    Args:
        filename: the file; bases are searched beside it and in `search_path`.
        map_location: device of the tensors, the CPU by default.
        search_path: more folders to search for bases.
        max_decoded_bytes: largest decoded size in bytes; by default the free memory.
        jobs: number of threads, by default one for each core.

    Raises:
        FileNotFoundError: no such file.
        FormatError: the file is damaged, or no `.ckptz` file.
        MissingBaseError: a base is missing.
        LimitError: the decoded size exceeds `max_decoded_bytes`.

    Example:
        >>> from ckptz.torch import load_state, save_state
        >>> save_state([1, {"seed": (2, 3)}], "seeds.ckptz")
        >>> load_state("seeds.ckptz")
        [1, {'seed': (2, 3)}]
    """
    path = checked_path(filename)
    with contextlib.closing(open_checkpoint(path, search_path)) as opened, Workers(jobs) as workers:
        if opened.container is None:
            raise FormatError(f"{path}: not a {SUFFIX} file; read it with load_file")
        check_limit(tensor_bytes(opened.tensors), max_decoded_bytes, path)
        tree = opened.container.index.tree
        try:
            state = unflatten(opened.tensors, tree, None, decoded_chunks(workers))
            value = from_plain(state)
        except CkptzError as error:
            raise error if path in str(error) else with_context(error, path) from None
    return value if map_location is None else on_device(value, map_location)


def nothing_matches(where: str, saved: Iterable[str], live: Iterable[str]) -> str:
    """Return the error message for a file without any name of a model."""
    first, expected = (next(iter(names), None) for names in (saved, live))
    content = "it is empty" if first is None else f"its first name is {first!r}"
    return (
        f"{where}: no name matches the model: {content}, the model's first is {expected!r}; "
        "load a file of this model"
    )


def _mismatch(model: torch.nn.Module, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
    for what, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            spelled = ", ".join(f'"{name}"' for name in sorted(names))
            lines.append(f"{what} key(s) in state_dict: {spelled}")
    return "\n    ".join(lines)


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return groups of names whose tensors overlap in memory; tensors without memory are left out."""
    by_storage: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.device.type != "meta" and (storage := tensor.untyped_storage()).nbytes():
            by_storage[(tensor.device, storage.data_ptr(), storage.nbytes())].append(name)
    groups: list[list[str]] = []
    for names in by_storage.values():
        extents = ((tensors[name].data_ptr(), geometry_of(tensors[name]), name) for name in names)
        end = 0
        for begin, stop, name in sorted((at, at + g.span * g.item_bytes, name) for at, g, name in extents):
            if begin < end:
                groups[-1].append(name)
            else:
                groups.append([name])
            end = max(end, stop)
    return groups


def _duplicates(tensors: Mapping[str, torch.Tensor], preferred: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return for each name to keep the names whose tensors are part of its memory."""
    preferred_names, duplicates = set(preferred), {}
    for names in _groups(tensors):
        complete = sorted(name for name in names if _is_complete(tensors[name]))
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no suitable name "
                f"to keep for saving amongst: {set(names)}. None is covering the entire storage; clone them, "
                "or use save_file"
            )
        kept = next((name for name in complete if name in preferred_names), complete[0])
        duplicates[kept] = sorted(name for name in names if name != kept)
    return duplicates


def _is_complete(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    fills = tensor.numel() * tensor.element_size() == storage.nbytes()
    return tensor.data_ptr() == storage.data_ptr() and fills


def _sources(tensors: Tensors) -> dict[str, TensorSource]:
    _check(tensors)
    check_tensor_names(tensors)
    return {name: source_of(name, tensor.detach()) for name, tensor in tensors.items()}


def _check(tensors: Tensors) -> None:
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            what = f"expected torch.Tensor but received {type(tensor)}"
            raise ValueError(f"Key `{name}` is invalid, {what}")
    if sparse := [name for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support. You "
            "can make it a dense tensor before saving with `.to_dense()` but be aware this might make a much "
            "larger file than needed."
        )
    if shared := [set(names) for names in _groups(tensors) if len(names) > 1]:
        raise RuntimeError(
            "Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
            f"when loading them again: {shared}; use save_model, or clone all but one of each"
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either "
                "means you are trying to save tensors which are reference of each other in which case it's "
                "recommended to save only the full tensors, and reslice at load time, or simply call "
                "`.contiguous()` on your tensor to pack it before saving. Or use save_model(..., "
                "force_contiguous=True), read the docs for potential caveats."
            )


def _copy_to_host(flat: torch.Tensor, n: int, begin: int, end: int) -> Patterns:
    """Copy patterns begin..end of `n` bytes each from a device tensor uint8 [n_bytes] to the host."""
    return flat[n * begin : n * end].cpu().numpy().view(PATTERN_TYPES[n])


def source_of(name: str, tensor: torch.Tensor) -> TensorSource:
    """Return a source for a dense, contiguous tensor on any device; errors contain `name`."""
    if tensor.device.type == "meta":
        # The wording of safetensors, which callers may match, here and above.
        raise NotImplementedError(f"Cannot copy out of meta tensor; no data! (tensor {name!r})")
    dtype, shape = stored_type(name, tensor)
    if not tensor.numel():
        return ArraySource(dtype, shape, np.empty(0, PATTERN_TYPES[dtype.pattern_bytes]))
    tensor = tensor.resolve_conj().resolve_neg()
    if is_on_device(tensor):
        return LazySource(
            dtype, shape, functools.partial(_copy_to_host, bytes_of(tensor), dtype.pattern_bytes)
        )
    patterns = bytes_of(tensor).numpy().view(PATTERN_TYPES[dtype.pattern_bytes])
    return ArraySource(dtype, shape, np.require(patterns, requirements=["A"]))
