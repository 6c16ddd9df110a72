"""`enable` and `disable`: what is patched, when it is refused, and that nothing is left half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptz.torch
from ckptz.errors import UnsupportedError
from ckptz.integrations import transformers as integration
from ckptz.integrations.transformers import disable, enable, from_pretrained
from tests.support.api_support import run_python
from tests.support.transformers_support import (
    AUTO,
    check_same,
    enabling,
    expected,
    folders,
    torch_folder,
    transformers,
)

pytestmark = pytest.mark.apps

modeling = transformers.modeling_utils
PAGE = Path(__file__).parent.parent / "docs" / "transformers.md"
NAMES = ("_get_resolved_checkpoint_files", "load_state_dict")


def patched() -> list[Any]:
    """What stands where `enable` puts its own."""
    return [getattr(modeling, name) for name in NAMES]


def test_disable_puts_back_what_was_there() -> None:
    before = patched()
    disable()
    assert patched() == before
    enable()
    assert all(now != was for now, was in zip(patched(), before, strict=True))
    enable()
    disable()
    assert patched() == before
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AUTO["gpt2"].from_pretrained(folders("gpt2")[1])


@pytest.mark.parametrize("version", ["4.57.6", "5.24.0", "5.24.0.dev0", "6.0.0", "unknown"])
def test_other_versions_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = patched()
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(UnsupportedError, match=rf"transformers {version}.*5\.0 to 5\.23.*from_pretrained"):
        enable()
    assert patched() == before


def test_the_version_that_this_suite_runs_with_is_tested() -> None:
    numbers = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert integration.TESTED[0] <= numbers <= integration.TESTED[1]


def test_the_page_names_the_tested_versions() -> None:
    first, last = (".".join(map(str, version)) for version in integration.TESTED)
    assert f"Outside of {first} to {last}" in PAGE.read_text()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["gone", "other arguments"])
def test_a_changed_transformers_is_left_alone(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "gone":
        monkeypatch.delattr(modeling, name)
    else:
        monkeypatch.setattr(modeling, name, lambda path: path)
    before = vars(modeling).copy()
    with pytest.raises(UnsupportedError, match=f"{name} is missing or takes other arguments"):
        enable()
    assert vars(modeling) == before


def save_more(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Save other weights than were meant."""
    ckptz.torch.save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)


def interrupt(*_: Any) -> None:
    """As Control-C would."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "instead", "error", "message"),
    [
        ("weight_files", lambda folder, variant: [], UnsupportedError, "a trial failed.*OSError"),
        ("save_file", save_more, UnsupportedError, "other weights"),
        ("save_file", interrupt, KeyboardInterrupt, "^$"),
    ],
    ids=["finds nothing", "other weights", "interrupted"],
)
def test_a_trial_that_fails_leaves_nothing_patched(
    name: str, instead: Any, error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = patched()
    monkeypatch.setattr(integration, name, instead)
    with pytest.raises(error, match=message):
        enable()
    assert patched() == before
    disable()


def test_a_trial_shows_nothing_and_leaves_the_progress_bar_as_it_was(capfd: Any) -> None:
    for is_shown in (True, False):
        if is_shown:
            transformers.utils.logging.enable_progress_bar()
        else:
            transformers.utils.logging.disable_progress_bar()
        with enabling():
            assert transformers.utils.logging.is_progress_bar_enabled() == is_shown
    assert "Loading" not in "".join(capfd.readouterr())


def test_who_wraps_the_patch_keeps_transformers_working() -> None:
    original, packed = folders("gpt2")
    before = patched()
    enable()
    ours = modeling.load_state_dict
    modeling.load_state_dict = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        check_same(AUTO["gpt2"].from_pretrained(packed), expected("gpt2"))
        disable()
        check_same(AUTO["gpt2"].from_pretrained(original), from_pretrained(AUTO["gpt2"], packed))
        with pytest.raises(Exception, match="Weights only load failed"):  # it is no file of torch
            modeling.load_state_dict(str(packed / "model.ckptz"))
    finally:
        modeling.load_state_dict = before[1]
    assert patched() == before


def test_only_searches_for_weights_are_answered() -> None:
    original, packed = folders("gpt2")
    rest = {"variant": None, "gguf_file": None, "user_agent": None, "is_remote_code": False}

    def find(folder: Path, use_safetensors: bool | None = None, **more: Any) -> list[str]:
        files, _ = modeling._get_resolved_checkpoint_files(
            str(folder), use_safetensors=use_safetensors, **rest, **more
        )
        return [Path(file).name for file in files]

    with enabling():
        assert find(packed) == find(packed, True) == ["model.ckptz"]
        assert "model.ckptz" not in find(packed, transformers_explicit_filename="adapter_model.safetensors")
        assert set(find(original)) == {path.name for path in original.glob("*.safetensors")}
        with pytest.raises(OSError, match="pytorch_model"):
            find(packed, False)
        with pytest.raises(OSError, match=r"model\.fp16"):
            modeling._get_resolved_checkpoint_files(
                str(packed), use_safetensors=None, **{**rest, "variant": "fp16"}
            )
        with pytest.raises(OSError, match=r"nobody/nothing|connect"):
            find(Path("nobody/nothing"))


def test_states_are_read_where_they_are_asked_for() -> None:
    original, packed = folders("llama")
    file, shard = str(packed / "model.ckptz"), str(next(original.glob("*.safetensors")))
    exact = dict(sorted(ckptz.torch.load_file(file).items()))
    with enabling():
        state = modeling.load_state_dict(file, map_location="cpu")
        assert list(state) == list(exact)
        assert all(torch.equal(state[name], tensor) for name, tensor in exact.items())
        for where in ("meta", torch.device("meta")):
            empty = modeling.load_state_dict(file, map_location=where)
            shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in exact.items()}
            assert {name: (tensor.shape, tensor.dtype) for name, tensor in empty.items()} == shapes
            assert all(tensor.is_meta for tensor in empty.values())
        assert modeling.load_state_dict(shard).keys() == safetensors.torch.load_file(shard).keys()


def test_a_tensor_that_goes_by_two_names_is_one(tmp_path: Path) -> None:
    _, packed = torch_folder("gpt2", tmp_path)
    with enabling():
        for where in ({}, {"map_location": "meta"}, {"map_location": "cpu"}):
            state = modeling.load_state_dict(str(packed / "pytorch_model.ckptz"), **where)
            one, other = state["lm_head.weight"], state["transformer.wte.weight"]
            assert one.shape == other.shape
            assert one.data_ptr() == other.data_ptr()


def test_the_order_of_imports_is_free_and_nothing_loads_transformers_unasked() -> None:
    code = f"""
import sys, ckptz, ckptz.torch, ckptz.integrations
assert "transformers" not in sys.modules
from ckptz.integrations.transformers import enable
enable()
from transformers import AutoModelForSequenceClassification, utils
utils.logging.disable_progress_bar()
print(type(AutoModelForSequenceClassification.from_pretrained({str(folders("bert")[1])!r})).__name__)
"""
    assert run_python(code) == "BertForSequenceClassification\n"
