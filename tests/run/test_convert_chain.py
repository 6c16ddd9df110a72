"""Several inputs: bases, chains, folders, and output paths."""

from pathlib import Path

import pytest

from ckptz import compress, inspect, restore
from ckptz.errors import ConfigError, MissingBaseError
from ckptz.foreign.inputs import stem_of
from ckptz.verbs.compress import MAX_WRITTEN_DEPTH
from ckptz.verbs.paths import output_paths
from tests.support.cli_support import Chain, a_state, ckptz, content_of, hf_folder, write_plain

# --- bases and chains -----------------------------------------------------------------------------


def steps(folder: Path, n: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [
        write_plain(folder / f"step-{i:02}.safetensors", a_state(drift=0.001 * i, n=2100), {"step": str(i)})
        for i in range(n)
    ]


def test_a_chain_of_inputs_without_steps_says_in_which_order_it_goes(tmp_path: Path) -> None:
    inputs = [write_plain(tmp_path / f"{name}.safetensors", a_state()) for name in ("b", "a", "c")]
    first, *deltas = compress(inputs, tmp_path / "run", chain=True)
    assert any(
        "not all names have a step: b.safetensors, a.safetensors, c.safetensors" in n for n in first.notes
    )
    assert not any("order" in note for report in deltas for note in report.notes)
    named = [write_plain(tmp_path / f"step-{i}.safetensors", a_state()) for i in (2, 1)]
    reports = [*compress(named, tmp_path / "steps", chain=True), *compress(inputs[0], tmp_path, chain=True)]
    assert not any("order" in note for report in reports for note in report.notes)


def test_a_chain_stores_each_input_against_the_one_before(tmp_path: Path) -> None:
    paths = steps(tmp_path / "run", 4)
    reports = compress(paths, tmp_path / "packed", chain=True)
    assert [report.depth for report in reports] == [0, 1, 2, 3]
    assert [report.base for report in reports] == [None, "step-00.ckptz", "step-01.ckptz", "step-02.ckptz"]
    assert all(report.stored_bytes < 0.9 * reports[0].stored_bytes for report in reports[1:])
    for path, report in zip(paths, reports, strict=True):
        path.unlink()  # only the compressed files may be needed
        restore(Path(report.output), path)
        assert content_of(path)[1] == {"step": path.stem[-1]}
        assert content_of(path) == content_of(Path(report.output))


def test_a_chain_may_continue_from_a_base(chain: Chain) -> None:
    third = write_plain(chain.folder / "step-3.safetensors", a_state(drift=0.02))
    fourth = write_plain(chain.folder / "step-4.safetensors", a_state(drift=0.03))
    reports = compress([third, fourth], base=chain.delta, chain=True)
    assert [(report.base, report.depth) for report in reports] == [("step-2.ckptz", 2), ("step-3.ckptz", 3)]
    assert content_of(chain.folder / "step-4.ckptz") == content_of(fourth)


def test_without_chain_every_input_is_stored_against_the_base(chain: Chain) -> None:
    paths = [write_plain(chain.folder / f"other-{i}.safetensors", a_state(drift=0.01 * i)) for i in (1, 2)]
    reports = compress(paths, base=chain.first)
    assert [(report.base, report.depth) for report in reports] == [("step-1.safetensors", 1)] * 2


def test_a_delta_to_a_plain_base_is_read_with_its_compressed_copy(chain: Chain) -> None:
    out = chain.folder / "against-plain.ckptz"
    [report] = compress([chain.second], out, base=chain.first)
    assert report.base == "step-1.safetensors"
    chain.first.unlink()  # the compressed file has the same content id
    assert content_of(out) == content_of(chain.second)
    chain.full.unlink()
    with pytest.raises(MissingBaseError):
        content_of(out)


def test_the_longest_chain_begins_anew(tmp_path: Path) -> None:
    paths = steps(tmp_path / "run", MAX_WRITTEN_DEPTH + 3)
    reports = compress(paths, chain=True)
    depths = [report.depth for report in reports]
    assert depths == [*range(MAX_WRITTEN_DEPTH + 1), 0, 1]
    assert "full file: " in reports[MAX_WRITTEN_DEPTH + 1].notes[0]
    assert content_of(Path(reports[MAX_WRITTEN_DEPTH].output)) == content_of(paths[MAX_WRITTEN_DEPTH])
    late = tmp_path / "late.ckptz"
    [report] = compress([paths[-1]], late, base=Path(reports[MAX_WRITTEN_DEPTH].output))
    assert (report.depth, report.base) == (0, None)


def test_a_base_that_no_tensor_gains_from_is_not_needed(tmp_path: Path) -> None:
    base = write_plain(tmp_path / "base.safetensors", {"other": ("U8", (4,), b"1234")})
    path = write_plain(tmp_path / "model.safetensors", a_state())
    [report] = compress([path], base=base)
    assert (report.base, report.depth, report.n_deltas) == (None, 0, 0)
    assert "full file: " in report.notes[0]
    base.unlink()
    assert content_of(Path(report.output)) == content_of(path)
    assert inspect(Path(report.output)).chain == ()


def test_a_base_in_another_folder_is_noted_and_found_by_the_search_path(chain: Chain, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere.ckptz"
    run = ckptz("compress", chain.second, "-o", out, "--base", chain.full)
    assert "--search-path" in run.stderr
    back = tmp_path / "back.safetensors"
    assert ckptz("restore", out, "-o", back, fails=True).exit_code == 5
    ckptz("restore", out, "-o", back, "--search-path", chain.folder)
    assert content_of(back) == content_of(chain.second)
    assert ckptz("inspect", out, "--search-path", chain.folder, "--json").json["broken"] is None


# --- output paths ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        *(
            ("model.safetensors", "model"),
            ("step-1.5.pt", "step-1.5"),
            ("pytorch_model.bin", "pytorch_model"),
        ),
        *(("v1.0", "v1.0"), ("folder/", "folder"), ("a.ckptz", "a")),
    ],
)
def test_a_stem_loses_only_the_suffix_of_a_checkpoint(name: str, stem: str) -> None:
    assert stem_of(Path(name)) == stem


@pytest.mark.parametrize(
    ("inputs", "output", "expected"),
    [
        (["a/m.pt", "b/m.safetensors"], None, ["a/m.ckptz", "b/m.ckptz"]),
        (["step-1/m.pt", "step-2/m.pt"], "out", ["out/step-1-m.ckptz", "out/step-2-m.ckptz"]),
        (["m.safetensors"], "new", ["new"]),
        (["m.safetensors"], ".", ["m.ckptz"]),
    ],
)
def test_outputs_stand_beside_their_inputs_or_under_names_that_do_not_collide(
    inputs: list[str], output: str | None, expected: list[str], tmp_path: Path
) -> None:
    folder = None if output is None else tmp_path / output
    paths = output_paths([tmp_path / name for name in inputs], folder, ".ckptz")
    assert paths == [tmp_path / name for name in expected]


def test_a_chain_of_one_goes_into_a_folder_where_others_follow(tmp_path: Path) -> None:
    first, second, *_ = steps(tmp_path, 2)
    compress(first, tmp_path / "run", chain=True)
    compress([first, second], tmp_path / "run", chain=True, resume=True)
    assert inspect(tmp_path / "run" / "step-01.ckptz").depth == 1
    for inputs in ([first], [first, second]):
        with pytest.raises(ConfigError, match="a chain needs a folder"):
            compress(inputs, tmp_path / "run.ckptz", chain=True)


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "hf")


def test_a_folder_as_one_file_leaves_its_other_files_and_says_so(folder: Path, tmp_path: Path) -> None:
    run = ckptz("compress", folder, "-o", tmp_path / "one.ckptz")
    assert "2 other files were not copied" in run.stderr
    run = ckptz("restore", tmp_path / "one.ckptz", "-o", tmp_path / "back")
    assert "config.json" in run.stderr
    run = ckptz("restore", tmp_path / "one.ckptz", "--to", "safetensors", "-o", tmp_path / "one.safetensors")
    assert "2 shards" in run.stderr
    assert dict(content_of(tmp_path / "one.safetensors")[0]) == a_state(n=200)


@pytest.mark.parametrize("file", ["config.json", "sub/vocab.txt"])
def test_the_other_files_of_a_folder_do_not_replace_what_is_there(
    file: str, folder: Path, tmp_path: Path
) -> None:
    for verb, source in (("compress", folder), ("restore", folder / "model.ckptz")):
        if verb == "restore":
            ckptz("compress", folder)
        target = tmp_path / verb / file
        target.parent.mkdir(parents=True)
        target.write_text("mine")
        run = ckptz(verb, source, "-o", tmp_path / verb, fails=True)
        assert run.exit_code == 2
        assert target.read_text() == "mine"
        ckptz(verb, source, "-o", tmp_path / verb, "--force")
        assert target.read_bytes() == (folder / file).read_bytes()


def test_existing_shards_are_kept_unless_forced(folder: Path) -> None:
    ckptz("compress", folder)
    shard = folder / "model-00002-of-00002.safetensors"
    old = shard.read_bytes()
    shard.write_bytes(b"mine")
    assert ckptz("restore", folder / "model.ckptz", fails=True).exit_code == 2
    assert shard.read_bytes() == b"mine"
    ckptz("restore", folder / "model.ckptz", "--force")
    assert shard.read_bytes() == old
