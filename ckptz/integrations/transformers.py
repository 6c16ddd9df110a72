"""transformers models from folders with `.ckptz` files.

    from transformers import AutoModel
    from ckptz.integrations.transformers import from_pretrained

    model = from_pretrained(AutoModel, "packed")

`from_pretrained` stands on what transformers documents and changes nothing in it. `enable` patches
transformers, so that code which calls its `from_pretrained` finds `.ckptz` files too. See
docs/transformers.md.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.utils import is_peft_available, logging

from ckptz.api.safe_open import PathLike
from ckptz.errors import ConfigError, UnsupportedError
from ckptz.integrations.model_files import (
    Reader,
    empty_like,
    first_float,
    merged,
    named_files,
    nothing_found,
    weight_files,
)
from ckptz.store.resolve import SUFFIX
from ckptz.torch import save_file

TESTED: Final = ((5, 0), (5, 23))  # first and last transformers that tests/test_transformers.py ran with

__all__ = ["disable", "enable", "from_pretrained"]


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
        folder: what `ckptz compress FOLDER -o OUTPUT` writes, or any with `model.ckptz`,
            `pytorch_model.ckptz` or numbered shards of these. Other weights in it are not looked at. Or the
            name of such on the Hub, "org/name", of which huggingface_hub keeps a copy.
        model_args: for the model's `__init__`.
        files: the `.ckptz` files to load, where they have other names.
        low_memory: decode each tensor when transformers takes it, which leaves no second copy of the
            model behind where it goes to another dtype or device; else all are decoded first.
        search_path: more folders in which the bases of a delta may lie.
        max_decoded_bytes: most bytes to decode at once; by default, the memory that is free.
        jobs: threads that decode, all cores by default.
        kwargs: everything that `model_class.from_pretrained` takes: `dtype`, `device_map`, `config`,
            `variant`, `subfolder`, `output_loading_info`, ...

    Returns:
        What `model_class.from_pretrained` returns.

    Raises:
        ConfigError: not a folder, or no weights in it.
        FileNotFoundError: a shard is missing.
        FormatError: a file is damaged.
        MissingBaseError: a base of a delta is not found.
        UnsupportedError: the folder needs what this way does not offer; `enable` may.

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
    reader = Reader(search_path=search_path, max_decoded_bytes=max_decoded_bytes, jobs=jobs)
    config, options = _config(model_class, folder, kwargs)
    real_class, config = _class_and_config(model_class, config, kwargs.get("trust_remote_code"))
    state = merged(paths, reader.slices if low_memory else reader.tensors)
    asked = options.get("dtype") or options.get("torch_dtype")
    if low_memory and asked in (None, "auto") and getattr(config, "dtype", None) is None:
        options["dtype"] = first_float(state)
    loaded = real_class.from_pretrained(None, *model_args, config=config, state_dict=state, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    _finish(model, folder, kwargs)
    return loaded


def _fetched(folder: PathLike, kwargs: Mapping[str, Any]) -> PathLike:
    """The folder itself, or where huggingface_hub keeps what has this name on the Hub, less other weights."""
    if not _HUB_NAME.fullmatch(os.fspath(folder)) or Path(folder).is_dir():
        return folder
    options = {name: kwargs[name] for name in _FOR_HUB if kwargs.get(name) is not None}
    return str(huggingface_hub.snapshot_download(os.fspath(folder), allow_patterns=_FETCHED, **options))


_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_FOR_HUB: Final = ("revision", "cache_dir", "token", "force_download", "local_files_only")
_FETCHED: Final = [f"*{SUFFIX}", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def _place(folder: PathLike, kwargs: Mapping[str, Any]) -> Path:
    """The folder of the weights."""
    place = Path(folder) / (kwargs.get("subfolder") or "")
    if not place.is_dir():
        raise ConfigError(f"{place}: neither a folder nor a name on the Hub such as org/name")
    for name in ("state_dict", "gguf_file"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"{name}: the weights come from the {SUFFIX} files of {place}")
    if is_peft_available() and (place / "adapter_config.json").is_file():
        raise UnsupportedError(f"{place}: holds an adapter, which would stay out; load it through enable()")
    if kwargs.get("trust_remote_code") and (place / "custom_generate" / "generate.py").is_file():
        raise UnsupportedError(f"{place}: holds a generate() of its own; load it through enable()")
    return place


def _config(model_class: Any, folder: PathLike, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Find the configuration, and the arguments that are not part of it."""
    options, config = dict(kwargs), kwargs.get("config")
    options.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return config, options
    # As the automatic classes do it: these are for the weights, even where configurations know them.
    kept = {name: options.pop(name) for name in _FOR_WEIGHTS if name in options}
    loader = getattr(model_class, "config_class", None) or AutoConfig
    config, rest = loader.from_pretrained(
        folder if config is None else config, return_unused_kwargs=True, **options
    )
    return config, rest | kept


_FOR_WEIGHTS: Final = ("dtype", "torch_dtype", "quantization_config")


def _class_and_config(model_class: Any, config: Any, trust_remote_code: bool | None) -> tuple[Any, Any]:
    """The model's class, which automatic classes tell only by making one; here without memory."""
    if getattr(model_class, "config_class", None) is not None:
        return model_class, config
    with torch.device("meta"):
        made = model_class.from_config(config, trust_remote_code=trust_remote_code)
    # Some make a text model from the configuration of one that also takes pictures.
    return type(made), config if type(made.config) is type(config) else config.get_text_config()


def _finish(model: Any, folder: PathLike, kwargs: Mapping[str, Any]) -> None:
    """Do what transformers does with a folder once the weights are in their places."""
    model.name_or_path = model.config.name_or_path = str(folder)
    if not model.can_generate() or kwargs.get("generation_config") is not None:
        return
    subfolder = kwargs.get("subfolder") or ""
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, subfolder=subfolder)
    except OSError:  # older folders have it in their config.json
        texts, _ = PreTrainedConfig.get_config_dict(folder, subfolder=subfolder)
        model.generation_config = GenerationConfig.from_model_config(texts)


# What is patched, by name in transformers.modeling_utils, with the parameters that the patch relies on.
_PATCHED: Final = {
    "_get_resolved_checkpoint_files": {
        *("pretrained_model_name_or_path", "variant", "gguf_file", "use_safetensors"),
        *("transformers_explicit_filename", "download_kwargs"),
    },
    "load_state_dict": {"checkpoint_file", "map_location"},
}
_lock = threading.Lock()


class _Patch:
    """transformers' two functions that find and that read files of weights, and what stands for them.

    transformers binds safetensors' `safe_open` at import and asks it only for files named
    `.safetensors`. What is patched here is looked up at each call, so the order of imports is free.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._is_on = False
        self._originals = {name: getattr(modeling_utils, name) for name in _PATCHED}
        self._own = {"_get_resolved_checkpoint_files": self.find, "load_state_dict": self.load}

    def apply(self) -> None:
        """Put it into transformers."""
        self._is_on = True
        for name, function in self._own.items():
            setattr(modeling_utils, name, function)

    def undo(self) -> None:
        """Take it out again; where something else was put over it, it stays there and does nothing."""
        self._is_on = False
        for name, original in self._originals.items():
            if getattr(modeling_utils, name) == self._own[name]:
                setattr(modeling_utils, name, original)

    def find(self, *args: Any, **kwargs: Any) -> Any:
        """Find (files, None); transformers' own weights go first."""
        original = self._originals["_get_resolved_checkpoint_files"]
        try:
            return original(*args, **kwargs)
        except OSError:
            asked = inspect.signature(original).bind(*args, **kwargs).arguments
            if not self._is_on or not (files := _asked_files(asked)):
                raise
            return [str(file) for file in files], None

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load tensors by name, or slices: transformers reads either when it takes them."""
        original = self._originals["load_state_dict"]
        asked = inspect.signature(original).bind(*args, **kwargs).arguments
        file = Path(asked["checkpoint_file"])
        if not self._is_on or file.suffix != SUFFIX:
            return original(*args, **kwargs)
        if (where := asked.get("map_location")) is None:
            return self._reader.slices(file)
        if torch.device(where).type == "meta":  # asks for shapes and dtypes
            return {name: empty_like(part) for name, part in self._reader.slices(file).items()}
        return {name: tensor.to(where) for name, tensor in self._reader.tensors(file).items()}


def _asked_files(asked: Mapping[str, Any]) -> list[Path]:
    """The `.ckptz` files that serve a search of transformers."""
    folder = asked.get("pretrained_model_name_or_path")
    is_named = asked.get("gguf_file") is not None or asked.get("transformers_explicit_filename") is not None
    if folder is None or is_named or asked.get("use_safetensors") is False:
        return []
    place = Path(folder) / ((asked.get("download_kwargs") or {}).get("subfolder") or "")
    return weight_files(place, asked.get("variant")) if place.is_dir() else []


_active: list[_Patch] = []


def enable(
    *, search_path: Sequence[PathLike] = (), max_decoded_bytes: int | None = None, jobs: int | None = None
) -> None:
    """Let `from_pretrained` of transformers' classes find `.ckptz` files in local folders.

    They are taken where transformers finds no weights of its own. Two functions of transformers are
    replaced in this process; a small model is loaded to see that it works, else nothing stays
    replaced. Calling it again changes the options.

    Args:
        search_path: more folders in which the bases of a delta may lie.
        max_decoded_bytes: most bytes to decode at once; by default, the memory that is free.
        jobs: threads that decode, all cores by default.

    Raises:
        UnsupportedError: this version of transformers is not among the tested ones, or is not what
            it was; `from_pretrained` of this module needs no patch.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from ckptz.torch import save_model
        >>> sizes = dict(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> model = BertModel(BertConfig(**sizes))
        >>> model.config.save_pretrained("packed")
        >>> save_model(model, "packed/model.ckptz")
        >>> enable()
        >>> type(BertModel.from_pretrained("packed")).__name__
        'BertModel'
        >>> disable()
    """
    reader = Reader(search_path=search_path, max_decoded_bytes=max_decoded_bytes, jobs=jobs)
    with _lock:
        _undo()
        _check_transformers()
        patch = _Patch(reader)
        patch.apply()
        try:
            _probe()
        except BaseException:
            patch.undo()
            raise
        _active.append(patch)


def disable() -> None:
    """Undo `enable`; without effect where it was not called."""
    with _lock:
        _undo()


def _undo() -> None:
    while _active:
        _active.pop().undo()


def _unsupported(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"transformers {transformers.__version__}: {reason}, so enable() leaves it alone; "
        "use ckptz.integrations.transformers.from_pretrained, or ckptz restore"
    )


def _check_transformers() -> None:
    """Refuse what the patch was not tested with."""
    numbers = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    first, last = (".".join(map(str, version)) for version in TESTED)
    if not numbers or not TESTED[0] <= (int(numbers[1]), int(numbers[2])) <= TESTED[1]:
        raise _unsupported(f"outside of the tested versions {first} to {last}")
    for name, parameters in _PATCHED.items():
        function = getattr(modeling_utils, name, None)
        if not callable(function) or not parameters <= set(inspect.signature(function).parameters):
            raise _unsupported(f"its {name} is missing or takes other arguments")


class _ProbeModel(PreTrainedModel):  # type: ignore[misc]  # transformers is not followed by mypy
    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)
        self.post_init()


def _probe() -> None:
    """Load a small model through the patched functions."""
    with torch.device("cpu"):
        weights = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.arange(2.0)}
    with tempfile.TemporaryDirectory(prefix="ckptz-") as folder, _no_progress_bar():
        save_file(weights, Path(folder) / f"model{SUFFIX}")
        try:
            state = _ProbeModel.from_pretrained(folder, config=PreTrainedConfig()).state_dict()
        except Exception as error:
            raise _unsupported(f"a trial failed ({type(error).__name__}: {error})") from error
    if not all(torch.equal(state[name].cpu(), tensor) for name, tensor in weights.items()):
        raise _unsupported("a trial gave other weights")


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
