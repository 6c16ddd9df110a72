"""Averages of gradients while a model trains: how much its loss depends on each weight."""

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
from ckptz.hooks.parameters import fingerprint_of, named_parameters, save_tensors

# Gradients of half precision are averaged in float32: they are unscaled here, and would underflow.
AVERAGE_DTYPE: Final = torch.float32


class SensitivityTracker:
    """Keeps an exponential moving average of the gradients that a model is trained with.

        average = beta * gradient + (1 - beta) * average

    The first gradient of a parameter is its first average. Averages are float32, on the device of their
    parameter. They are updated before every step of an optimizer, any optimizer, that holds parameters
    of the model. What is averaged is what the optimizer steps with: summed over micro batches, reduced over
    ranks, unscaled and clipped. A step that a `GradScaler` skips is not counted.

    Args:
        model: on the device where it trains. Parameters have their names without wrappers
            (DistributedDataParallel, DataParallel, torch.compile, checkpoint_wrapper), wherever these are.
        beta: the weight of the new gradient, above 0 and at most 1.

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
        named = named_parameters(model)
        self._fingerprint = fingerprint_of(named)
        named = [one for one in named if one.parameter.is_floating_point()]
        self._names = {one.names[0]: one.names for one in named}
        self._parameters = {one.names[0]: one.parameter for one in named}
        self._name_of = {id(one.parameter): one.names[0] for one in named}
        self._averages: dict[str, torch.Tensor] = {}
        alive = weakref.ref(self)  # PyTorch keeps the hooks of all optimizers for good

        def update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (tracker := alive()) is not None:
                tracker._update(optimizer)

        self._handle = register_optimizer_step_pre_hook(update)
        weakref.finalize(self, self._handle.remove).atexit = False

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the averages by parameter name: tensors that change with the next step."""
        return dict(self._averages)

    def sensitivity(self) -> dict[str, torch.Tensor]:
        """Return |average * weight| by parameter name, float32: the change of the loss if the weight were 0.

        It is the first term of the Taylor series, with the weights as they are now.
        """
        return {
            name: (average * self._parameters[name].detach()).abs_()
            for name, average in self._averages.items()
        }

    def missing(self) -> list[str]:
        """Name the parameters that had no gradient in any step: frozen, unused, or in no optimizer."""
        return [name for name in self._parameters if name not in self._averages]

    def remove(self) -> None:
        """Stop averaging; what was averaged stays."""
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
        scale = _gradient_scale(optimizer) if gradients else None
        if scale is None:
            return
        averages, dense = [], []
        for name, gradient in gradients.items():
            average = self._averages.get(name)
            if average is None:
                dense_one = gradient.to_dense() if gradient.layout != torch.strided else gradient
                first = dense_one.to(AVERAGE_DTYPE, copy=True)
                self._averages[name] = first if scale == 1.0 else first.div_(scale)
            elif gradient.layout == torch.strided:
                averages.append(average)
                dense.append(gradient)
            else:  # sparse: an embedding's
                average.mul_(1 - self.beta).add_(gradient, alpha=self.beta / scale)
        if averages:
            # One call for all, in place: no gradient is copied, whatever its precision.
            torch._foreach_mul_(averages, 1 - self.beta)
            torch._foreach_add_(averages, dense, alpha=self.beta / scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: "beta", "fingerprint" of the model, and "averages" by name."""
        return {"beta": self.beta, "fingerprint": self._fingerprint, "averages": self.gradients()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; averages go to the devices of their parameters.

        Raises:
            CalibrationError: it belongs to another model.
        """
        self._check_owner("the state", state["fingerprint"], state["averages"])
        self.beta = state["beta"]
        self._averages = {name: self._placed(name, average) for name, average in state["averages"].items()}

    def _check_owner(self, what: str, fingerprint: str, shapes: Mapping[str, Any]) -> None:
        """Refuse what is of another model; the fingerprint does not say which averages there are."""
        is_ours = fingerprint == self._fingerprint and all(
            name in self._parameters and tuple(one.shape) == tuple(self._parameters[name].shape)
            for name, one in shapes.items()
        )
        if not is_ours:
            raise CalibrationError(
                f"{what}: is of a model with other parameters; load it with the model it was made for"
            )

    def _placed(self, name: str, average: torch.Tensor) -> torch.Tensor:
        return average.detach().to(self._parameters[name].device, AVERAGE_DTYPE, copy=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the averages to a safetensors file, which appears whole or not at all.

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
        """Load the averages that `save` wrote.

        Raises:
            CalibrationError: it belongs to another model, or is damaged.
            FileNotFoundError: no such file.
        """
        with SensitivityFile(path) as file:
            self._check_owner(str(path), file.content.fingerprint, file.recorded)
            self._averages = {
                name: self._placed(name, torch.from_numpy(one.read())) for name, one in file.recorded.items()
            }
            self.beta = file.content.beta


def _gradient_scale(optimizer: Optimizer) -> float | None:
    """Return the factor in the gradients; None if the optimizer will skip the step.

    Fused optimizers unscale gradients themselves: `GradScaler.step` leaves them these two attributes.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and float(found_inf):
        return None
    return 1.0 if scale is None else float(scale)
