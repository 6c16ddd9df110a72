"""PEFT adapters in checkpoints of the Trainer, restored to the files that PEFT itself writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptz
from ckptz import Grid
from ckptz.errors import UnsupportedError
from ckptz.foreign.adapters import STORED_PREFIX
from ckptz.integrations.linked import ChainOptions
from ckptz.torch import load_file, load_state, save_state
from tests.support.trainer_support import OPTIONS, Trainer, check_equal, final, tokens, trainer
from tests.support.transformers_support import IDS, transformers

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.apps, pytest.mark.filterwarnings("ignore::UserWarning")]

QUERIES = {"target_modules": ["q_proj", "v_proj"]}
PROMPTS = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=2, modules_to_save=["lm_head"], **QUERIES),
    "LoRA with biases": lambda: peft.LoraConfig(r=2, bias="all", **QUERIES),
    "LoRA with tokens": lambda: peft.LoraConfig(r=2, trainable_token_indices=[1, 5], **QUERIES),
    "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, **QUERIES),
    "rsLoRA": lambda: peft.LoraConfig(r=2, use_rslora=True, **QUERIES),
    "LoHa": lambda: peft.LoHaConfig(r=2, **QUERIES),
    "LoKr": lambda: peft.LoKrConfig(r=2, **QUERIES),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=9, tinit=1, tfinal=2, **QUERIES),
    "IA3": lambda: peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, **QUERIES),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, **QUERIES),
    "VeRA": lambda: peft.VeraConfig(r=2, **QUERIES),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=9, **QUERIES),
    "HRA": lambda: peft.HRAConfig(r=2, **QUERIES),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(**PROMPTS),
    "prefix tuning": lambda: peft.PrefixTuningConfig(
        prefix_projection=True, encoder_hidden_size=16, **PROMPTS
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=16, **PROMPTS),
    "VB-LoRA": lambda: peft.VBLoRAConfig(
        r=2, num_vectors=8, vector_length=8, save_only_topk_weights=True, **QUERIES
    ),
    "MiSS": lambda: peft.MissConfig(r=2, **QUERIES),
}


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4}
    vocabulary = {"vocab_size": 96, "max_position_embeddings": 32, "pad_token_id": 0, "attention_bias": True}
    config = transformers.LlamaConfig(**sizes, **vocabulary)
    return transformers.LlamaForCausalLM(config).train()


def adapted(kind: str, *names: str) -> Any:
    """Return a model with adapters of one kind, the last of which is active."""
    model = peft.get_peft_model(base(), KINDS[kind](), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, KINDS[kind]())
        model.set_adapter(name)
    return model


def trained(folder: Path, model: Any, resume: Any = None, kind: type = Trainer, **options: Any) -> Any:
    """Train for two steps or by `settings`, with our Trainer or another `kind`; return the Trainer."""
    settings = {"max_steps": 2, "save_total_limit": None} | options.pop("settings", {})
    args = trainer(folder, transformers.Trainer, None, **settings).args
    defaults = {"ckptz": OPTIONS, "trainable_only": True} if kind is Trainer else {}
    run = kind(model, args, train_dataset=tokens(), **defaults | options)
    run.train(resume_from_checkpoint=resume)
    return run


def check_same_files(folder: Path, expected: Path) -> None:
    """Require the files that PEFT wrote: weights with equal keys and values, other files with equal bytes."""
    files = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
    of_trainer = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        *map(str, files),
        *of_trainer,
    }
    for file in files:
        if file.suffix == ".safetensors":
            check_equal(load_file(folder / file), load_file(expected / file))
        else:
            assert (folder / file).read_bytes() == (expected / file).read_bytes(), file


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        outputs: torch.Tensor = model.eval()(IDS).logits
    return outputs


@pytest.mark.parametrize("name", ["default", "tuned"])
@pytest.mark.parametrize("kind", KINDS)
def test_restored_adapter_files_are_those_that_peft_writes(kind: str, name: str, tmp_path: Path) -> None:
    model = adapted(kind, name)
    trained(tmp_path, model, settings={"max_steps": 1})
    model.save_pretrained(tmp_path / "expected")
    ckptz.restore(tmp_path / "checkpoint-1", tmp_path / "restored")
    check_same_files(tmp_path / "restored", tmp_path / "expected")
    loaded = {}
    for folder in ("restored", "expected"):
        adapter = tmp_path / folder / ("" if name == "default" else name)
        loaded[folder] = logits(peft.PeftModel.from_pretrained(base(), adapter))
    assert torch.equal(loaded["restored"], loaded["expected"])
    if kind != "VB-LoRA":  # PEFT keeps only its largest weights
        assert torch.equal(loaded["restored"], logits(model))


@pytest.mark.parametrize("kind", ["LoRA", "prefix tuning"])
def test_several_adapters_are_restored_to_separate_folders(kind: str, tmp_path: Path) -> None:
    def run(folder: str, *options: Any) -> Any:
        model = adapted(kind, "default", "first", "second")
        return trained(tmp_path / folder, model, *options, settings={"max_steps": 3})

    uninterrupted = run("run")
    check_equal(final(run("on", str(tmp_path / "run" / "checkpoint-2"))), final(uninterrupted))
    uninterrupted.model.save_pretrained(tmp_path / "expected")
    ckptz.restore(tmp_path / "run" / "checkpoint-3", tmp_path / "restored")
    check_same_files(tmp_path / "restored", tmp_path / "expected")
    configs = (tmp_path / "restored").rglob("adapter_config.json")
    assert {path.parent.name for path in configs} == {"restored", "first", "second"}
    if kind == "LoRA":  # PEFT's files of prefix tuning lack what training needs
        ckptz.restore(tmp_path / "run" / "checkpoint-2", tmp_path / "plain")
        resumed = run("plainly", str(tmp_path / "plain"), transformers.Trainer)
        check_equal(final(resumed), final(uninterrupted))


def test_adapters_of_transformers_are_restored_as_it_writes_them(tmp_path: Path) -> None:
    model = base()
    model.add_adapter(peft.LoraConfig(r=2, **QUERIES), "other")
    model.add_adapter(peft.LoraConfig(r=2, **QUERIES), "tuned")
    model.set_adapter("tuned")
    trained(tmp_path, model, settings={"max_steps": 1})
    model.save_pretrained(tmp_path / "expected")
    ckptz.restore(tmp_path / "checkpoint-1", tmp_path / "restored")
    check_same_files(tmp_path / "restored", tmp_path / "expected")
    model.set_adapter(["other", "tuned"])
    with pytest.raises(UnsupportedError, match="transformers saves one"):
        trained(tmp_path / "both", model, settings={"max_steps": 1})


def test_tensors_that_only_peft_files_have_stay_exact(tmp_path: Path) -> None:
    options = ChainOptions(config=Grid(min_elements=1))
    model = adapted("p-tuning", "default")
    trained(tmp_path, model, settings={"max_steps": 1}, ckptz=options)
    stored = load_state(tmp_path / "checkpoint-1" / "model.ckptz")
    assert not torch.equal(
        stored["prompt_encoder.default.embedding.weight"],
        model.state_dict()["prompt_encoder.default.embedding.weight"],
    )
    expected = peft.get_peft_model_state_dict(model)["prompt_embeddings"]
    assert torch.equal(stored[f"{STORED_PREFIX}:prompt_embeddings"], expected)
    model.save_pretrained(tmp_path / "expected")
    ckptz.restore(tmp_path / "checkpoint-1", tmp_path / "restored")  # read with the residual file
    check_same_files(tmp_path / "restored", tmp_path / "expected")


def test_an_adapter_without_a_record_of_its_keys_is_restored_by_rule(tmp_path: Path) -> None:
    model = adapted("DoRA", "default")
    trained(tmp_path, model, settings={"max_steps": 1})
    path = tmp_path / "checkpoint-1" / "model.ckptz"
    save_state(load_state(path), path)
    model.save_pretrained(tmp_path / "expected")
    ckptz.restore(tmp_path / "checkpoint-1", tmp_path / "restored")
    check_same_files(tmp_path / "restored", tmp_path / "expected")


def test_files_of_adapters_from_an_earlier_restore_are_named(tmp_path: Path) -> None:
    trained(tmp_path, adapted("LoRA", "default", "tuned"), settings={"max_steps": 1})
    (tmp_path / "restored" / "gone").mkdir(parents=True)
    (tmp_path / "restored" / "gone" / "adapter_model.safetensors").touch()
    report = ckptz.restore(tmp_path / "checkpoint-1", tmp_path / "restored")
    assert any("gone/adapter_model.safetensors" in note for note in report.notes)
    stale = tmp_path / "checkpoint-1" / "tuned" / "adapter_model.safetensors"
    stale.write_bytes(b"of another step")
    report = ckptz.restore(tmp_path / "checkpoint-1", tmp_path / "again")
    assert any("tuned/adapter_model.safetensors" in note for note in report.notes)
    assert load_file(tmp_path / "again" / "tuned" / "adapter_model.safetensors")


def test_an_adapter_of_a_compiled_layer_resumes(tmp_path: Path) -> None:
    def model() -> Any:
        compiled = adapted("LoRA", "tuned")
        layers = compiled.base_model.model.model.layers
        layers[0].self_attn = torch.compile(layers[0].self_attn, backend="eager")
        return compiled

    uninterrupted = trained(tmp_path, model())
    assert not any("mlp" in name for name in load_state(tmp_path / "checkpoint-1" / "model.ckptz"))
    resumed = trained(tmp_path / "on", model(), str(tmp_path / "checkpoint-1"))
    check_equal(final(resumed), final(uninterrupted))
