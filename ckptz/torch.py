"""PyTorch tensors in and out of `.ckptz` files: the names and arguments of `safetensors.torch`.

    from ckptz.torch import load_file, save_file

`load_file`, `load` and `load_model` also read plain safetensors files. `save_state` and `load_state` keep
nested states, as `torch.save` and `torch.load` do, without pickle.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch

from ckptz.api.apply import apply_
from ckptz.api.read import PathLike, check_limit, checked_path, decoded_chunks, load_bytes, open_whole
from ckptz.api.save import check_tensor_names, save_to_bytes, save_to_file
from ckptz.errors import CkptzError, ConfigError, FormatError, with_context
from ckptz.format.sources import PATTERN_TYPES, ArraySource, LazySource, Patterns, TensorSource, tensor_bytes
from ckptz.kernels.torch import bytes_of, lives_elsewhere
from ckptz.parallel import Workers
from ckptz.run.step_files import model_prefix
from ckptz.state.flatten import flatten, geometry_of, unflatten
from ckptz.state.modules import names_in_model
from ckptz.state.torch import Mover, from_plain, on_device, stored_type, to_plain
from ckptz.store.resolve import SUFFIX, open_checkpoint
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
    """Make the bytes of a `.ckptz` file that holds these tensors.

    Args:
        tensors: contiguous, dense tensors by name, on any device.
        metadata: text to keep with them.
        config: what may be lost; nothing by default.
        effort: "fast", "default" or "small": how much time to spend on a smaller file.
        jobs: threads, all cores by default.

    Raises:
        ValueError: not a dict of tensors, or a tensor is sparse or not contiguous.
        RuntimeError: tensors share memory.

    Example:
        >>> import torch
        >>> from ckptz.torch import load, save
        >>> load(save({"weight": torch.ones(2)}))
        {'weight': tensor([1., 1.])}
    """
    return save_to_bytes(_sources(tensors), metadata, config, jobs, effort)


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
    """Write tensors to a `.ckptz` file, which appears whole or not at all.

    Args:
        tensors: contiguous, dense tensors by name, on any device.
        filename: the file, replaced if it exists.
        metadata: text to keep with them.
        config: what may be lost; nothing by default.
        base: an earlier `.ckptz` or `.safetensors` file to store only the difference to. It is needed
            for reading: keep it in the folder of `filename`.
        effort: "fast", "default" or "small": how much time to spend on a smaller file.
        jobs: threads, all cores by default.

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
    save_to_file(_sources(tensors), filename, metadata, config, base, jobs, effort)


def load(
    data: bytes,
    *,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Tensors:
    """Load the tensors of a `.ckptz` or a safetensors file in memory.

    Args:
        data: the file's bytes.
        search_path: folders with the bases of a delta.
        max_decoded_bytes: most bytes to decode to; by default, the memory that is free.
        jobs: threads, all cores by default.

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

    Weights of a `Checkpointer`'s run have the model's names: their prefix "model." is removed.

    Args:
        filename: the file; a delta finds its bases beside it and in `search_path`.
        device: where the tensors go.
        backend: "mmap" or "pread", as in safetensors.
        search_path: more folders with bases.
        max_decoded_bytes: most bytes to decode to; by default, the memory that is free.
        jobs: threads, all cores by default.
        link_policy: compressed links that the model will run with. If the file records that it was trained
            with others, which is harmful, a `ckptz.wire.PolicyWarning` says why.

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
    """Write a model's state; of parameters that share memory one is kept, the metadata name the others.

    Args:
        model: the model.
        filename: the file, replaced if it exists.
        metadata: text to keep with the tensors.
        force_contiguous: save tensors of other layouts as contiguous ones instead of refusing them.
        config: what may be lost; nothing by default.
        base: an earlier file to store only the difference to; see `save_file`.
        effort: "fast", "default" or "small": how much time to spend on a smaller file.
        jobs: threads, all cores by default.

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
    """Load a file that `save_model` wrote, or any other with the right names, into `model`.

    Names match with or without the components of wrappers (torch.compile, DataParallel, checkpoint_wrapper),
    in the model as in the file. A run's file of weights matches too; see `load_file`.

    Args:
        model: the model, changed in place.
        filename: the file.
        strict: refuse missing and unexpected names. Without it, they are returned; tensors of another
            shape are refused all the same, and so is a file with no name of the model.
        device: where the tensors are before they are copied into the model.
        backend: "mmap" or "pread", as in safetensors.
        search_path: more folders with bases of a delta.
        max_decoded_bytes: most bytes to decode to; by default, the memory that is free.
        jobs: threads, all cores by default.
        link_policy: see `load_file`.

    Returns:
        (names in the model that the file lacks, names in the file that the model lacks).

    Raises:
        RuntimeError: names are missing or unexpected, or shapes differ.
        ConfigError: `strict` is False, and no name matches.

    Example:
        >>> import torch
        >>> from ckptz.torch import load_model, save_model
        >>> save_model(torch.nn.Linear(2, 2), "model.ckptz")
        >>> missing, unexpected = load_model(torch.nn.Linear(2, 2), "model.ckptz")
        >>> list(missing), unexpected
        ([], [])
    """
    limits: dict[str, Any] = {
        "max_decoded_bytes": max_decoded_bytes,
        "jobs": jobs,
        "link_policy": link_policy,
    }
    state = load_file(filename, device, backend=backend, search_path=search_path, **limits)
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
    """Write a nested state to a `.ckptz` file, as `torch.save` would, but without pickle.

    It may hold dicts, lists and tuples of tensors, numbers, text and bytes, with NumPy arrays and scalars,
    paths, sets, dates and devices among them. Tensors that share memory share it after `load_state`.

    Args:
        state: what to keep; tensors on any device.
        filename: the file, replaced if it exists.
        config: what weights and moments may lose; nothing by default.
        base: an earlier file to store only the difference to; see `save_file`.
        effort: "fast", "default" or "small": how much time to spend on a smaller file.
        jobs: threads, all cores by default.

    Raises:
        UnsupportedError: a value that could not come back without running code; the message says where.
        WriteError: the disk is full or fails; what was there stays.

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
        raise ConfigError("the state is nested too deep, or holds itself; save a flatter one") from None
    save_to_file(flat.tensors, filename, None, config, base, jobs, effort, flat.tree)


def load_state(
    filename: PathLike,
    map_location: str | torch.device | None = None,
    *,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
) -> Any:
    """Load what `save_state` was given, or the nested state that `ckptz compress` made a file of.

    Args:
        filename: the file; a delta finds its bases beside it and in `search_path`.
        map_location: the device of the tensors, the CPU by default.
        search_path: more folders with bases.
        max_decoded_bytes: most bytes to decode to; by default, the memory that is free.
        jobs: threads, all cores by default.

    Raises:
        FileNotFoundError: no such file.
        FormatError: it is damaged, or no `.ckptz` file.
        MissingBaseError: a file that it is stored against is missing.
        LimitError: it does not fit into memory.

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
            state = unflatten(opened.tensors, tree, None, lambda tensors: decoded_chunks(tensors, workers))
            value = from_plain(state)
        except CkptzError as error:
            raise error if path in str(error) else with_context(error, path) from None
    return value if map_location is None else on_device(value, map_location)


def nothing_matches(where: str, saved: Iterable[str], live: Iterable[str]) -> str:
    """Return the message about a file that holds nothing of a model."""
    first, wanted = (next(iter(names), None) for names in (saved, live))
    has = "it is empty" if first is None else f"its first name is {first!r}"
    return (
        f"{where}: no name matches the model: {has}, the model's first is {wanted!r}; "
        "give the weights of this model"
    )


def _mismatch(model: torch.nn.Module, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
    for what, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            spelled = ", ".join(f'"{name}"' for name in sorted(names))
            lines.append(f"{what} key(s) in state_dict: {spelled}")
    return "\n    ".join(lines)


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """All names, those together whose tensors overlap in memory; tensors without memory are left out."""
    by_storage: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.device.type != "meta" and (storage := tensor.untyped_storage()).nbytes():
            by_storage[(tensor.device, storage.data_ptr(), storage.nbytes())].append(name)
    return [group for names in by_storage.values() for group in _overlapping(names, tensors)]


def _overlapping(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    groups: list[list[str]] = []
    end = 0
    places = ((tensors[name].data_ptr(), geometry_of(tensors[name]), name) for name in names)
    for begin, stop, name in sorted((at, at + g.span * g.item_bytes, name) for at, g, name in places):
        if groups and begin < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, stop)
    return groups


def _duplicates(tensors: Mapping[str, torch.Tensor], preferred: Iterable[str] = ()) -> dict[str, list[str]]:
    """By each name to keep, the names to leave out because they are part of its memory."""
    wanted, duplicates = set(preferred), {}
    for names in _groups(tensors):
        complete = sorted(name for name in names if _is_complete(tensors[name]))
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no suitable name "
                f"to keep for saving amongst: {set(names)}. None is covering the entire storage; clone them, "
                "or use save_file"
            )
        kept = next((name for name in complete if name in wanted), complete[0])
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


def _fetched(flat: torch.Tensor, n: int, begin: int, end: int) -> Patterns:
    """Copy patterns begin..end of `n` bytes each from a device tensor uint8 [n_bytes] to the host."""
    return flat[n * begin : n * end].cpu().numpy().view(PATTERN_TYPES[n])


def source_of(name: str, tensor: torch.Tensor) -> TensorSource:
    """Return a source for a dense, contiguous tensor on any device; errors contain `name`."""
    if tensor.device.type == "meta":
        # These words, like those above, are safetensors' own: its callers look for them.
        raise NotImplementedError(f"Cannot copy out of meta tensor; no data! (tensor {name!r})")
    dtype, shape = stored_type(name, tensor)
    if not tensor.numel():
        return ArraySource(dtype, shape, np.empty(0, PATTERN_TYPES[dtype.pattern_bytes]))
    tensor = tensor.resolve_conj().resolve_neg()
    if lives_elsewhere(tensor):
        return LazySource(dtype, shape, functools.partial(_fetched, bytes_of(tensor), dtype.pattern_bytes))
    patterns = bytes_of(tensor).numpy().view(PATTERN_TYPES[dtype.pattern_bytes])
    return ArraySource(dtype, shape, np.require(patterns, requirements=["A"]))
