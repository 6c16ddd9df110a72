"""One call opens every kind of input by its content; other files are refused with a remedy."""

import io
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from ckptz.foreign.inputs import open_input
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.envelope import PlainFile, plain_regions, write_plain
from ckptz.format.publish import publish
from ckptz.parallel import Workers
from ckptz.state.flatten import read_chunks
from ckptz.write import writer
from ckptz.write.job import WriteJob

WEIGHTS = np.arange(12, dtype="f4").reshape(3, 4)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_file({"w": WEIGHTS}, tmp_path / "m.safetensors", {"format": "pt"})
    return tmp_path / "m.safetensors"


def check_weights(path: Path, kind: str) -> None:
    opened = open_input(path)
    assert opened.kind == kind
    assert opened.name == str(path)
    [source] = opened.tensors.values()
    assert source.shape == (3, 4)
    assert source.patterns(0, 12).tobytes() == WEIGHTS.tobytes()
    opened.close()


@pytest.mark.parametrize("name", ["m.safetensors", "m.weights", "m", "m.bin", "m.pt"])
def test_safetensors_are_known_by_content(name: str, plain: Path) -> None:
    path = plain.rename(plain.with_name(name))
    check_weights(path, "safetensors")
    opened = open_input(path)
    assert opened.metadata == {"format": "pt"}
    opened.close()


def test_a_ckptz_file_brings_its_tree_and_chain(plain: Path, tmp_path: Path) -> None:
    opened = open_input(plain)
    tree = {"root": {"tensor": "w"}, "storages": []}
    with Workers(1) as workers, publish(tmp_path / "m.ckptz") as sink:
        writer.write(sink, WriteJob(tensors=opened.tensors, metadata={"a": "b"}, tree=tree), workers)
    opened.close()
    check_weights(tmp_path / "m.ckptz", "ckptz")
    opened = open_input(tmp_path / "m.ckptz")
    assert (opened.tree, opened.metadata, opened.stem) == (tree, {"a": "b"}, "m")
    assert opened.checkpoint.depth == 0
    opened.close()


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.bin", "m.ckpt", "m.pth.tar", "m"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_torch_files_are_known_by_content(name: str, is_zip: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"w": torch.from_numpy(WEIGHTS)}
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=is_zip)
    check_weights(tmp_path / name, "torch")


def test_a_missing_input_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_input(tmp_path / "none.safetensors")
    assert caught.value.filename == str(tmp_path / "none.safetensors")


def test_opening_other_kinds_needs_no_torch(plain: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from ckptz.foreign.inputs import open_input\n"
        f"open_input(Path({str(plain)!r})); open_input(Path({str(plain.parent)!r}))\n"
        f"path = Path({str(plain.parent)!r}) / 'x.pt'; path.write_bytes(b'PK')\n"
        "try: open_input(path)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("ConfigError")
    assert "x.pt: torch files need torch; install it with: pip install 'ckptz[torch]'" in run.stdout


DTYPES = ["u1", "i8", "f2", "f4", "f8", "?", "c8", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
arrays = st.builds(
    lambda dtype, shape: np.ones(shape).astype(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(
    lambda name: name != "__metadata__"
)


@given(
    st.dictionaries(names, arrays, max_size=5),
    st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4)),
)
def test_a_file_that_safetensors_wrote_is_rewritten_byte_for_byte(
    tensors: dict[str, np.ndarray], metadata: dict[str, str] | None
) -> None:
    assume(tensors or metadata != {})  # safetensors 0.8 then writes a header that it cannot read
    original = save(tensors, metadata)
    file = PlainFile(MemoryBytes(original))
    rewritten = io.BytesIO()
    write_plain(rewritten, plain_regions(file.tensors), file.metadata, read_chunks(file.tensors))
    assert rewritten.getvalue() == original
