"""transformers models from `.ckptz` files are those from the files that were compressed."""

import doctest
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import ckptz
import ckptz.torch
from ckptz.errors import (
    ChecksumError,
    ConfigError,
    CorruptionError,
    FormatError,
    LimitError,
    MissingBaseError,
    UnsupportedError,
)
from ckptz.integrations import transformers as integration
from ckptz.integrations.transformers import from_pretrained, push_to_hub
from ckptz.torch import save_file, save_model
from tests.support.hub_support import local_hub
from tests.support.transformers_support import (
    AUTO,
    IDS,
    MAKERS,
    SPECIAL,
    WAYS,
    check_same,
    compress,
    expected,
    folders,
    load,
    make,
    outputs,
    settings,
    ties,
    torch_folder,
    transformers,
)

pytestmark = pytest.mark.apps

# --- the same model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_packed_folder_gives_the_same_model(name: str, way: str) -> None:
    _, packed = folders(name)
    model = load(way, AUTO[name], packed)
    check_same(model, expected(name))
    assert model.name_or_path == model.config.name_or_path == str(packed)


@pytest.mark.parametrize("name", MAKERS)
def test_the_class_of_the_model_will_do(name: str) -> None:
    check_same(from_pretrained(type(expected(name)), folders(name)[1]), expected(name))


def test_some_of_these_models_are_tied() -> None:
    tied_names = {name: ties(expected(name)) for name in MAKERS}
    assert tied_names["gpt2"] == [{"lm_head.weight", "transformer.wte.weight"}]
    assert len(tied_names["t5"][0]) >= 3
    assert tied_names["bert"] == tied_names["llama"] == []


def test_a_loaded_model_trains_and_saves(tmp_path: Path) -> None:
    model = from_pretrained(AUTO["gpt2"], folders("gpt2")[1])
    model.train()(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(outputs(model.eval()), outputs(expected("gpt2")))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(AUTO["gpt2"].from_pretrained(tmp_path / "saved")), outputs(model))


@pytest.mark.parametrize(("name", "way"), [("gpt2", "own"), ("t5", "low memory")])
def test_a_kmeans_file_loads_as_it_decodes(name: str, way: str, tmp_path: Path) -> None:
    [report] = compress(folders(name)[0], output=tmp_path / "packed", config=ckptz.KMeans(levels=16))
    assert report.n_lossy > 3
    model, exact = load(way, AUTO[name], tmp_path / "packed"), expected(name)
    decoded, state = ckptz.torch.load_file(tmp_path / "packed" / "model.ckptz"), model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in decoded.items())
    assert set(state) == set(exact.state_dict())
    assert settings(model) == settings(exact)
    assert 0 < (outputs(model) - outputs(exact)).norm() / outputs(exact).norm() < 0.3


@pytest.mark.parametrize(("name", "way"), [("gpt2", "own"), ("t5", "low memory")])
def test_a_folder_of_torch_files_keeps_its_tied_names(name: str, way: str, tmp_path: Path) -> None:
    original, packed = torch_folder(name, tmp_path)
    assert len(ckptz.safe_open(packed / "pytorch_model.ckptz", "pt").keys()) < len(make(name).state_dict())
    check_same(load(way, AUTO[name], packed), AUTO[name].from_pretrained(original))


def test_one_torch_file_is_a_model_too(tmp_path: Path) -> None:
    model = make("bert")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    compress(tmp_path / "model.pt", output=tmp_path / "model.ckptz")
    loaded = from_pretrained(type(model), tmp_path)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize("what", ["nested", "a view", "a list"])
def test_a_torch_file_that_is_no_state_dict_is_refused(what: str, tmp_path: Path) -> None:
    model = make("bert")
    model.config.save_pretrained(tmp_path)
    state, buffer = model.state_dict(), torch.zeros(9)
    view = {**state, "a": buffer[:5], "b": buffer[3:]}
    torch.save({"nested": {"model": state}, "a view": view, "a list": [buffer]}[what], tmp_path / "model.pt")
    compress(tmp_path / "model.pt", output=tmp_path / "model.ckptz")
    with pytest.raises(UnsupportedError, match=r"model\.ckptz.*(ckptz restore|not a state_dict)"):
        from_pretrained(type(model), tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_a_delta_loads_with_its_base(way: str, tmp_path: Path) -> None:
    original, packed = folders("llama")
    tuned = AUTO["llama"].from_pretrained(original)
    with torch.no_grad():
        for i, parameter in enumerate(tuned.parameters()):
            parameter.view(-1)[: i + 3] *= 1.5
    tuned.save_pretrained(tmp_path / "tuned", max_shard_size="40KB")
    base = Path(shutil.copy(packed / "model.ckptz", tmp_path / "base.ckptz"))
    compress(tmp_path / "tuned", output=tmp_path / "delta", base=base)
    assert (tmp_path / "delta" / "model.ckptz").stat().st_size < base.stat().st_size / 2
    check_same(load(way, AUTO["llama"], tmp_path / "delta"), tuned)
    (link,) = (tmp_path / "delta").glob("base-*.ckptz")  # which completes the folder
    link.unlink()
    with pytest.raises(MissingBaseError, match=r"base-\w+\.ckptz"):
        load(way, AUTO["llama"], tmp_path / "delta")
    check_same(load(way, AUTO["llama"], tmp_path / "delta", {"search_path": [tmp_path]}), tuned)
    shutil.move(base, tmp_path / "delta")
    check_same(load(way, AUTO["llama"], tmp_path / "delta"), tuned)


# --- which files -----------------------------------------------------------------------------------------


def shards_packed_one_by_one(packed: Path) -> list[Path]:
    original, _ = folders("bert")
    shutil.copytree(original, packed, ignore=shutil.ignore_patterns("*.safetensors*"))
    compress(*sorted(original.glob("*.safetensors")), output=packed)
    return sorted(packed.glob("*.ckptz"))


@pytest.mark.parametrize("way", WAYS)
def test_shards_may_be_packed_one_by_one(way: str, tmp_path: Path) -> None:
    assert len(shards_packed_one_by_one(tmp_path / "packed")) > 2
    check_same(load(way, AUTO["bert"], tmp_path / "packed"), expected("bert"))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    missing = shards_packed_one_by_one(tmp_path / "packed")[1]
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=missing.name):
        from_pretrained(AUTO["bert"], tmp_path / "packed")


def test_shards_of_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    _, packed = folders("bert")
    names = ["model-00001-of-00001.ckptz", "model-00001-of-00002.ckptz"]
    for name in names:
        shutil.copy(packed / "model.ckptz", tmp_path / name)
    shutil.copy(packed / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="several checkpoints"):
        from_pretrained(AUTO["bert"], tmp_path)
    check_same(from_pretrained(AUTO["bert"], tmp_path, files=names[0]), expected("bert"))
    with pytest.raises(CorruptionError, match="another file of the model"):
        from_pretrained(AUTO["bert"], tmp_path, files=names)


def test_files_of_other_names_are_named_by_the_caller(tmp_path: Path) -> None:
    _, packed = folders("gpt2")
    shutil.copytree(packed, tmp_path / "x")
    (tmp_path / "x" / "model.ckptz").rename(tmp_path / "x" / "step-9.ckptz")
    with pytest.raises(ConfigError, match=r"files=.*step-9\.ckptz"):
        from_pretrained(AUTO["gpt2"], tmp_path / "x")
    check_same(from_pretrained(AUTO["gpt2"], tmp_path / "x", files="step-9.ckptz"), expected("gpt2"))
    with pytest.raises(FileNotFoundError, match="step-8"):
        from_pretrained(AUTO["gpt2"], tmp_path / "x", files="step-8.ckptz")
    with pytest.raises(ConfigError, match="none"):
        from_pretrained(AUTO["gpt2"], tmp_path / "x", files=[])


def test_a_folder_that_was_packed_in_place_gives_the_packed_weights(tmp_path: Path) -> None:
    shutil.copytree(folders("gpt2")[0], tmp_path / "both")
    compress(tmp_path / "both", output=tmp_path / "both", config=ckptz.KMeans(levels=4))
    packed = from_pretrained(AUTO["gpt2"], tmp_path / "both")
    assert not torch.equal(outputs(packed), outputs(expected("gpt2")))


# --- arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "is_in_config"),
    [
        ({}, True),
        *((arguments, False) for arguments in ({}, {"dtype": None}, {"dtype": "auto"})),
        ({"dtype": "float16"}, True),
        ({"dtype": torch.float32}, False),
    ],
    ids=str,
)
def test_dtypes_are_chosen_as_by_transformers(
    dtype: dict[str, Any], is_in_config: bool, way: str, tmp_path: Path
) -> None:
    targets = [tmp_path / kind for kind in ("original", "packed")]
    for source, target in zip(folders("llama"), targets, strict=True):
        shutil.copytree(source, target)
        config = json.loads((target / "config.json").read_text())
        if not is_in_config:
            del config["dtype"]
        (target / "config.json").write_text(json.dumps(config))
    check_same(
        load(way, AUTO["llama"], targets[1], **dtype), AUTO["llama"].from_pretrained(targets[0], **dtype)
    )


ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "settings": ("bert", {"output_attentions": True, "hidden_dropout_prob": 0.5}),
    "attention": ("bert", {"attn_implementation": "eager"}),
    "new head": ("bert", {"num_labels": 5, "ignore_mismatched_sizes": True}),
    "old dtype": ("gpt2", {"torch_dtype": torch.float16}),
    "generation": ("gpt2", {"generation_config": transformers.GenerationConfig(max_length=7, **SPECIAL)}),
    "hub arguments": ("t5", {"local_files_only": True, "revision": "main", "use_safetensors": True}),
}


@pytest.mark.parametrize("kind", ["auto", "class"])
@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_have_the_same_effect_as_in_transformers(what: str, kind: str) -> None:
    name, arguments = ARGUMENTS[what]
    original, packed = folders(name)
    loader = AUTO[name] if kind == "auto" else type(expected(name))
    torch.manual_seed(5)  # for a new head
    theirs = loader.from_pretrained(original, **arguments)
    torch.manual_seed(5)
    check_same(from_pretrained(loader, packed, **arguments), theirs)


def test_arguments_of_the_model_reach_it() -> None:
    original, packed = folders("bert")
    loader = transformers.BertModel
    model = from_pretrained(loader, packed, add_pooling_layer=False)
    theirs = loader.from_pretrained(original, add_pooling_layer=False)
    assert model.pooler is None
    assert list(model.state_dict()) == list(theirs.state_dict())


def test_loading_info_is_given_as_by_transformers() -> None:
    original, packed = folders("bert")
    loader = transformers.BertForMaskedLM  # has a head that the file lacks
    model, info = from_pretrained(loader, packed, output_loading_info=True)
    assert info == loader.from_pretrained(original, output_loading_info=True)[1]
    assert info["missing_keys"]
    assert info["unexpected_keys"]
    assert isinstance(model, loader)


@pytest.mark.parametrize("kind", ["auto", "class"])
def test_a_configuration_may_be_handed_over(kind: str) -> None:
    original, packed = folders("gpt2")
    loader = AUTO["gpt2"] if kind == "auto" else transformers.GPT2LMHeadModel
    config = transformers.AutoConfig.from_pretrained(original, attn_pdrop=0.5)
    model = from_pretrained(loader, packed, config=config)
    assert model.config.attn_pdrop == 0.5
    check_same(model, loader.from_pretrained(original, config=config))


def test_variants_and_subfolders_are_found(tmp_path: Path) -> None:
    make("gpt2").half().save_pretrained(tmp_path / "a" / "sub", variant="fp16")
    (tmp_path / "b").mkdir()
    compress(tmp_path / "a" / "sub", output=tmp_path / "b" / "sub")
    assert (tmp_path / "b" / "sub" / "model.fp16.ckptz").is_file()
    where = {"subfolder": "sub", "variant": "fp16"}
    theirs = AUTO["gpt2"].from_pretrained(tmp_path / "a", **where)
    check_same(from_pretrained(AUTO["gpt2"], tmp_path / "b", **where), theirs)
    with pytest.raises(ConfigError, match=r"model\.fp16\.ckptz"):
        from_pretrained(AUTO["gpt2"], tmp_path / "b", subfolder="sub")


def test_old_folders_have_generation_settings_in_their_config(tmp_path: Path) -> None:
    targets = [tmp_path / kind for kind in ("original", "packed")]
    for source, target in zip(folders("t5"), targets, strict=True):
        shutil.copytree(source, target)
        (target / "generation_config.json").unlink()
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"num_beams": 3, "max_length": 9}))
    theirs = AUTO["t5"].from_pretrained(targets[0])
    assert theirs.generation_config.num_beams == 3
    check_same(from_pretrained(AUTO["t5"], targets[1]), theirs)


CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own"
    def __init__(self, width=3, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.width, config.width)
        self.post_init()
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_model_may_bring_its_code_if_it_is_trusted(way: str, tmp_path: Path) -> None:
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config = {"auto_map": classes, "model_type": "own", "width": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(CODE)
    weights = {"layer.weight": torch.rand(4, 4), "layer.bias": torch.rand(4)}
    ckptz.torch.save_file(weights, tmp_path / "model.ckptz")
    model = load(way, transformers.AutoModel, tmp_path, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(way, transformers.AutoModel, tmp_path, trust_remote_code=False)


# --- memory, damage, refusals ----------------------------------------------------------------------------


def test_low_memory_decodes_a_tensor_at_a_time() -> None:
    _, packed = folders("gpt2")
    sizes = [t.numel() * 4 for t in ckptz.torch.load_file(packed / "model.ckptz").values()]
    for way, enough in (("own", sum(sizes)), ("low memory", max(sizes))):
        assert load(way, AUTO["gpt2"], packed, {"max_decoded_bytes": enough, "jobs": 1})
        with pytest.raises(LimitError, match=r"model\.ckptz"):
            load(way, AUTO["gpt2"], packed, {"max_decoded_bytes": enough - 1})


@pytest.mark.parametrize("way", WAYS)
def test_damage_is_an_error_and_no_model(way: str, tmp_path: Path) -> None:
    shutil.copytree(folders("gpt2")[1], tmp_path / "x")
    file = tmp_path / "x" / "model.ckptz"
    content = file.read_bytes()
    for at in (len(content) // 3, len(content) // 2):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ChecksumError, match=r"model\.ckptz"):
            load(way, AUTO["gpt2"], tmp_path / "x")
    file.write_bytes(content[:-5])
    with pytest.raises(FormatError):
        load(way, AUTO["gpt2"], tmp_path / "x")


def test_what_is_no_folder_of_a_model_is_refused(tmp_path: Path) -> None:
    original, packed = folders("gpt2")
    with pytest.raises(ConfigError, match="name on the Hub"):
        from_pretrained(AUTO["gpt2"], tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no model\.ckptz.*none"):
        from_pretrained(AUTO["gpt2"], original)
    for name in ("state_dict", "gguf_file"):
        with pytest.raises(ConfigError, match=name):
            from_pretrained(AUTO["gpt2"], packed, **{name: {}})
    shutil.copy(packed / "model.ckptz", tmp_path)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):  # the message of transformers
        from_pretrained(AUTO["gpt2"], tmp_path)


def test_what_would_be_left_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folders("gpt2")[1], tmp_path / "x")
    (tmp_path / "x" / "custom_generate").mkdir()
    (tmp_path / "x" / "custom_generate" / "generate.py").write_text("")
    (tmp_path / "x" / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(integration, "is_peft_available", lambda: False)
    assert from_pretrained(AUTO["gpt2"], tmp_path / "x")  # as transformers without PEFT
    with pytest.raises(UnsupportedError, match="generate"):
        from_pretrained(AUTO["gpt2"], tmp_path / "x", trust_remote_code=True)
    monkeypatch.setattr(integration, "is_peft_available", lambda: True)
    with pytest.raises(UnsupportedError, match="adapter"):
        from_pretrained(AUTO["gpt2"], tmp_path / "x")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(integration)
    assert results.attempted > 5
    assert results.failed == 0


def test_a_name_on_the_hub_is_fetched_without_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = folders("gpt2")
    request: dict[str, Any] = {}

    def stand_in(name: str, **options: Any) -> str:
        request.update(options, name=name)
        return str(packed)

    monkeypatch.setattr("huggingface_hub.snapshot_download", stand_in)
    loaded = from_pretrained(AUTO["gpt2"], "org/name", revision="v1")
    assert (request["name"], request["revision"]) == ("org/name", "v1")
    assert "*.ckptz" in request["allow_patterns"]
    assert "*.safetensors" not in request["allow_patterns"]
    expected = from_pretrained(AUTO["gpt2"], packed).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_a_folder_goes_to_the_hub_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = make("gpt2"), tmp_path / "packed"
    model.save_pretrained(packed)  # with plain weights, which are not downloaded
    first = {name: value + 1 for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(first, packed / "base-1.ckptz")
    save_model(model, packed / "model.ckptz", base=packed / "base-1.ckptz")
    with local_hub(tmp_path / "hub") as url:
        for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
            value = getattr(huggingface_hub.constants, name)
            monkeypatch.setattr(huggingface_hub.constants, name, value.replace("https://huggingface.co", url))
        push_to_hub(packed, "org/name", token="hf_secret")
        loaded = from_pretrained(transformers.AutoModelForCausalLM, "org/name", cache_dir=tmp_path / "cache")
    names = {path.name for path in (tmp_path / "hub").iterdir()}
    assert names == {"base-1.ckptz", "model.ckptz", "config.json", "generation_config.json"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_folder_that_nobody_could_load_is_not_uploaded(tmp_path: Path) -> None:
    model = make("gpt2")
    save_model(model, tmp_path / "base-1.ckptz")
    save_model(model, tmp_path / "model.ckptz", base=tmp_path / "base-1.ckptz")
    (tmp_path / "base-1.ckptz").unlink()
    with pytest.raises(MissingBaseError, match=r"base-1\.ckptz"):
        push_to_hub(tmp_path, "org/name")
    with pytest.raises(ConfigError, match=r"no model\.ckptz"):
        push_to_hub(tmp_path.parent, "org/name")
    with pytest.raises(ConfigError, match="is no folder"):
        push_to_hub(tmp_path / "none", "org/name")
