"""Files with inline bases: their contents, unchanged parts, and safety of the replaced file."""

import contextlib
import io
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors
import torch

from ckptz import compress, inspect, rebase
from ckptz.errors import CkptzError, UnsupportedError
from ckptz.format import index
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.frame import FrameHeader
from ckptz.format.reader import Container
from ckptz.parallel import Workers
from ckptz.store.resolve import open_checkpoint
from ckptz.torch import apply_, load_file, save_file
from ckptz.verbs import rebase as rebase_module
from ckptz.verbs.compress import MAX_WRITTEN_DEPTH
from ckptz.write.inline_writer import NeededBase, write_inline
from tests.support.cli_support import (
    Chain,
    Content,
    a_state,
    ckptz,
    content_of,
    hf_folder,
    regions_of,
    temporaries,
    write_plain,
)
from tests.support.spec_files import STORED, File, Frame, plan, varint
from tests.support.sync_support import SPARSE, cloned, moved, same
from tests.support.sync_support import a_state as a_torch_state

KMEANS = ("--method", "kmeans", "--set", "levels=8")


def a_run(folder: Path, n: int, *method: Any) -> list[Content]:
    """Write 0.ckptz, 1.ckptz and so on, each a delta of the previous one; return their contents."""
    folder.mkdir()
    paths = [write_plain(folder / f"{i}.safetensors", a_state(drift=0.002 * i, n=6000)) for i in range(n)]
    ckptz("compress", *paths, "--chain", "--jobs", 1, *method)
    for path in paths:
        path.unlink()
    return [content_of(folder / f"{i}.ckptz") for i in range(n)]


def features_of(path: Path) -> str:
    with safetensors.safe_open(path, "np") as file:
        return str(file.metadata()[index.KEY_FEATURES])


def stored_frames(path: Path) -> dict[str, bytes]:
    """Return the frames of a file by region name, read with safetensors."""
    with safetensors.safe_open(path, "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys() if name != index.INDEX_NAME}  # noqa: SIM118


# --- contents -------------------------------------------------------------------------------------


def test_codes_stay_and_serve_those_that_need_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    contents = a_run(run, 5, *KMEANS)
    before = stored_frames(run / "3.ckptz")
    lossy = [tensor.name for tensor in inspect(run / "3.ckptz").tensors if tensor.lossy]
    chain_bytes = sum((run / f"{i}.ckptz").stat().st_size for i in range(4))
    report = ckptz("rebase", run / "3.ckptz", "--json").json
    for i in range(3):
        (run / f"{i}.ckptz").unlink()
    assert [content_of(run / f"{i}.ckptz") for i in (3, 4)] == contents[3:]
    after = stored_frames(run / "3.ckptz")
    assert {name: after[name] for name in lossy} == {name: before[name] for name in lossy}
    assert report["depth"] == 3
    assert [base["file"] for base in report["bases"]] == ["2.ckptz", "1.ckptz", "0.ckptz"]
    assert report["chain_bytes"] == chain_bytes
    assert report["stored_bytes"] == (run / "3.ckptz").stat().st_size < 1.02 * chain_bytes
    assert not temporaries(run)


def test_what_has_no_codes_is_encoded_anew_and_as_small_as_by_compress(tmp_path: Path) -> None:
    run = tmp_path / "run"
    contents = a_run(run, 5)
    [anew] = compress([run / "3.ckptz"], tmp_path / "anew.ckptz")
    report = ckptz("rebase", run / "3.ckptz", "--json").json
    for i in range(3):
        (run / f"{i}.ckptz").unlink()
    assert [content_of(run / f"{i}.ckptz") for i in (3, 4)] == contents[3:]
    assert (report["depth"], report["bases"]) == (0, [])
    assert report["stored_bytes"] <= 1.01 * anew.stored_bytes < 0.8 * report["chain_bytes"]
    assert features_of(run / "3.ckptz") == "lossless"
    assert "self-contained, " in ckptz("rebase", run / "4.ckptz").stdout


def test_the_content_id_and_all_records_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    a_run(run, 2, *KMEANS)
    third = write_plain(run / "2.safetensors", a_state(drift=0.01, n=6000))
    ckptz("compress", third, "--base", run / "1.ckptz", "--set", "input.step=7", *KMEANS)
    before = ckptz("inspect", run / "2.ckptz", "--json").json
    ckptz("rebase", run / "2.ckptz")
    after = ckptz("inspect", run / "2.ckptz", "--json").json
    assert before["step"] == 7
    for key in ("content_id", "step", "metadata", "depth"):
        assert before[key] == after[key], key
    assert [t["lossy"] for t in before["tensors"]] == [t["lossy"] for t in after["tensors"]]
    assert [t for t in before["tensors"] if t["lossy"]] == [t for t in after["tensors"] if t["lossy"]]
    assert [(m["file"], m["content_id"]) for m in before["chain"]] == [
        (m["file"], m["content_id"]) for m in after["chain"]
    ]
    assert after["chain"][0]["is_inline"]
    text = ckptz("inspect", run / "2.ckptz").stdout
    assert "self-contained with 2 inline bases" in text
    assert "in the file" in text


def test_only_frames_that_are_needed_go_in(tmp_path: Path) -> None:
    first, second = a_state(n=6000), a_state(drift=0.01, n=6000)
    first["gone"], second["new"] = first["layer.weight"], second["layer.weight"]
    states = enumerate((first, second, second))
    paths = [write_plain(tmp_path / f"{i}.safetensors", state) for i, state in states]
    ckptz("compress", *paths, "--chain", *KMEANS)
    rebased = rebase(tmp_path / "2.ckptz", tmp_path / "alone.ckptz")
    n_tensors = {base.file: base.n_tensors for base in rebased.bases}
    with contextlib.closing(open_checkpoint(tmp_path / "alone.ckptz")) as alone:
        names = [set(base.tensors) for base in alone.container.inline]
    assert [len(base_names) for base_names in names] == list(n_tensors.values())
    assert "new" in names[0]
    assert not {"new", "gone"} & names[1]


def test_a_context_tensor_of_a_needed_tensor_goes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's `a` is decoded with contexts from `b`, which no other tensor needs."""
    zeros, tables = bytes(4), b"\1" + b"\0\0\0" + varint(256) + b"\0"
    by_b = plan(rules=[b"\1" + varint(1) + b"b"], tail=tables)
    full = File({"a": Frame(by_b, [(STORED, zeros)], zeros), **dict.fromkeys("bc", Frame())})
    (tmp_path / "0.ckptz").write_bytes(full.bytes())
    base = {"content_id": full.content_id(), "file": "0.ckptz", "depth": 1}
    delta = File({"a": Frame(plan(predictor=1, mode=2))}, features="delta,lossless", index={"base": base})
    (tmp_path / "1.ckptz").write_bytes(delta.bytes())
    monkeypatch.setattr("ckptz.verbs.rebase._is_decoded", lambda frame: False)  # as if it had codes
    assert rebase(tmp_path / "1.ckptz").bases[0].n_tensors == 2
    (tmp_path / "0.ckptz").unlink()
    ckptz("verify", tmp_path / "1.ckptz")


def test_a_plain_base_may_go(chain: Chain) -> None:
    ckptz("compress", chain.second, "--base", chain.first, "--force")
    chain.full.unlink()
    ckptz("rebase", chain.delta)
    chain.first.unlink()
    assert content_of(chain.delta) == content_of(chain.second)


def test_bases_that_a_base_carries_within_go_in_too(tmp_path: Path) -> None:
    contents = a_run(tmp_path / "run", 4, *KMEANS)
    paths = [tmp_path / "run" / f"{i}.ckptz" for i in range(4)]
    ckptz("rebase", paths[2])
    report = ckptz("rebase", paths[3], "--json").json
    assert [base["file"] for base in report["bases"]] == ["2.ckptz", "1.ckptz", "0.ckptz"]
    for path in paths[:3]:
        path.unlink()
    assert content_of(paths[3]) == contents[3]


def test_folders_and_trees_are_restored(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    files = {p.name: p.read_bytes() for p in folder.glob("*.safetensors*")}
    ckptz("compress", folder, "-o", tmp_path / "base.ckptz")
    ckptz("compress", folder, "-o", tmp_path / "delta.ckptz", "--base", tmp_path / "base.ckptz")
    ckptz("rebase", tmp_path / "delta.ckptz")
    (tmp_path / "base.ckptz").unlink()
    ckptz("restore", tmp_path / "delta.ckptz", "-o", tmp_path / "back")
    assert {p.name: p.read_bytes() for p in (tmp_path / "back").glob("*.safetensors*")} == files


# --- chain length ---------------------------------------------------------------------------------


def test_deltas_count_what_is_within(tmp_path: Path) -> None:
    run = tmp_path / "run"
    a_run(run, 3, *KMEANS)
    ckptz("rebase", run / "2.ckptz")
    third = write_plain(run / "3.safetensors", a_state(drift=0.01, n=6000))
    [report] = compress([third], base=run / "2.ckptz")
    assert (report.depth, report.base) == (3, "2.ckptz")
    for i in range(2):
        (run / f"{i}.ckptz").unlink()
    assert content_of(run / "3.ckptz") == content_of(third)
    assert [m.depth for m in inspect(run / "3.ckptz").chain] == [2, 1, 0]


def test_what_is_encoded_anew_begins_a_chain(tmp_path: Path) -> None:
    state = {"w": ("U8", (3,), b"abc")}
    paths = [write_plain(tmp_path / f"{i:02}.safetensors", state) for i in range(MAX_WRITTEN_DEPTH + 1)]
    *_, last = compress(paths, chain=True)
    assert (last.depth, rebase(Path(last.output)).depth) == (MAX_WRITTEN_DEPTH, 0)
    [report] = compress([paths[0]], tmp_path / "next.ckptz", base=Path(last.output))
    assert report.base == Path(last.output).name


# --- readers --------------------------------------------------------------------------------------


def test_every_reader_reads_it(tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone.ckptz"
    contents = a_run(run, 3, *KMEANS)
    ckptz("rebase", run / "2.ckptz", "-o", alone)
    expected = load_file(run / "2.ckptz")
    first = run / "0.ckptz"
    for verb in (
        ("restore", alone, "-o", tmp_path / "restored.safetensors"),
        ("compress", alone, "-o", run / "folded.ckptz", "--base", first),
        ("compress", first, "-o", tmp_path / "back.ckptz", "--base", alone),
        ("compress", alone, "-o", tmp_path / "again.ckptz"),
    ):
        ckptz(*verb)
    for name in ("restored.safetensors", "again.ckptz"):
        assert content_of(tmp_path / name) == contents[2], name
    assert content_of(run / "folded.ckptz") == contents[2]
    assert content_of(tmp_path / "back.ckptz") == contents[0]
    assert "in a chain" not in ckptz("restore", alone, "-o", tmp_path / "again.safetensors").stdout
    assert same(load_file(alone), expected)
    assert ckptz("verify", alone, "--json").json["files"][0]["n_chunks"] > len(expected)


@pytest.mark.parametrize("check", ["base", "stored"])
def test_it_is_applied_to_live_tensors_like_a_full_file(tmp_path: Path, check: Any) -> None:
    first = a_torch_state()
    second = moved(first, 1)
    save_file(first, tmp_path / "first.ckptz")
    save_file(second, tmp_path / "second.ckptz", base=tmp_path / "first.ckptz", config=SPARSE)
    rebase(tmp_path / "second.ckptz")
    (tmp_path / "first.ckptz").unlink()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    for live in (cloned(first), moved(first, 99, share=0.5), zeros):
        report = apply_(live, tmp_path / "second.ckptz", check=check)
        assert report.base is None
        assert same(live, second)


def test_a_reader_that_does_not_know_the_feature_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    a_run(run, 2, *KMEANS)
    ckptz("rebase", run / "1.ckptz")
    monkeypatch.setattr("ckptz.format.index.KNOWN_FEATURES", frozenset({"lossless", "delta", "maps"}))
    with pytest.raises(UnsupportedError, match=r"1\.ckptz: required feature 'inline'"):
        content_of(run / "1.ckptz")


def test_features_are_those_that_are_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    a_run(run, 2, *KMEANS)
    exact = write_plain(run / "2.safetensors", a_state(drift=0.1, n=6000))
    ckptz("compress", exact, "--base", run / "0.ckptz")
    assert features_of(run / "2.ckptz") == "delta,lossless"
    for file, features in (("2", "lossless"), ("1", "inline,lossless,maps"), ("0", "lossless,maps")):
        before = content_of(run / f"{file}.ckptz")
        ckptz("rebase", run / f"{file}.ckptz", "-o", tmp_path / f"{file}.ckptz")
        assert features_of(tmp_path / f"{file}.ckptz") == features
        assert content_of(tmp_path / f"{file}.ckptz") == before


# --- safety of the old file -----------------------------------------------------------------------


def test_self_contained_files_are_not_rebased(chain: Chain) -> None:
    for path in (chain.full, chain.delta):
        ckptz("rebase", path)
        before = path.read_bytes()
        assert "self-contained already" in ckptz("rebase", path).stdout
        assert path.read_bytes() == before


def damaged(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    payload = regions_of(bytes(raw))["payload"]
    raw[payload[len(payload) // 2] // 8] ^= 1
    path.write_bytes(raw)


def test_bases_are_found_by_the_search_path(chain: Chain, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    chain.first.unlink()
    chain.full.rename(elsewhere / "renamed.ckptz")
    assert ckptz("rebase", chain.delta, fails=True).exit_code == 5
    ckptz("rebase", chain.delta, "--search-path", elsewhere)
    (elsewhere / "renamed.ckptz").unlink()
    assert content_of(chain.delta) == content_of(chain.second)


def test_the_new_file_is_read_back_before_the_old_one_goes(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that writes wrong bytes, the old file stays intact and the error is reported."""
    write = rebase_module.write_inline

    def faulty(sink: BinaryIO, *arguments: Any, **options: Any) -> int:
        n_bytes = write(sink, *arguments, **options)
        sink.flush()
        damaged(Path(sink.name))
        return n_bytes

    monkeypatch.setattr(rebase_module, "write_inline", faulty)
    before = chain.delta.read_bytes()
    run = ckptz("rebase", chain.delta, fails=True)
    assert run.exit_code == 3
    assert f"{chain.delta}: " in run.error
    assert "ckptz-tmp" not in run.error
    assert chain.delta.read_bytes() == before
    assert not temporaries(chain.folder)


# --- hostile bytes --------------------------------------------------------------------------------


def content(raw: bytes) -> dict[str, bytes]:
    with contextlib.closing(open_checkpoint(MemoryBytes(raw))) as opened:
        sources = opened.tensors.items()
        return {name: s.patterns(0, s.dtype.n_patterns(s.shape)).tobytes() for name, s in sources}


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    """Return the bytes of a file of three tensors with two inline bases."""
    states = [{n: ("U8", (40,), bytes([i + k]) * 40) for k, n in enumerate("abc")} for i in range(3)]
    paths = [write_plain(tmp_path / f"{i}.safetensors", state) for i, state in enumerate(states)]
    *_, last = compress(paths, chain=True, jobs=1)
    sink = io.BytesIO()
    with contextlib.closing(open_checkpoint(last.output)) as opened, Workers(1) as workers:
        refs = [file.index.base for file in opened.files if isinstance(file, Container)]
        bases = [
            NeededBase(content_id=ref.content_id, file=ref.file, tensors=file.tensors)
            for ref, file in zip(refs, opened.files[1:], strict=False)
            if ref is not None
        ]
        write_inline(sink, opened.container, bases, workers)
    return sink.getvalue()


def test_frames_of_bases_are_copied_whole_and_are_no_tensors(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.ckptz").write_bytes(small)
    assert list(load_file(tmp_path / "a.ckptz")) == ["a", "b", "c"]
    with contextlib.closing(open_checkpoint(tmp_path / "a.ckptz")) as opened:
        assert [len(level.tensors) for level in opened.container.levels] == [3, 3, 3]
    inline = {n: f for n, f in stored_frames(tmp_path / "a.ckptz").items() if n.startswith("__ckptz__.")}
    assert sorted(inline) == [f"__ckptz__.inline.{i}.{j}" for i in (1, 2) for j in range(3)]
    for frame in inline.values():
        header = FrameHeader.parse(frame[: int.from_bytes(frame[:4], "little")])
        assert header.payload_bytes + int.from_bytes(frame[:4], "little") == len(frame)


def test_frames_of_bases_are_checked_against_their_own_entries(small: bytes) -> None:
    """Swapped frames of a base decode, but not to the tensors that the index declares."""
    raw = bytearray(small)
    with contextlib.closing(open_checkpoint(MemoryBytes(small))) as opened:
        first, second, _ = (s.entry for s in opened.container.inline[0].tensors.values())
    offset = 8 + int.from_bytes(raw[:8], "little")
    assert first.n_bytes == second.n_bytes
    a, b = (slice(offset + e.offset, offset + e.offset + e.n_bytes) for e in (first, second))
    raw[a], raw[b] = raw[b], raw[a]
    with pytest.raises(CkptzError, match=r"inline base 1: tensor 'a': index and frame disagree"):
        content(bytes(raw))
