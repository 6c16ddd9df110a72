"""Files are uploaded to and read from a local Hub by hf:// URLs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_support import a_state, ckptz, content_of, write_plain
from tests.support.hub_support import local_hub

pytestmark = pytest.mark.apps
pytest.importorskip("huggingface_hub")
FOLDER = "hf://org/name"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Return storage options of a Hub whose repository org/name is the folder `hub`."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with local_hub(tmp_path / "hub") as url:
        yield ("--storage-options", f"endpoint={url}")


def test_a_chain_is_uploaded_to_a_hub_and_restored(hub: tuple[str, ...], tmp_path: Path) -> None:
    plain = [write_plain(tmp_path / f"step-{i}.safetensors", a_state(drift=0.001 * i)) for i in range(2)]
    ckptz("compress", *plain, "--chain", "-o", f"{FOLDER}/", *hub)
    assert [entry["step"] for entry in ckptz("log", FOLDER, *hub, "--json").json["entries"]] == [0, 1]
    ckptz("restore", f"{FOLDER}/step-1.ckptz", "-o", tmp_path / "back.safetensors", *hub)
    assert content_of(tmp_path / "back.safetensors") == content_of(plain[1])
    run = ckptz("compress", plain[0], "-o", f"{FOLDER}/step-1.ckptz", *hub, fails=True)
    assert "exists already" in run.error
    ckptz("restore", f"{FOLDER}/step-0.ckptz", "-o", f"{FOLDER}/back.safetensors", *hub)
    assert content_of(tmp_path / "hub" / "back.safetensors") == content_of(plain[0])
    assert {path.suffix for path in (tmp_path / "hub").iterdir()} == {".ckptz", ".safetensors"}
