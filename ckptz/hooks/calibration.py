"""Covariances of what layers see: how errors of a weight's columns add up in a layer's output.

A gather is a value that says how a layer takes its inputs: layers whose gathers are equal make the same
sums of the same tensor. `shape` and `dtype` are those of the sums; `add` adds a tensor's inputs to a total
in place and gives the number of input vectors. Sums are made once for layers that get the very same tensor,
within a memory cap.
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
from ckptz.hooks.parameters import ModelParameter, fingerprint_of, named_parameters, save_tensors
from ckptz.state.modules import name_without_wrappers, unwrapped

# The errors of float32 sums are far below the damping that Hessians get.
SUM_DTYPE: Final = torch.float32
PART_ELEMENTS: Final = 1 << 24  # of the inputs that are widened or unfolded at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class Vectors:
    """Linear layers: vectors along the last dimension. Sums are x x^T, [n, n]."""

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
    """Convolutions of one or two dimensions: what lies under the kernel at each place.

    Vectors are in the order of `weight[0].flatten()`. Sums are x x^T, [n, n], or [n_groups, n, n].
    """

    n_channels: int  # of the input
    kernel: tuple[int, ...]  # one number per dimension, and of the next two
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (before, after) per dimension
    padding_mode: str  # as `torch.nn.functional.pad` calls it
    n_groups: int  # of channels
    dtype: torch.dtype = SUM_DTYPE

    @property
    def shape(self) -> tuple[int, ...]:
        n = self.n_channels // self.n_groups * math.prod(self.kernel)
        return (n, n) if self.n_groups == 1 else (self.n_groups, n, n)

    def add(self, tensor: torch.Tensor, total: torch.Tensor) -> int:
        if tensor.ndim == len(self.kernel) + 1:  # one sample without a batch dimension
            tensor = tensor[None]
        totals = total.view(self.n_groups, *self.shape[-2:])
        n_vectors = 0
        for samples in torch.split(tensor, self._n_at_once(tensor)):
            vectors = self._unfolded(samples)
            totals.baddbmm_(vectors.mT, vectors)
            n_vectors += vectors.shape[1]
        return n_vectors

    def _n_at_once(self, tensor: torch.Tensor) -> int:
        """Count the samples whose vectors fit into a part; at least one."""
        n_places = math.prod(
            (size + sum(padding)) // stride + 1
            for size, padding, stride in zip(tensor.shape[2:], self.padding, self.stride, strict=True)
        )
        return max(1, PART_ELEMENTS // (self.n_channels * math.prod(self.kernel) * n_places))

    def _unfolded(self, samples: torch.Tensor) -> torch.Tensor:
        """Unfold samples [samples, channels, ...] to vectors [n_groups, samples * places, n]."""
        wide = samples.to(self.dtype)
        if any(map(any, self.padding)):
            around = [n for before_after in reversed(self.padding) for n in before_after]
            wide = functional.pad(wide, around, mode=self.padding_mode)
        if len(self.kernel) == 1:  # as a picture of one row
            wide = wide[:, :, None]
        one = (1,) * (2 - len(self.kernel))
        patches = functional.unfold(
            wide, (*one, *self.kernel), dilation=(*one, *self.dilation), stride=(*one, *self.stride)
        )
        grouped = patches.view(len(patches), self.n_groups, self.shape[-1], patches.shape[-1])
        return grouped.permute(1, 0, 3, 2).reshape(self.n_groups, -1, self.shape[-1])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Embeddings: how often each of `n` rows is looked up, [n]."""

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
    """Return the kind of a layer and how its inputs are gathered; None if it is not recorded."""
    if isinstance(module, nn.Linear):
        return "linear", Vectors(module.in_features)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "conv", _patches(module)
    if isinstance(module, nn.Embedding):
        return "embedding", Tokens(module.num_embeddings)
    # transformers' Conv1D, a linear layer whose weight is [in, out], told without importing it.
    weight, n_out = getattr(module, "weight", None), getattr(module, "nf", None)
    is_named = any(one.__name__ == "Conv1D" for one in type(module).__mro__)
    if is_named and isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1] == n_out:
        return "conv1d_t", Vectors(weight.shape[0])
    return None


def _patches(module: nn.Conv1d | nn.Conv2d) -> Patches:
    return Patches(
        n_channels=module.in_channels,
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        dilation=tuple(module.dilation),
        padding=tuple(_paddings(module)),
        padding_mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
        n_groups=module.groups,
    )


def _paddings(module: nn.Conv1d | nn.Conv2d) -> Iterator[tuple[int, int]]:
    """Yield the padding (before, after) of each dimension; "same" puts an odd one after."""
    for i, (kernel, dilation) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
        if module.padding == "same":
            both = dilation * (kernel - 1)
            yield both // 2, both - both // 2
        elif isinstance(module.padding, str):  # "valid"
            yield 0, 0
        else:
            yield module.padding[i], module.padding[i]


# --- sums that layers share ----------------------------------------------------------------------

Users = frozenset[str]
_Key = tuple[int, int, Gather]


@dataclass(slots=True)
class Sum:
    """A sum, and the number of vectors in it."""

    total: torch.Tensor
    n_samples: int

    @property
    def n_bytes(self) -> int:
        """Memory of the sum."""
        return self.total.numel() * self.total.element_size()

    def add(self, other: Sum) -> None:
        """Add another one in place."""
        self.total.add_(other.total)
        self.n_samples += other.n_samples

    def is_finite(self) -> bool:
        """Return whether all added values were finite: the diagonal of squares bounds the other sums."""
        diagonal = self.total.diagonal(dim1=-2, dim2=-1) if self.total.ndim > 1 else self.total
        return bool(diagonal.isfinite().all())


@dataclass(slots=True)
class _Open:
    """A sum that further layers may come to share, as long as its tensor lives."""

    tensor: weakref.ref[torch.Tensor]
    users: list[str]
    sum: Sum


@dataclass(slots=True)
class Sums:
    """Sums by the layers that share them; a layer's own is that of all sums that it is a user of."""

    by_users: dict[Users, Sum] = field(default_factory=dict)

    def add(self, users: Users, one: Sum) -> None:
        """Add a sum; its memory may become that of this object."""
        if users in self.by_users:
            self.by_users[users].add(one)
        else:
            self.by_users[users] = one

    def drop(self, layer: str) -> None:
        """Forget a layer; a sum goes with its last user."""
        kept = Sums()
        for users, one in self.by_users.items():
            if users != {layer}:
                kept.add(users - {layer}, one)
        self.by_users = kept.by_users

    def of(self, layer: str) -> Iterator[tuple[Users, Sum]]:
        """Yield the sums that a layer uses."""
        return ((users, one) for users, one in self.by_users.items() if layer in users)

    @property
    def n_bytes(self) -> int:
        """Memory of all sums."""
        return sum(one.n_bytes for one in self.by_users.values())


def _sum_of(gather: Gather, tensor: torch.Tensor) -> Sum:
    """Sum up one tensor in full precision, whatever mode the model runs in."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        total = torch.zeros(gather.shape, dtype=gather.dtype, device=tensor.device)
        return Sum(total, gather.add(tensor, total))


class Recorder:
    """Sums of complete batches, and of the one that is under way.

    A batch counts as a whole or not at all, so its sums stand beside those of the batches before, each
    in at most half of the bytes of the memory cap. Where it does not suffice, the layers with the largest
    sums are skipped; of equally large ones, the last.
    """

    def __init__(self, memory_cap: int) -> None:
        self._half = memory_cap // 2
        self.kept, self._batch = Sums(), Sums()
        self._open: dict[_Key, _Open] = {}
        self._called: dict[str, None] = {}  # layers of this batch, in the order of their first calls
        self.skipped: dict[str, str] = {}
        self._smallest_skipped: int | None = None

    def record(self, layer: str, gather: Gather, tensor: torch.Tensor) -> None:
        """Add the inputs that a layer gets, unless another has got the same ones from the same tensor."""
        if layer in self.skipped:
            return
        self._called[layer] = None
        # Inference tensors do not count their changes, so none is known to be the same as before.
        key = None if tensor.is_inference() else (id(tensor), tensor._version, gather)
        opened = self._open.get(key) if key else None
        if opened is not None and opened.tensor() is tensor and layer not in opened.users:
            opened.users.append(layer)
            return
        self._close(other for other, one in self._open.items() if other == key or one.tensor() is None)
        n_bytes = math.prod(gather.shape) * gather.dtype.itemsize
        if not self._has_room(layer, n_bytes):
            return
        made = _sum_of(gather, tensor)
        if key is None:
            self._batch.add(frozenset((layer,)), made)
        else:
            self._open[key] = _Open(weakref.ref(tensor), [layer], made)

    def _close(self, keys: Iterable[_Key]) -> None:
        """Stop further layers from sharing these sums."""
        for key in list(keys):
            one = self._open.pop(key)
            self._batch.add(frozenset(one.users), one.sum)

    def discard(self) -> None:
        """Leave the batch out."""
        self._open.clear()
        self._called.clear()
        self._batch = Sums()

    def commit(self) -> list[str]:
        """Count the batch if all its inputs were finite.

        Returns:
            The layers whose inputs were not, in the order of their calls.
        """
        self._close(self._open)
        spoiled = {
            user for users, one in self._batch.by_users.items() if not one.is_finite() for user in users
        }
        layers = [layer for layer in self._called if layer in spoiled]
        if not layers:
            for users, one in self._batch.by_users.items():
                self.kept.add(users, one)
        self.discard()
        self._trim()
        return layers

    def _has_room(self, layer: str, n_bytes: int) -> bool:
        """Make room for one more sum in this batch; False if the layer is skipped itself."""
        is_too_large = self._smallest_skipped is not None and n_bytes > self._smallest_skipped
        while not is_too_large and sum(n for _, n in self._sums_of_batch()) + n_bytes > self._half:
            # Of equally large sums the one that was begun last goes.
            sums = reversed([*self._sums_of_batch()])
            users, largest = max(sums, key=lambda one: one[1], default=((), 0))
            is_too_large = n_bytes >= largest
            if not is_too_large:
                self._skip(users, largest)
        if is_too_large:
            self._skip([layer], n_bytes)
        return not is_too_large

    def _sums_of_batch(self) -> Iterator[tuple[Iterable[str], int]]:
        for users, one in self._batch.by_users.items():
            yield users, one.n_bytes
        for other in self._open.values():
            yield other.users, other.sum.n_bytes

    def _trim(self) -> None:
        """Reduce the sums of complete batches to their half of the memory limit."""
        while self.kept.n_bytes > self._half:
            sums = reversed(self.kept.by_users.items())
            users, one = max(sums, key=lambda item: item[1].n_bytes)
            self._skip(users, one.n_bytes)

    def _skip(self, layers: Iterable[str], n_bytes: int) -> None:
        smallest = n_bytes if self._smallest_skipped is None else min(self._smallest_skipped, n_bytes)
        self._smallest_skipped = smallest
        for layer in sorted(layers):
            self.skipped[layer] = f"its sum of {n_bytes} bytes does not fit into the memory cap"
            self.kept.drop(layer)
            self._batch.drop(layer)
            for key, one in [*self._open.items()]:
                one.users = [user for user in one.users if user != layer]
                if not one.users:
                    del self._open[key]

    def take_over(self, kept: Sums, skipped: Mapping[str, str]) -> None:
        """Go on from other sums, instead of these."""
        self.discard()
        self.kept, self.skipped, self._smallest_skipped = kept, dict(skipped), None
        self._trim()


MEMORY_CAP: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class _RecordedLayer:
    """A layer whose inputs are recorded."""

    name: str
    module: nn.Module
    kind: LayerKind
    gather: Gather
    weight: ModelParameter


class Calibration:
    """Records the inputs of a model's layers over a few batches: sum(x x^T), and counts of tokens.

    Recorded are `nn.Linear`, `nn.Conv1d` and `nn.Conv2d` (unfolded), the Conv1D of transformers, and
    `nn.Embedding`. Layers that get the very same tensor share one matrix. Sums are float32, on the device of
    the inputs. Recording is forward only: gradients are off within the block. Put the model into the
    mode that the inputs should be of, usually `model.eval()`.

    A batch is one call of the model. It counts as a whole or not at all.

    Args:
        model: a plain module, or one in DistributedDataParallel; layers have the names that they have
            without it. A compiled model is recorded by calling the one that was compiled.
        memory_cap: bytes that sums may take while they are recorded. One half is for the batch under way.
            Where it does not suffice, the layers with the largest sums are skipped; see `skipped`.

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
            raise ConfigError(f"memory_cap is a number of bytes, got {memory_cap}")
        self._model = unwrapped(model)
        named = named_parameters(self._model)
        self._fingerprint = fingerprint_of(named)
        self._layers: dict[str, _RecordedLayer] = {}
        self._unfit: dict[str, str] = {}
        self._find_layers({id(one.parameter): one for one in named})
        self._recorder = Recorder(memory_cap)
        self._is_in_forward = False
        self._active: contextlib.ExitStack | None = None

    def _find_layers(self, named: dict[int, ModelParameter]) -> None:
        for name, module in self._model.named_modules():
            gathering = gather_of(module)
            if gathering is None:
                continue
            name = name_without_wrappers(self._model, name)
            weight = named.get(id(module.weight))
            if weight is None:
                self._unfit[name] = "its weight is computed and not a parameter"
            elif not weight.parameter.is_floating_point():
                self._unfit[name] = f"its weight is {weight.parameter.dtype}"
            else:
                self._layers[name] = _RecordedLayer(name, module, *gathering, weight)

    def __enter__(self) -> Self:
        """Record until the block ends; may be entered again, and goes on."""
        if self._active is not None:
            raise ConfigError("this calibration is recording already; leave its block first")
        with contextlib.ExitStack() as active:
            active.enter_context(torch.no_grad())
            self._is_in_forward = False
            # Before those of layers.
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
        if self._is_in_forward:  # the call before has raised
            self._recorder.discard()
        self._commit()  # layers that were called without the model
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
                "the batch was left out: check the model and the batch"
            )

    def covariance(self, layer: str) -> torch.Tensor:
        """Return a layer's sums: [n, n] or [n_groups, n, n], float32; for an embedding counts [n], int64.

        Raises:
            CalibrationError: nothing was recorded for it.
        """
        sums = [_mirrored(one.total) for _, one in self._recorder.kept.of(layer)]
        if not sums:
            raise CalibrationError(f"layer {layer!r}: no input was recorded; see `skipped` and `missing`")
        total = sums[0].clone()
        for other in sums[1:]:
            total.add_(other)
        return total

    @property
    def n_samples(self) -> dict[str, int]:
        """Input vectors by layer."""
        return {
            name: sum(one.n_samples for _, one in self._recorder.kept.of(name))
            for name in self._layers
            if any(self._recorder.kept.of(name))
        }

    @property
    def shared(self) -> list[tuple[str, ...]]:
        """Layers that share a matrix, because they got the very same tensor in the same calls."""
        return [self._ordered(users) for users in self._recorder.kept.by_users if len(users) > 1]

    @property
    def skipped(self) -> dict[str, str]:
        """Layers that are not recorded, with reasons."""
        return self._unfit | self._recorder.skipped

    def missing(self) -> list[str]:
        """Name the layers that are recorded and were not called."""
        seen = self.n_samples
        return [name for name in self._layers if name not in seen and name not in self._recorder.skipped]

    def _ordered(self, users: Users) -> tuple[str, ...]:
        return tuple(name for name in self._layers if name in users)

    def recorded(self) -> Recordings[RecordedInputs]:
        """Return a copy of the recordings for encoders, in host memory.

        Raises:
            CalibrationError: nothing was recorded.
        """
        rows, sums = self._rows("calibration")
        copies = {name: _mirrored(one.total).to("cpu", copy=True).numpy() for name, one in sums.items()}
        return Recordings("calibration", inputs_by_weight(rows, lambda name: copies[name].copy()))

    def _rows(self, where: str | os.PathLike[str]) -> tuple[tuple[ModuleRow, ...], dict[str, Sum]]:
        """Return a row for each layer that was called, and the sums by the names of their tensors."""
        kept = self._recorder.kept
        if not kept.by_users:
            raise CalibrationError(
                f"{where}: no input was recorded; call the model, not compiled, in `with calibration:`"
            )
        names = {users: "+".join(self._ordered(users)) for users in kept.by_users}
        rows = []
        for layer in self._layers.values():
            inputs = tuple(InputRow(names[users], one.n_samples) for users, one in kept.of(layer.name))
            if inputs:
                shape = tuple(layer.weight.parameter.shape)
                rows.append(ModuleRow(layer.name, layer.kind, layer.weight.names, shape, inputs))
        return tuple(rows), {names[users]: one for users, one in kept.by_users.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sums to a safetensors file, which appears whole or not at all.

        Raises:
            CalibrationError: nothing was recorded.
        """
        rows, sums = self._rows(path)
        content = CalibrationContent(self._fingerprint, rows, self.skipped)
        for one in sums.values():
            one.total.copy_(_mirrored(one.total))  # one at a time, so that no second copy of all is made
        order = dict.fromkeys(one.tensor for row in rows for one in row.inputs)
        save_tensors(path, {name: sums[name].total for name in order}, guide_metadata(content))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what `save` wrote, instead of what was recorded.

        Raises:
            CalibrationError: it belongs to another model, or is damaged.
            FileNotFoundError: no such file.
        """
        with CalibrationFile(path) as file:
            self._check_owner(file)
            users: dict[InputRow, list[str]] = {}
            for row in file.content.modules:
                for one in row.inputs:
                    users.setdefault(one, []).append(row.module)
            sums = Sums()
            for one, modules in users.items():
                device = self._layers[modules[0]].weight.parameter.device
                total = torch.from_numpy(file.read(one.tensor)).to(device)
                sums.add(frozenset(modules), Sum(total, one.n_samples))
            skipped = {name: why for name, why in file.content.skipped.items() if name in self._layers}
        self._recorder.take_over(sums, skipped)

    def _check_owner(self, file: CalibrationFile) -> None:
        is_ours = file.content.fingerprint == self._fingerprint and all(
            row.module in self._layers and row.kind == self._layers[row.module].kind
            for row in file.content.modules
        )
        if not is_ours:
            raise file.error("is of another model; load it with the model it was recorded with")


def _mirrored(total: torch.Tensor) -> torch.Tensor:
    """Copy the upper triangle of a matrix to the lower: products are not symmetric to the last bit."""
    return total if total.ndim == 1 else total.triu() + total.triu(1).mT
