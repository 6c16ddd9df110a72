"""Files that `ckptz restore` writes load in other programs: safetensors, torch and transformers."""

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import ckptz
import ckptz.torch
from tests.support.api_support import bits, every_dtype
from tests.support.cli_support import ckptz as run_ckptz
from tests.support.transformers_support import AUTO, MAKERS, check_same, expected, folders, torch_folder

pytestmark = pytest.mark.apps


def facts(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Return names in order, dtypes, shapes and bytes of tensors."""
    return [(n, t.dtype, tuple(t.shape), bits(t).tobytes()) for n, t in tensors.items()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_folder_loads_in_transformers_and_safetensors(name: str, tmp_path: Path) -> None:
    original, packed = folders(name)
    run_ckptz("restore", packed / "model.ckptz", "-o", tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(original)
    for file in original.glob("*.safetensors"):
        with (
            safetensors.safe_open(tmp_path / "restored" / file.name, "pt") as ours,
            safetensors.safe_open(file, "pt") as theirs,
        ):
            assert (ours.offset_keys(), ours.metadata()) == (theirs.offset_keys(), theirs.metadata())
            assert facts(ours.get_tensors()) == facts(theirs.get_tensors())
    check_same(AUTO[name].from_pretrained(tmp_path / "restored"), expected(name))


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_a_restored_folder_of_torch_files_loads_without_running_code(name: str, tmp_path: Path) -> None:
    original, packed = torch_folder(name, tmp_path)
    run_ckptz("restore", packed / "pytorch_model.ckptz", "-o", tmp_path / "restored")
    ours, theirs = (
        torch.load(folder / "pytorch_model.bin", weights_only=True)
        for folder in (tmp_path / "restored", original)
    )
    assert type(ours) is type(theirs)
    assert facts(ours) == facts(theirs)
    assert ours._metadata == theirs._metadata
    check_same(AUTO[name].from_pretrained(tmp_path / "restored"), AUTO[name].from_pretrained(original))


@pytest.mark.parametrize("config", [ckptz.LOSSLESS, ckptz.KMeans(levels=16)], ids=["lossless", "kmeans"])
def test_any_packed_file_restores_to_either_kind(config: Any, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in expected("bert").state_dict().items()} | every_dtype()
    ckptz.torch.save_file(state, tmp_path / "x.ckptz", {"format": "pt", "step": "3"}, config=config)
    decoded = ckptz.torch.load_file(tmp_path / "x.ckptz")
    run_ckptz("restore", tmp_path / "x.ckptz")
    run_ckptz("restore", tmp_path / "x.ckptz", "--to", "pt")
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt", "step": "3"}
        assert facts(handle.get_tensors()) == facts(decoded)
    assert facts(torch.load(tmp_path / "x.pt", weights_only=True)) == facts(decoded)
    assert (sorted(facts(decoded)) == sorted(facts(state))) == (config == ckptz.LOSSLESS)
