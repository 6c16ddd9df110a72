"""Small random models, folders with their original and compressed files, and the comparison of models."""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tests.support.api_support import bits

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

import ckptz  # noqa: E402
from ckptz.integrations.transformers import from_pretrained  # noqa: E402
from ckptz.verbs.compress import CompressReport  # noqa: E402

Model = Any
IDS = torch.arange(12).reshape(2, 6)
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
WAYS = ("own", "low memory")


def a_gpt2() -> Model:
    """Return a model with tied weights: the output layer is the input embedding."""
    sizes = {"vocab_size": 96, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **SPECIAL))


def a_bert() -> Model:
    """Return a model without tied weights, with buffers."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 80}
    config = transformers.BertConfig(vocab_size=96, max_position_embeddings=16, **sizes)
    return transformers.BertForSequenceClassification(config)


def a_t5() -> Model:
    """Return a model whose encoder, decoder and output layer share a weight."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 80, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=96, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def a_llama() -> Model:
    """Return a model in bf16 with fewer key heads than heads, and with buffers that are not saved."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=96, intermediate_size=80, max_position_embeddings=16, **sizes, **SPECIAL
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


MAKERS: dict[str, Callable[[], Model]] = {"gpt2": a_gpt2, "bert": a_bert, "t5": a_t5, "llama": a_llama}
AUTO = {
    "gpt2": transformers.AutoModelForCausalLM,
    "bert": transformers.AutoModelForSequenceClassification,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "llama": transformers.AutoModelForCausalLM,
}


def make(name: str) -> Model:
    """Return a model that has the same weights at each call."""
    torch.manual_seed(0)
    return MAKERS[name]().eval()


def compress(*inputs: Path, output: Path, **options: Any) -> list[CompressReport]:
    """Compress as `ckptz compress INPUTS -o OUTPUT` does."""
    return list(ckptz.compress(inputs, output, jobs=1, **options))


_ROOT = tempfile.TemporaryDirectory(prefix="ckptz-models-")


@functools.cache
def folders(name: str) -> tuple[Path, Path]:
    """Return a folder with several shards and its compressed copy; tests must not change them."""
    original, packed = Path(_ROOT.name) / name, Path(_ROOT.name) / f"{name}-packed"
    make(name).save_pretrained(original, max_shard_size="40KB")
    assert len(list(original.glob("*.safetensors"))) > 2
    compress(original, output=packed)
    assert [path.name for path in packed.glob("model*")] == ["model.ckptz"]
    return original, packed


@functools.cache
def expected(name: str) -> Model:
    """Return the model as transformers loads it from the shards; tests must not change it."""
    return AUTO[name].from_pretrained(folders(name)[0])


def torch_folder(name: str, at: Path) -> tuple[Path, Path]:
    """Return folders as `folders` does, with the weights in one torch file that has all tied names."""
    original, packed, model = at / "original", at / "packed", make(name)
    model.save_pretrained(original)
    (original / "model.safetensors").unlink()
    torch.save(model.state_dict(), original / "pytorch_model.bin")
    compress(original, output=packed)
    return original, packed


def load(way: str, loader: Any, folder: Path, reading: Any = None, **arguments: Any) -> Model:
    """Load a model from a compressed folder; `reading` has the arguments of ckptz."""
    return from_pretrained(loader, folder, low_memory=way == "low memory", **(reading or {}), **arguments)


def outputs(model: Model) -> torch.Tensor:
    """Return the logits of a model for fixed tokens."""
    with torch.no_grad():
        is_pair = model.config.is_encoder_decoder
        return model(IDS, **({"decoder_input_ids": IDS} if is_pair else {})).logits


def ties(model: Model) -> list[set[str]]:
    """Return the sets of names whose parameters share memory."""
    groups: dict[int, set[str]] = {}
    for name, tensor in model.state_dict().items():
        groups.setdefault(tensor.data_ptr(), set()).add(name)
    return sorted((names for names in groups.values() if len(names) > 1), key=min)


def settings(model: Model) -> list[Any]:
    """Return all properties of a model except its weights."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    generation = model.generation_config.to_dict() if model.can_generate() else None
    return [type(model), config, model.config._attn_implementation, generation, model.training, ties(model)]


def check_same(model: Model, other: Model) -> None:
    """Require that two models are equal to the bit and in all their settings."""
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in [*theirs.items(), *other.named_buffers()]:
        actual = ours[name] if name in ours else dict(model.named_buffers())[name]
        assert (actual.dtype, actual.shape, actual.device) == (tensor.dtype, tensor.shape, tensor.device), (
            name
        )
        assert bits(actual).tobytes() == bits(tensor).tobytes(), name
    assert settings(model) == settings(other)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in other.parameters()]
    assert torch.equal(outputs(model), outputs(other))
