"""Frozen weights, which checkpoints may leave out.

The metadata of such a checkpoint have the content id of the frozen weights. A restore requires a model with
the same values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ckptz.errors import ConfigError
from ckptz.format.index import content_id_of
from ckptz.run.step_files import FROZEN_KEY
from ckptz.state.modules import name_without_wrappers
from ckptz.torch import source_of
from ckptz.training.snapshot import check_dense
from ckptz.training.state import model_state

Tensors = Mapping[str, torch.Tensor]
SAMPLE: Final = 1024  # elements of a tensor, at least


def frozen_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model without gradients, by name; no buffers."""
    frozen = {
        name_without_wrappers(model, name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }
    # State-dict hooks may have renamed an entry: its memory identifies it.
    addresses = {parameter.data_ptr() for parameter in frozen.values() if parameter.numel()}
    return {
        name: tensor
        for name, tensor in model_state(model).items()
        if name in frozen or (isinstance(tensor, torch.Tensor) and tensor.data_ptr() in addresses)
    }


class FrozenId:
    """Content id of frozen weights, which is computed again only when a sample of them has changed."""

    def __init__(self) -> None:
        self._of: list[tuple[str, int, int, bytes]] = []
        self._id: str | None = None

    def of(self, frozen: Tensors) -> str | None:
        """Return the content id of frozen weights; None if there are none.

        Warns if the same weights had another content id before.
        """
        for name, tensor in frozen.items():
            check_dense(tensor, name)
        # Changes of `.data` do not count as versions.
        now = [(name, one.data_ptr(), one._version, _sample(one)) for name, one in frozen.items()]
        if now != self._of:
            sources = {name: source_of(name, tensor.detach().contiguous()) for name, tensor in frozen.items()}
            before, self._id = self._id, content_id_of(sources) if sources else None
            if before != self._id and [one[0] for one in now] == [one[0] for one in self._of]:
                changed = next((one[0] for one, old in zip(now, self._of, strict=True) if one != old), "")
                warnings.warn(
                    f"frozen weights, such as {changed!r}, have changed since the save before; they are not "
                    "saved, and a restore needs a model that has them: do not change them, as by merging "
                    "adapters or averaging weights, or leave trainable_only out",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._of = now
        return self._id


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of up to 2,047 elements."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, len(flat) // SAMPLE)].contiguous()
    return sample.view(torch.uint8).cpu().numpy().tobytes()


def with_frozen(
    model: nn.Module,
    saved: Mapping[str, Any],
    metadata: Mapping[str, str] | None,
    where: str,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Add the model's frozen weights to the saved weights of a checkpoint that left them out.

    Args:
        model: the model to restore.
        saved: weights of the checkpoint by name.
        metadata: metadata of its file.
        where: name of the file in messages.
        strict: refuse a model with other frozen weights; otherwise none are added, so that they are missing.

    Raises:
        ConfigError: the model has other frozen weights.
    """
    wanted = (metadata or {}).get(FROZEN_KEY)
    if wanted is None:
        return dict(saved)
    frozen = {name: tensor for name, tensor in model_state(model).items() if name not in saved}
    if FrozenId().of(frozen) != wanted:
        if not strict:
            return dict(saved)
        first = next(iter(frozen), "none")
        raise ConfigError(
            f"{where}: was saved without its frozen weights, and the {len(frozen)} that the model holds in "
            f"their places (first {first!r}) are others; load the weights that training began with into the "
            "model, and add the same adapters, before this is restored"
        )
    return {**frozen, **saved}
