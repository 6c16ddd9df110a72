"""Covariances of layer inputs, which determine how errors of weights add up in a layer's output.

A gather describes how a layer uses its input tensor. `shape` and `dtype` are those of its sums; `add` adds
the input vectors of a tensor to a total in place and returns their number. Layers with equal gathers that get
the same tensor share one sum. Sums take a limited amount of memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch import nn
from torch.nn import functional

from ckptz.errors import CalibrationError, ConfigError, check_float
from ckptz.guidance.files import (
    CalibrationContent,
    CalibrationFile,
    InputRow,
    LayerKind,
    ModuleRow,
    RecordedInputs,
    Recordings,
    guide_metadata,
    inputs_by_weight,
)
from ckptz.hooks.parameters import fingerprint_of, names_by_parameter, save_tensors
from ckptz.state.modules import name_without_wrappers, unwrapped

# Rounding errors of float32 sums are far below the damping of the Hessians.
SUM_DTYPE: Final = torch.float32
PART_ELEMENTS: Final = 1 << 24  # elements that are converted or unfolded at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class Vectors:
    """Gather of linear layers: vectors along the last dimension. Sums are x x^T, [n, n]."""

    n: int
    dtype: torch.dtype = SUM_DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n, self.n

    def add(self, tensor: torch.Tensor, total: torch.Tensor) -> int:
        rows = tensor.reshape(-1, self.n)
        for part in torch.split(rows, max(1, PART_ELEMENTS // max(1, self.n))):
            wide = part.to(self.dtype)
            total.addmm_(wide.T, wide)
        return len(rows)


@dataclass(frozen=True, slots=True)
class Patches:
    """Gather of 1-d and 2-d convolutions: the patch of inputs at each position of the kernel.

    Vectors are in the order of `weight[0].flatten()`. Sums are x x^T, [n, n], or [n_groups, n, n].
    """

    n_channels: int  # of the input
    kernel: tuple[int, ...]  # kernel, stride and dilation have one number per dimension
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (before, after) per dimension
    padding_mode: str  # of `torch.nn.functional.pad`
    n_groups: int  # of channels
    dtype: torch.dtype = SUM_DTYPE

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d) -> Self:
        """Describe how a convolution uses its input; padding "same" pads one more after if it is odd."""
        kernel, dilation = tuple(module.kernel_size), tuple(module.dilation)
        if module.padding == "same":
            totals = [step * (n - 1) for n, step in zip(kernel, dilation, strict=True)]
            padding = tuple((n // 2, n - n // 2) for n in totals)
        else:
            sizes = [0] * len(kernel) if isinstance(module.padding, str) else module.padding  # "valid"
            padding = tuple((n, n) for n in sizes)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        stride = tuple(module.stride)
        return cls(module.in_channels, kernel, stride, dilation, padding, mode, module.groups)

    @property
    def shape(self) -> tuple[int, ...]:
        n = self.n_channels // self.n_groups * math.prod(self.kernel)
        return (n, n) if self.n_groups == 1 else (self.n_groups, n, n)

    def add(self, tensor: torch.Tensor, total: torch.Tensor) -> int:
        if tensor.ndim == len(self.kernel) + 1:  # one sample without a batch dimension
            tensor = tensor[None]
        totals = total.view(self.n_groups, *self.shape[-2:])
        n_vectors = 0
        for samples in torch.split(tensor, self._n_samples_per_part(tensor)):
            vectors = self._unfolded(samples)
            totals.baddbmm_(vectors.mT, vectors)
            n_vectors += vectors.shape[1]
        return n_vectors

    def _n_samples_per_part(self, tensor: torch.Tensor) -> int:
        """Return the number of samples whose vectors fit into `PART_ELEMENTS`; at least one."""
        n_positions = math.prod(
            (size + sum(padding)) // stride + 1
            for size, padding, stride in zip(tensor.shape[2:], self.padding, self.stride, strict=True)
        )
        return max(1, PART_ELEMENTS // (self.n_channels * math.prod(self.kernel) * n_positions))

    def _unfolded(self, samples: torch.Tensor) -> torch.Tensor:
        """Unfold samples [samples, channels, ...] to vectors [n_groups, samples * positions, n]."""
        wide = samples.to(self.dtype)
        if any(map(any, self.padding)):
            padding = [n for before_after in reversed(self.padding) for n in before_after]
            wide = functional.pad(wide, padding, mode=self.padding_mode)
        if len(self.kernel) == 1:  # as an image of one row
            wide = wide[:, :, None]
        row = (1,) * (2 - len(self.kernel))
        patches = functional.unfold(
            wide, (*row, *self.kernel), dilation=(*row, *self.dilation), stride=(*row, *self.stride)
        )
        grouped = patches.view(len(patches), self.n_groups, self.shape[-1], patches.shape[-1])
        return grouped.permute(1, 0, 3, 2).reshape(self.n_groups, -1, self.shape[-1])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Gather of embeddings: the number of lookups of each of `n` rows, [n]."""

    n: int
    dtype: torch.dtype = torch.int64

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)

    def add(self, tensor: torch.Tensor, total: torch.Tensor) -> int:
        tokens = tensor.flatten()
        total.index_add_(0, tokens, torch.ones_like(tokens, dtype=self.dtype))
        return len(tokens)


Gather = Vectors | Patches | Tokens


def gather_of(module: nn.Module) -> tuple[LayerKind, Gather] | None:
    """Return the kind and the gather of a layer; None if its inputs cannot be recorded."""
    if isinstance(module, nn.Linear):
        return "linear", Vectors(module.in_features)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "conv", Patches.of(module)
    if isinstance(module, nn.Embedding):
        return "embedding", Tokens(module.num_embeddings)
    # Conv1D of transformers, a linear layer with weight [in, out], recognised without importing transformers.
    weight, n_out = getattr(module, "weight", None), getattr(module, "nf", None)
    is_conv1d = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    if is_conv1d and isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1] == n_out:
        return "conv1d_t", Vectors(weight.shape[0])
    return None


# --- sums shared by layers -----------------------------------------------------------------------

Users = frozenset[str]  # names of layers
_Key = tuple[int, int, Gather]


@dataclass(slots=True)
class Sum:
    """A sum over input vectors, and their number."""

    total: torch.Tensor
    n_samples: int

    def is_finite(self) -> bool:
        """Return whether all inputs were finite; the diagonal, sums of squares, bounds the other sums."""
        diagonal = self.total.diagonal(dim1=-2, dim2=-1) if self.total.ndim > 1 else self.total
        return bool(diagonal.isfinite().all())


@dataclass(slots=True)
class _Open:
    """A sum of the current batch that further layers can share while its tensor is alive."""

    tensor: weakref.ref[torch.Tensor]
    users: list[str]
    sum: Sum


@dataclass(slots=True)
class Sums:
    """Sums by the set of layers that share them. The total of a layer is that of all its sums."""

    by_users: dict[Users, Sum] = field(default_factory=dict)

    def add(self, users: Users, added: Sum) -> None:
        """Add a sum, which may be kept without a copy."""
        if (present := self.by_users.setdefault(users, added)) is not added:
            present.total.add_(added.total)
            present.n_samples += added.n_samples

    def drop(self, layer: str) -> None:
        """Remove a layer, and the sums that only it uses."""
        remaining = Sums()
        for users, shared in self.by_users.items():
            if users != {layer}:
                remaining.add(users - {layer}, shared)
        self.by_users = remaining.by_users

    def of(self, layer: str) -> Iterator[tuple[Users, Sum]]:
        """Yield the sums of a layer with their users."""
        return ((users, shared) for users, shared in self.by_users.items() if layer in users)

    @property
    def n_bytes(self) -> int:
        """Memory of all sums in bytes."""
        return sum(shared.total.nbytes for shared in self.by_users.values())


class Recorder:
    """Records sums of complete batches and of the current batch.

    A batch is added completely or not at all, so its sums are separate from those of earlier batches. Each
    may take half of the memory cap. If that is not enough, the layers with the largest sums are skipped;
    among equal ones, the last.
    """

    def __init__(self, memory_cap: int) -> None:
        self._half = memory_cap // 2
        self.complete, self._batch = Sums(), Sums()
        self._open: dict[_Key, _Open] = {}
        self._called: dict[str, None] = {}  # layers of this batch, in the order of their first calls
        self.skipped: dict[str, str] = {}
        self._smallest_skipped: int | None = None

    def record(self, layer: str, gather: Gather, tensor: torch.Tensor) -> None:
        """Add the input of a layer; layers that get the same tensor share its sum."""
        if layer in self.skipped:
            return
        self._called[layer] = None
        # Inference tensors have no version counter, so a change between two calls would go unnoticed.
        key = None if tensor.is_inference() else (id(tensor), tensor._version, gather)
        shared = self._open.get(key) if key else None
        if shared is not None and shared.tensor() is tensor and layer not in shared.users:
            shared.users.append(layer)
            return
        self._close(k for k, entry in self._open.items() if k == key or entry.tensor() is None)
        n_bytes = math.prod(gather.shape) * gather.dtype.itemsize
        if not self._make_room(layer, n_bytes):
            return
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            total = torch.zeros(gather.shape, dtype=gather.dtype, device=tensor.device)
            new = Sum(total, gather.add(tensor, total))
        if key is None:
            self._batch.add(frozenset((layer,)), new)
        else:
            self._open[key] = _Open(weakref.ref(tensor), [layer], new)

    def _close(self, keys: Iterable[_Key]) -> None:
        """Move these sums to the batch; no further layer can share them."""
        for key in list(keys):
            entry = self._open.pop(key)
            self._batch.add(frozenset(entry.users), entry.sum)

    def discard(self) -> None:
        """Discard the current batch."""
        self._open.clear()
        self._called.clear()
        self._batch = Sums()

    def commit(self) -> list[str]:
        """Add the current batch to the complete ones, if all its inputs were finite.

        Returns:
            The layers whose inputs were not finite, in the order of their calls.
        """
        self._close(self._open)
        not_finite = {
            user for users, total in self._batch.by_users.items() if not total.is_finite() for user in users
        }
        layers = [layer for layer in self._called if layer in not_finite]
        if not layers:
            for users, total in self._batch.by_users.items():
                self.complete.add(users, total)
        self.discard()
        self._trim()
        return layers

    def _make_room(self, layer: str, n_bytes: int) -> bool:
        """Make room for one more sum in this batch; returns False if the layer itself is skipped."""
        is_too_large = self._smallest_skipped is not None and n_bytes > self._smallest_skipped
        while not is_too_large and sum(n for _, n in self._sums_of_batch()) + n_bytes > self._half:
            # Among equally large sums, the newest is dropped.
            sums = reversed([*self._sums_of_batch()])
            users, largest = max(sums, key=lambda item: item[1], default=((), 0))
            is_too_large = n_bytes >= largest
            if not is_too_large:
                self._skip(users, largest)
        if is_too_large:
            self._skip([layer], n_bytes)
        return not is_too_large

    def _sums_of_batch(self) -> Iterator[tuple[Iterable[str], int]]:
        for users, total in self._batch.by_users.items():
            yield users, total.total.nbytes
        for entry in self._open.values():
            yield entry.users, entry.sum.total.nbytes

    def _trim(self) -> None:
        """Reduce the sums of complete batches to half of the memory cap."""
        while self.complete.n_bytes > self._half:
            sums = reversed(self.complete.by_users.items())
            users, largest = max(sums, key=lambda item: item[1].total.nbytes)
            self._skip(users, largest.total.nbytes)

    def _skip(self, layers: Iterable[str], n_bytes: int) -> None:
        smallest = n_bytes if self._smallest_skipped is None else min(self._smallest_skipped, n_bytes)
        self._smallest_skipped = smallest
        for layer in sorted(layers):
            self.skipped[layer] = f"its sum of {n_bytes} bytes does not fit into the memory cap"
            self.complete.drop(layer)
            self._batch.drop(layer)
            for key, entry in [*self._open.items()]:
                entry.users = [user for user in entry.users if user != layer]
                if not entry.users:
                    del self._open[key]

    def replace(self, complete: Sums, skipped: Mapping[str, str]) -> None:
        """Replace all recorded sums."""
        self.discard()
        self.complete, self.skipped, self._smallest_skipped = complete, dict(skipped), None
        self._trim()


MEMORY_CAP: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class _RecordedLayer:
    """A layer whose inputs are recorded."""

    name: str
    module: nn.Module
    kind: LayerKind
    gather: Gather
    weight: nn.Parameter
    weight_names: tuple[str, ...]  # several if it is tied


class Calibration:
    """Records the inputs of a model's layers over a few batches: sum(x x^T), or counts of tokens.

    It records `nn.Linear`, `nn.Conv1d` and `nn.Conv2d` (unfolded), the Conv1D of transformers, and
    `nn.Embedding`. Layers that get the same tensor share one matrix. Sums are float32, on the device of the
    inputs. Gradients are disabled within the block. Set the model to the mode of its later use first, usually
    with `model.eval()`.

    A batch is one call of the model. It is added completely or, after an error, not at all.

    Args:
        model: a module, also within DistributedDataParallel, which names of layers omit. Of a compiled
            model, pass and call the original module.
        memory_cap: bytes of memory for sums while recording; half of it is for the current batch. If it is
            not enough, the layers with the largest sums are skipped; see `skipped`.

    Raises:
        ConfigError: `memory_cap` is not positive, or the model is sharded or not initialized.

    Example:
        >>> import torch
        >>> from ckptz.hooks import Calibration
        >>> model = torch.nn.Linear(2, 1)
        >>> calibration = Calibration(model)
        >>> with calibration:
        ...     _ = model(torch.tensor([[1.0, 2.0]]))
        ...     _ = model(torch.tensor([[0.0, 1.0]]))
        >>> calibration.covariance("")
        tensor([[1., 2.],
                [2., 5.]])
    """

    def __init__(self, model: nn.Module, *, memory_cap: int = MEMORY_CAP) -> None:
        if not check_float("memory_cap", memory_cap) > 0:
            raise ConfigError(f"memory_cap must be a number of bytes above 0, got {memory_cap}")
        self._model = unwrapped(model)
        names = names_by_parameter(self._model)
        self._fingerprint = fingerprint_of(names)
        self._layers: dict[str, _RecordedLayer] = {}
        self._unsupported: dict[str, str] = {}
        self._recorder = Recorder(memory_cap)
        self._is_in_forward = False
        self._active: contextlib.ExitStack | None = None
        for name, module in self._model.named_modules():
            kind_and_gather = gather_of(module)
            if kind_and_gather is None:
                continue
            name = name_without_wrappers(self._model, name)
            weight = module.weight
            if not isinstance(weight, nn.Parameter) or weight not in names:
                self._unsupported[name] = "its weight is computed and not a parameter"
            elif not weight.is_floating_point():
                self._unsupported[name] = f"its weight is {weight.dtype}"
            else:
                self._layers[name] = _RecordedLayer(name, module, *kind_and_gather, weight, names[weight])

    def __enter__(self) -> Self:
        """Start recording; entered again, it adds to earlier recordings."""
        if self._active is not None:
            raise ConfigError("this calibration is recording already; leave its block first")
        with contextlib.ExitStack() as active:
            active.enter_context(torch.no_grad())
            self._is_in_forward = False
            # Registered before the hooks of layers, because the model itself may be a recorded layer.
            active.callback(self._model.register_forward_pre_hook(self._begin).remove)
            for layer in self._layers.values():
                record = functools.partial(self._record, layer)
                active.callback(layer.module.register_forward_pre_hook(record, with_kwargs=True).remove)
            active.callback(self._model.register_forward_hook(self._end).remove)
            self._active = active.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        assert self._active is not None
        self._active.close()
        self._active = None
        if error is not None or self._is_in_forward:
            self._recorder.discard()
        self._commit()

    def _begin(self, *_: Any) -> None:
        if self._is_in_forward:  # the previous call raised an error
            self._recorder.discard()
        self._commit()  # inputs of layers that were called outside of the model
        self._is_in_forward = True

    def _end(self, *_: Any) -> None:
        self._is_in_forward = False
        self._commit()

    def _record(
        self, layer: _RecordedLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tensor = args[0] if args else next(iter(kwargs.values()))
        self._recorder.record(layer.name, layer.gather, tensor)

    def _commit(self) -> None:
        if layers := self._recorder.commit():
            raise CalibrationError(
                f"layer {layers[0]!r}: its input is not finite, or too large to be squared in float32; "
                "the batch was discarded; check the model and the batch"
            )

    def covariance(self, layer: str) -> torch.Tensor:
        """Return the sum of a layer.

        Returns:
            float32 [n, n] or [n_groups, n, n]; for an embedding the counts of tokens, int64 [n].

        Raises:
            CalibrationError: no input was recorded for the layer.
        """
        sums = [_mirrored(shared.total) for _, shared in self._recorder.complete.of(layer)]
        if not sums:
            raise CalibrationError(f"layer {layer!r}: no input was recorded; see `skipped` and `missing`")
        total = sums[0].clone()
        for other in sums[1:]:
            total.add_(other)
        return total

    @property
    def n_samples(self) -> dict[str, int]:
        """Number of recorded input vectors by layer."""
        complete = self._recorder.complete
        return {
            name: sum(shared.n_samples for _, shared in complete.of(name))
            for name in self._layers
            if any(complete.of(name))
        }

    @property
    def shared(self) -> list[tuple[str, ...]]:
        """Groups of layers that share a matrix, because they got the same tensors."""
        return [self._ordered(users) for users in self._recorder.complete.by_users if len(users) > 1]

    @property
    def skipped(self) -> dict[str, str]:
        """Layers that are not recorded, with reasons."""
        return self._unsupported | self._recorder.skipped

    def missing(self) -> list[str]:
        """List the layers that were never called."""
        called = self.n_samples
        return [name for name in self._layers if name not in called and name not in self._recorder.skipped]

    def _ordered(self, users: Users) -> tuple[str, ...]:
        return tuple(name for name in self._layers if name in users)

    def recorded(self) -> Recordings[RecordedInputs]:
        """Return a copy of the recordings in host memory, for encoders.

        Raises:
            CalibrationError: no input was recorded.
        """
        rows, sums = self._rows("calibration")
        copies = {name: _mirrored(shared.total).to("cpu", copy=True).numpy() for name, shared in sums.items()}
        return Recordings("calibration", inputs_by_weight(rows, lambda name: copies[name].copy()))

    def _rows(self, name: str | os.PathLike[str]) -> tuple[tuple[ModuleRow, ...], dict[str, Sum]]:
        """Return a row for each recorded layer, and the sums by tensor name; `name` is for the error."""
        complete = self._recorder.complete
        if not complete.by_users:
            raise CalibrationError(
                f"{name}: no input was recorded; call the model, not compiled, in `with calibration:`"
            )
        names = {users: "+".join(self._ordered(users)) for users in complete.by_users}
        rows = []
        for layer in self._layers.values():
            inputs = tuple(InputRow(names[users], s.n_samples) for users, s in complete.of(layer.name))
            if inputs:
                shape = tuple(layer.weight.shape)
                rows.append(ModuleRow(layer.name, layer.kind, layer.weight_names, shape, inputs))
        return tuple(rows), {names[users]: shared for users, shared in complete.by_users.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sums to a safetensors file, which appears only when it is complete.

        Raises:
            CalibrationError: no input was recorded.
        """
        rows, sums = self._rows(path)
        content = CalibrationContent(self._fingerprint, rows, self.skipped)
        for shared in sums.values():
            shared.total.copy_(_mirrored(shared.total))  # one by one, to keep the peak of memory low
        order = dict.fromkeys(inputs.tensor for row in rows for inputs in row.inputs)
        save_tensors(path, {name: sums[name].total for name in order}, guide_metadata(content))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the recordings by those in a file of `save`.

        Raises:
            CalibrationError: the file belongs to another model, or is damaged.
            FileNotFoundError: no such file.
        """
        with CalibrationFile(path) as file:
            is_of_model = file.content.fingerprint == self._fingerprint and all(
                row.module in self._layers and row.kind == self._layers[row.module].kind
                for row in file.content.modules
            )
            if not is_of_model:
                raise file.error("is of another model; load it with the model it was recorded with")
            modules_by_input: dict[InputRow, list[str]] = {}
            for row in file.content.modules:
                for inputs in row.inputs:
                    modules_by_input.setdefault(inputs, []).append(row.module)
            sums = Sums()
            for inputs, modules in modules_by_input.items():
                device = self._layers[modules[0]].weight.device
                total = torch.from_numpy(file.read(inputs.tensor)).to(device)
                sums.add(frozenset(modules), Sum(total, inputs.n_samples))
            skipped = {name: reason for name, reason in file.content.skipped.items() if name in self._layers}
        self._recorder.replace(sums, skipped)


def _mirrored(total: torch.Tensor) -> torch.Tensor:
    """Copy the upper triangle of a matrix to the lower: computed products are not exactly symmetric."""
    return total if total.ndim == 1 else total.triu() + total.triu(1).mT
