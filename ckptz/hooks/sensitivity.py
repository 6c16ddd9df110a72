"""Averages the gradients of a training run, to estimate how much the loss depends on each weight."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any, Final, Self

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckptz.errors import CalibrationError, ConfigError, check_float
from ckptz.guidance.files import SensitivityContent, SensitivityFile, guide_metadata
from ckptz.hooks.parameters import fingerprint_of, names_by_parameter, save_tensors

# Unscaled gradients of half precision would underflow in their own dtype.
AVERAGE_DTYPE: Final = torch.float32


class SensitivityTracker:
    """Keeps an exponential moving average of the gradients of a model.

        average = beta * gradient + (1 - beta) * average

    The first gradient of a parameter is its first average. Averages are float32, on the device of their
    parameter. They are updated before every step of any optimizer that has parameters of the model, with the
    gradients of that step: summed over micro-batches, reduced over ranks, unscaled and clipped. A step that a
    `GradScaler` skips is not counted.

    Args:
        model: the model, on the device where it trains. Names of parameters omit wrappers
            (DistributedDataParallel, DataParallel, torch.compile, checkpoint_wrapper).
        beta: weight of the new gradient, above 0 and at most 1.

    Raises:
        ConfigError: `beta` is out of range, or the model is sharded or not initialized.

    Example:
        >>> import torch
        >>> from ckptz.hooks import SensitivityTracker
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with SensitivityTracker(model) as tracker:
        ...     model(torch.tensor([[1.0, 3.0]])).sum().backward()
        ...     optimizer.step()
        >>> tracker.gradients()
        {'weight': tensor([[1., 3.]])}
    """

    def __init__(self, model: nn.Module, beta: float = 0.9) -> None:
        beta = check_float("beta", beta)
        if not 0 < beta <= 1:
            raise ConfigError(f"beta is the weight of the new gradient, above 0 and at most 1, got {beta}")
        self.beta = beta
        names = names_by_parameter(model)
        self._fingerprint = fingerprint_of(names)
        self._parameters = {own[0]: one for one, own in names.items() if one.is_floating_point()}
        self._names = {name: names[parameter] for name, parameter in self._parameters.items()}
        self._name_of = {id(parameter): name for name, parameter in self._parameters.items()}
        self._averages: dict[str, torch.Tensor] = {}
        reference = weakref.ref(self)  # PyTorch never removes the hook by itself

        def update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (tracker := reference()) is not None:
                tracker._update(optimizer)

        self._handle = register_optimizer_step_pre_hook(update)
        weakref.finalize(self, self._handle.remove).atexit = False

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the averages by parameter name; the next step changes these tensors."""
        return dict(self._averages)

    def sensitivity(self) -> dict[str, torch.Tensor]:
        """Return |average * weight| by parameter name, float32, for the current weights.

        This is the first-order change of the loss if the weight were set to 0.
        """
        return {
            name: (average * self._parameters[name].detach()).abs_()
            for name, average in self._averages.items()
        }

    def missing(self) -> list[str]:
        """List the parameters without a gradient in any step: frozen, unused, or in no optimizer."""
        return [name for name in self._parameters if name not in self._averages]

    def remove(self) -> None:
        """Stop averaging, and keep the averages."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def _update(self, optimizer: Optimizer) -> None:
        gradients = {
            self._name_of[id(parameter)]: parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) in self._name_of
        }
        # `GradScaler.step` sets these two for fused optimizers, which unscale gradients and skip steps.
        found_inf, grad_scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if not gradients or (found_inf is not None and float(found_inf)):
            return
        scale = 1.0 if grad_scale is None else float(grad_scale)
        averages, dense = [], []
        for name, gradient in gradients.items():
            average = self._averages.get(name)
            if average is None:
                first = (gradient.to_dense() if gradient.layout != torch.strided else gradient).to(
                    AVERAGE_DTYPE, copy=True
                )
                self._averages[name] = first if scale == 1.0 else first.div_(scale)
            elif gradient.layout == torch.strided:
                averages.append(average)
                dense.append(gradient)
            else:  # sparse, as of an embedding
                average.mul_(1 - self.beta).add_(gradient, alpha=self.beta / scale)
        if averages:
            # One call for all tensors, in place, which copies no gradient of any precision.
            torch._foreach_mul_(averages, 1 - self.beta)
            torch._foreach_add_(averages, dense, alpha=self.beta / scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: "beta", "fingerprint" of the model, and "averages", tensors by name."""
        return {"beta": self.beta, "fingerprint": self._fingerprint, "averages": self.gradients()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, on the devices of the parameters.

        Raises:
            CalibrationError: the state belongs to another model.
        """
        self._check_owner("the state", state["fingerprint"], state["averages"])
        self.beta = state["beta"]
        self._averages = {name: self._on_device(name, average) for name, average in state["averages"].items()}

    def _check_owner(self, what: str, fingerprint: str, shapes: Mapping[str, Any]) -> None:
        """Require a state of this model, with averages of its parameters."""
        belongs_to_model = fingerprint == self._fingerprint and all(
            name in self._parameters and tuple(average.shape) == tuple(self._parameters[name].shape)
            for name, average in shapes.items()
        )
        if not belongs_to_model:
            raise CalibrationError(
                f"{what}: is of a model with other parameters; load it with the model it was made for"
            )

    def _on_device(self, name: str, average: torch.Tensor) -> torch.Tensor:
        return average.detach().to(self._parameters[name].device, AVERAGE_DTYPE, copy=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the averages to a safetensors file, which appears only when it is complete.

        Raises:
            CalibrationError: an average is not finite.
        """
        for name, average in self._averages.items():
            if not average.isfinite().all():
                raise CalibrationError(
                    f"{path}: the gradient average of {name!r} is not finite; train on from an earlier "
                    "checkpoint with a new tracker"
                )
        parameters = tuple(self._names[name] for name in self._averages)
        content = SensitivityContent(self._fingerprint, self.beta, parameters)
        save_tensors(path, self._averages, guide_metadata(content))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the averages from a file of `save`.

        Raises:
            CalibrationError: the file belongs to another model, or is damaged.
            FileNotFoundError: no such file.
        """
        with SensitivityFile(path) as file:
            self._check_owner(str(path), file.content.fingerprint, file.recorded)
            self._averages = {
                name: self._on_device(name, torch.from_numpy(recorded.read()))
                for name, recorded in file.recorded.items()
            }
            self.beta = file.content.beta
