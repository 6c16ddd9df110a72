"""Adapters of PEFT in checkpoints of the Trainer. Imported only for models with adapters.

A checkpoint has the weights under the names of the model's state dict, which a resume needs, and the tensors
that only PEFT's own files have. `ckptz restore` writes these files without PEFT; see
`ckptz.foreign.adapters`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import peft
import torch
from transformers import PreTrainedModel

from ckptz.errors import UnsupportedError
from ckptz.foreign.adapters import ADAPTERS_KEY, pack_adapters, stored_name
from ckptz.integrations.versions import warn_untested

TESTED: Final = ((0, 21), (0, 21))  # first and last version that the tests ran with
warn_untested("peft", peft.__version__, TESTED)

_PREFIX: Final = "base_model.model."  # begins keys of PEFT's files; transformers' own adapters lack it


def save_configs(model: Any, folder: Path) -> None:
    """Write the files, other than weights, that `save_pretrained` of a model with adapters writes.

    Raises:
        UnsupportedError: several adapters of transformers itself are active, which it cannot save either.
    """
    if isinstance(model, PreTrainedModel):
        for place, adapter in _folders(model):
            model.peft_config[adapter].save_pretrained(str(folder / place))
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    if not isinstance(model, peft.PeftModel):
        return
    model.create_or_update_model_card(str(folder))
    for place, adapter in _folders(model):
        config = copy.copy(model.peft_config[adapter])
        base = model.base_model if config.is_prompt_learning else model.base_model.model
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = vars(base).get("name_or_path") or None
        config.inference_mode = True
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.save_pretrained(
            str(folder / place), auto_mapping_dict=mapping if config.task_type is None else None
        )


def with_adapters(
    model: Any, state: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Add the tensors that only PEFT's files have to the weights of a checkpoint.

    Args:
        model: the model with adapters.
        state: its state dict.
        stored: the entries of the state dict that the checkpoint has.

    Returns:
        All tensors to store, and the metadata with PEFT's keys.

    Raises:
        UnsupportedError: as for `save_configs`.
    """
    names = {id(tensor): name for name, tensor in stored.items()}
    tensors, files = dict(stored), {}
    for folder, adapter in _folders(model):
        prefix = "" if isinstance(model, peft.PeftModel) else _PREFIX
        keys = {}
        # PEFT selects, renames and computes tensors; a tensor of the state dict stays the same object.
        for key, tensor in peft.get_peft_model_state_dict(model, dict(state), adapter).items():
            name = names.get(id(tensor), stored_name(folder, prefix + key))
            if name not in tensors:
                tensors[name] = tensor.detach()
            keys[prefix + key] = name
        files[folder] = adapter, keys
    return tensors, {ADAPTERS_KEY: pack_adapters(files, tensors)} if files else {}


def _folders(model: Any) -> Iterator[tuple[str, str]]:
    """Yield folder ("" for that of the model) and name of each adapter that `save_pretrained` writes."""
    if isinstance(model, peft.PeftModel):
        for adapter in model.peft_config:
            yield "" if adapter == "default" else adapter, adapter
    elif isinstance(model, PreTrainedModel):
        first, *others = model.active_adapters()
        if others:
            raise UnsupportedError(
                f"the adapters {first!r} and {others[0]!r} are active, and transformers saves one; activate "
                "one by model.set_adapter, or use peft.get_peft_model"
            )
        yield "", first
