"""transformers models from folders with `.ckptz` files.

    from transformers import AutoModel
    from ckptz.integrations.transformers import from_pretrained

    model = from_pretrained(AutoModel, "packed")

It uses only documented functions of transformers. See docs/transformers.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ckptz import lazy

try:
    import huggingface_hub
    import torch
    from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
    from transformers.utils import is_peft_available
except ModuleNotFoundError as error:
    raise lazy.needs_extra(error, "transformers") from None

from ckptz.api.read import PathLike
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.format.suffixes import SUFFIX
from ckptz.integrations.model_files import first_float, named_files, nothing_found, read_model, weight_files
from ckptz.store.resolve import open_checkpoint

__all__ = ["from_pretrained", "push_to_hub"]


def from_pretrained(
    model_class: Any,
    folder: PathLike,
    *model_args: Any,
    files: str | Sequence[str] | None = None,
    low_memory: bool = False,
    search_path: Sequence[PathLike] = (),
    max_decoded_bytes: int | None = None,
    jobs: int | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model as `model_class.from_pretrained(folder)` does, from a folder with `.ckptz` files.

    Args:
        model_class: `AutoModel` or any other automatic class, or the class of a model.
        folder: the output of `ckptz compress FOLDER -o OUTPUT`, or another folder with `model.ckptz`,
            `pytorch_model.ckptz` or numbered shards of these; other weights in it are ignored. Or the name of
            such a folder on the Hub, "org/name", which huggingface_hub downloads.
        model_args: arguments of the model's `__init__`.
        files: the `.ckptz` files to load, if they have other names.
        low_memory: decode each tensor when transformers takes it, which needs no second copy of the model if
            it has another dtype or device; by default all tensors are decoded first.
        search_path: more folders to search for bases.
        max_decoded_bytes: largest number of bytes to decode at once; by default the free memory.
        jobs: number of threads, by default one for each core.
        kwargs: arguments of `model_class.from_pretrained`: `dtype`, `device_map`, `config`, `variant`,
            `subfolder`, `output_loading_info`, ...

    Returns:
        The result of `model_class.from_pretrained`.

    Raises:
        ConfigError: not a folder, or a folder without weights.
        FileNotFoundError: a shard is missing.
        FormatError: a file is damaged.
        MissingBaseError: a base is not found.
        UnsupportedError: the folder has adapters or code for generation, which are not supported.

    Example:
        >>> from transformers import AutoModel, BertConfig, BertModel
        >>> from ckptz.torch import save_model
        >>> sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> model = BertModel(BertConfig(**sizes))
        >>> model.config.save_pretrained("packed")
        >>> save_model(model, "packed/model.ckptz")
        >>> type(from_pretrained(AutoModel, "packed")).__name__
        'BertModel'
    """
    folder = _fetched(folder, kwargs)
    place = _place(folder, kwargs)
    paths = weight_files(place, kwargs.get("variant")) if files is None else named_files(place, files)
    if not paths:
        raise nothing_found(place)
    config, options = _config(model_class, folder, kwargs)
    real_class, config = _class_and_config(model_class, config, kwargs.get("trust_remote_code"))
    limits: dict[str, Any] = {"max_decoded_bytes": max_decoded_bytes, "jobs": jobs}
    state = read_model(paths, is_lazy=low_memory, search_path=search_path, **limits)
    asked = options.get("dtype") or options.get("torch_dtype")
    if low_memory and asked in (None, "auto") and getattr(config, "dtype", None) is None:
        options["dtype"] = first_float(state)
    loaded = real_class.from_pretrained(None, *model_args, config=config, state_dict=state, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    _finish(model, folder, kwargs)
    return loaded


def push_to_hub(folder: PathLike, repo: str, *, private: bool | None = None, **kwargs: Any) -> Any:
    """Upload a folder with `.ckptz` files to the Hub, for `from_pretrained` to load by its name.

    The files that `from_pretrained` downloads are uploaded, without other weights in the folder.

    Args:
        folder: the output of `ckptz compress FOLDER -o OUTPUT`, with the bases of its files.
        repo: the name on the Hub, "org/name"; created if it does not exist.
        private: visibility of a new repository, by default that of the organization.
        kwargs: for `huggingface_hub.upload_folder`: `token`, `revision`, `commit_message`, `create_pr`, ...

    Returns:
        The result of `huggingface_hub.upload_folder`.

    Raises:
        ConfigError: not a folder, or a folder without weights.
        FileNotFoundError: a shard is missing.
        FormatError: a file is damaged.
        MissingBaseError: a base is not in the folder, so the upload could not be loaded.

    Example:
        >>> from ckptz.integrations.transformers import push_to_hub
        >>> push_to_hub("packed", "org/name")  # doctest: +SKIP
    """
    place = Path(folder)
    if not place.is_dir():
        raise ConfigError(f"{place}: is no folder")
    if not (paths := weight_files(place, None)):
        raise nothing_found(place)
    for path in paths:
        open_checkpoint(path).close()  # finds every base
    hub = huggingface_hub.HfApi(token=kwargs.pop("token", None))
    hub.create_repo(repo, private=private, exist_ok=True)
    return hub.upload_folder(repo_id=repo, folder_path=place, allow_patterns=_FETCHED, **kwargs)


def _fetched(folder: PathLike, kwargs: Mapping[str, Any]) -> PathLike:
    """Return the folder, or for a name on the Hub a local copy of it without other weights."""
    if not _HUB_NAME.fullmatch(os.fspath(folder)) or Path(folder).is_dir():
        return folder
    options = {name: kwargs[name] for name in _FOR_HUB if kwargs.get(name) is not None}
    return str(huggingface_hub.snapshot_download(os.fspath(folder), allow_patterns=_FETCHED, **options))


_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_FOR_HUB: Final = ("revision", "cache_dir", "token", "force_download", "local_files_only")
_FETCHED: Final = [f"*{SUFFIX}", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def _place(folder: PathLike, kwargs: Mapping[str, Any]) -> Path:
    """Return the folder of the weights."""
    place = Path(folder) / (kwargs.get("subfolder") or "")
    if not place.is_dir():
        raise ConfigError(f"{place}: neither a folder nor a name on the Hub such as org/name")
    for name in ("state_dict", "gguf_file"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"{name}: the weights come from the {SUFFIX} files of {place}")
    if is_peft_available() and (place / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{place}: holds an adapter, which would stay out; restore the folder and load that"
        )
    if kwargs.get("trust_remote_code") and (place / "custom_generate" / "generate.py").is_file():
        raise UnsupportedError(f"{place}: holds a generate() of its own; restore the folder and load that")
    return place


def _config(model_class: Any, folder: PathLike, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration, and the arguments that are not part of it."""
    options, config = dict(kwargs), kwargs.get("config")
    options.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return config, options
    # As in the automatic classes: these arguments are for the weights, even if the configuration has them.
    kept = {name: options.pop(name) for name in _FOR_WEIGHTS if name in options}
    loader = getattr(model_class, "config_class", None) or AutoConfig
    config, rest = loader.from_pretrained(
        folder if config is None else config, return_unused_kwargs=True, **options
    )
    return config, rest | kept


_FOR_WEIGHTS: Final = ("dtype", "torch_dtype", "quantization_config")


def _class_and_config(model_class: Any, config: Any, trust_remote_code: bool | None) -> tuple[Any, Any]:
    """Return the class of the model; automatic classes must build one for it, here without memory."""
    if getattr(model_class, "config_class", None) is not None:
        return model_class, config
    with torch.device("meta"):
        made = model_class.from_config(config, trust_remote_code=trust_remote_code)
    # Some classes make a text model from the configuration of a model that also takes images.
    return type(made), config if type(made.config) is type(config) else config.get_text_config()


def _finish(model: Any, folder: PathLike, kwargs: Mapping[str, Any]) -> None:
    """Set name and generation settings as transformers does after it has loaded weights."""
    model.name_or_path = model.config.name_or_path = str(folder)
    if not model.can_generate() or kwargs.get("generation_config") is not None:
        return
    subfolder = kwargs.get("subfolder") or ""
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, subfolder=subfolder)
    except OSError:  # older folders have it in their config.json
        texts, _ = PreTrainedConfig.get_config_dict(folder, subfolder=subfolder)
        model.generation_config = GenerationConfig.from_model_config(texts)
