"""Covariances of what layers see: how errors of a weight's columns add up in a layer's output."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import nn

from ckptz.errors import CalibrationError, ConfigError, real
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
from ckptz.hooks.covariance import Gather, Recorder, Sum, Sums, Users, gather_of
from ckptz.hooks.parameters import ModelParameter, fingerprint_of, named_parameters, save_tensors, unwrapped

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
        if not real("memory_cap", memory_cap) > 0:
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
            found = gather_of(module)
            if found is None:
                continue
            weight = named.get(id(module.weight))
            if weight is None:
                self._unfit[name] = "its weight is computed and not a parameter"
            elif not weight.parameter.is_floating_point():
                self._unfit[name] = f"its weight is {weight.parameter.dtype}"
            else:
                self._layers[name] = _RecordedLayer(name, module, *found, weight)

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
        if self._recorder.is_empty:
            return
        if layers := self._recorder.commit():
            raise CalibrationError(
                f"layer {layers[0]!r}: its input is not finite, or too large to be squared in float32; "
                "the batch was left out: check the model and the batch"
            )

    def covariance(self, layer: str) -> torch.Tensor:
        """Give a layer's sums: [n, n] or [n_groups, n, n], float32; for an embedding counts [n], int64.

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
        """Give what encoders want to know, in host memory: a copy, which later batches do not change.

        Raises:
            CalibrationError: nothing was recorded.
        """
        rows, sums = self._rows("calibration")
        copies = {name: _mirrored(one.total).to("cpu", copy=True).numpy() for name, one in sums.items()}
        return Recordings("calibration", inputs_by_weight(rows, lambda name: copies[name].copy()))

    def _rows(self, where: str | os.PathLike[str]) -> tuple[tuple[ModuleRow, ...], dict[str, Sum]]:
        """Give a row for each layer that was called, and the sums by the names that their tensors get."""
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
    """A matrix with its upper triangle in both: matrix products are not symmetric to the last bit."""
    return total if total.ndim == 1 else total.triu() + total.triu(1).mT
