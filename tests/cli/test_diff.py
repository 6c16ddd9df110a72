"""`ckptz diff`: figures against numpy, all kinds of inputs, steps of several files, and decoded chunks."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptz import Checkpointer, KMeans, compress, diff
from ckptz.format import reader
from ckptz.format.sources import CHUNK_VALUES
from ckptz.integrations.linked import DEFAULTS, ChainOptions, job_of
from ckptz.integrations.linked import Chain as Linked
from ckptz.verbs.diff import MAX_SHOWN, DiffReport, TensorDiff, ValueDiff
from ckptz_cli.session import DAMAGED, INTERNAL, INTERRUPTED, IO, MISSING, USAGE
from ckptz_cli.verbs import DIFFERENT
from tests.support.cli_support import Chain, Row, a_state, bf16, ckptz, hf_folder, write_plain

FLOATS = ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"]
ML_DTYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
INTEGERS = ["I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"]


def write_pair(tmp_path: Path, a: dict[str, Row], b: dict[str, Row]) -> list[Path]:
    return [write_plain(tmp_path / f"{name}.safetensors", rows) for name, rows in (("a", a), ("b", b))]


def diff_rows(tmp_path: Path, a: dict[str, Row], b: dict[str, Row], **options: Any) -> DiffReport:
    first, second = write_pair(tmp_path, a, b)
    return diff(first, second, jobs=1, **options)


def row_of(dtype: str, array: np.ndarray) -> Row:
    return dtype, array.shape, array.tobytes()


def only_tensor(report: DiffReport) -> TensorDiff:
    [diff] = report.tensors
    return diff


def numpy_dtype(name: str) -> Any:
    if name in ML_DTYPES:
        return ML_DTYPES[name]
    return f"<{name[0].lower()}{int(name[1:]) // 8}"


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
def test_changes_of_floats_are_those_of_numpy(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(0, 1, 5000).astype(numpy_dtype(name))
    b = np.where(rng.random(5000) < 0.4, a, rng.normal(0, 1, 5000).astype(numpy_dtype(name)))
    diff = only_tensor(diff_rows(tmp_path, {"w": row_of(name, a)}, {"w": row_of(name, b)}))
    original, change = a.astype(np.float64), b.astype(np.float64) - a.astype(np.float64)
    rms_change, rms = (math.sqrt(np.mean(x**2)) for x in (change, original))
    assert (diff.kind, diff.n_not_finite) == ("changed", 0)
    assert diff.max_change == np.abs(change).max()
    assert diff.rms_change == pytest.approx(rms_change)
    assert diff.relative_change == pytest.approx(rms_change / rms)
    patterns = (x.view(f"u{x.itemsize}") for x in (a, b))
    assert diff.changed_share == np.mean(np.not_equal(*patterns))


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "BF16"])
def test_every_bit_pattern_of_small_floats_is_compared(name: str, tmp_path: Path) -> None:
    dtype = numpy_dtype(name)
    n_bits = 8 * np.dtype(dtype).itemsize
    a = np.arange(1 << n_bits, dtype=f"u{n_bits // 8}").view(dtype)
    with np.errstate(invalid="ignore"):
        values = a.astype(np.float64)
    zeros = np.zeros_like(a)
    finite = np.isfinite(values)
    diff = only_tensor(diff_rows(tmp_path, {"w": row_of(name, zeros)}, {"w": row_of(name, a)}))
    assert diff.n_not_finite == np.count_nonzero(~finite)
    assert diff.max_change == np.abs(values[finite]).max()
    assert diff.rms_change == pytest.approx(math.sqrt(np.mean(values[finite] ** 2)))
    assert diff.relative_change is None  # relative to zeros


@pytest.mark.parametrize("name", INTEGERS)
def test_changes_of_integers_are_exact(name: str, tmp_path: Path) -> None:
    info = np.iinfo(numpy_dtype(name))
    a = np.array([info.min, info.max, 5, 100], numpy_dtype(name))
    for b in (a[::-1].copy(), a ^ np.array(1, a.dtype)):
        diff = only_tensor(diff_rows(tmp_path, {"w": row_of(name, a)}, {"w": row_of(name, b)}))
        expected = max(abs(int(x) - int(y)) for x, y in zip(a, b, strict=True))
        assert diff.max_change == float(expected) >= 1
        assert diff.changed_share == 1


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    a = np.array([1, np.nan, np.inf, -np.inf, 2, 0], "<f4")
    b = np.array([1, np.nan, np.inf, 3, np.nan, 0.5], "<f4")
    diff = only_tensor(diff_rows(tmp_path, {"w": row_of("F32", a)}, {"w": row_of("F32", b)}))
    assert (diff.n_not_finite, diff.max_change) == (4, 0.5)
    assert diff.changed_share == 0.5
    assert "4 not finite" in ckptz("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout


def test_figures_that_overflow_a_double_are_none(tmp_path: Path) -> None:
    a, b = np.array([-1.7e308, 1], "<f8"), np.array([1.7e308, 1], "<f8")
    diff = only_tensor(diff_rows(tmp_path, {"w": row_of("F64", a)}, {"w": row_of("F64", b)}))
    assert (diff.max_change, diff.rms_change, diff.relative_change) == (None, None, None)
    assert diff.changed_share == 0.5
    run = ckptz("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert "Infinity" not in run.stdout


def test_signs_of_zeros_are_bits_and_no_change(tmp_path: Path) -> None:
    a, b = np.zeros(4, "<f4"), -np.zeros(4, "<f4")
    diff = only_tensor(diff_rows(tmp_path, {"w": row_of("F32", a)}, {"w": row_of("F32", b)}))
    assert (diff.kind, diff.changed_share, diff.max_change) == ("changed", 1.0, 0.0)


def test_dtypes_without_numeric_values_have_a_changed_share(tmp_path: Path) -> None:
    diff = only_tensor(diff_rows(tmp_path, {"w": ("F4", (4,), b"ab")}, {"w": ("F4", (4,), b"ac")}))
    assert (diff.changed_share, diff.max_change) == (0.5, None)


# --- kinds of differences -------------------------------------------------------------------------


def test_names_dtypes_and_shapes_that_differ(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 6).astype("<f4")
    a = {
        "same": row_of("F32", values),
        "gone": row_of("F32", values),
        "cast": row_of("F32", values),
        "bits": row_of("F32", values),
        "bent": row_of("F32", values),
        "none": ("F32", (0, 7), b""),
    }
    b = {
        "same": row_of("F32", values),
        "cast": ("BF16", (6,), bf16(values).tobytes()),
        "bits": ("F4", (6,), b"abc"),
        "bent": row_of("F32", values.reshape(2, 3)),
        "none": ("F32", (0, 7), b""),
        "new": row_of("F32", values),
    }
    report = diff_rows(tmp_path, a, b)
    by_name = {diff.name: diff for diff in report.tensors}
    assert {name: diff.kind for name, diff in by_name.items()} == {
        **{"bent": "reshaped", "bits": "retyped", "cast": "retyped", "gone": "only in A"},
        **{"new": "only in B", "none": "equal", "same": "equal"},
    }
    assert (by_name["bent"].shape_a, by_name["bent"].shape_b) == ((6,), (2, 3))
    assert (by_name["gone"].dtype_a, by_name["gone"].dtype_b) == ("F32", None)
    cut = (bf16(values).astype("<u4") << 16).view("<f4")
    assert by_name["cast"].max_change == float(np.abs(values - cut).max())
    assert by_name["cast"].changed_share == np.mean(values != cut)
    assert by_name["bits"].max_change is None
    counts = (report.n_tensors, report.n_equal, report.n_changed, report.n_only_a, report.n_only_b)
    assert counts == (7, 2, 3, 1, 1)
    text = ckptz("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout
    for part in ("6 -> 2x3", "F32 -> BF16", "only in B", "7 tensors, 2 equal, 3 changed, 1 only in A"):
        assert part in text


def test_the_total_is_over_all_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    a = {name: rng.normal(0, 1, n) for name, n in (("x", 1000), ("y", 3000), ("z", 500))}
    b = {name: array + 0.1 * (name != "z") for name, array in a.items()}
    report = diff_rows(tmp_path, *({n: row_of("F64", x) for n, x in s.items()} for s in (a, b)))
    changed = np.concatenate([a["x"], a["y"]])
    assert report.changed_share == pytest.approx(4000 / 4500)
    assert report.relative_change == pytest.approx(0.1 / math.sqrt(np.mean(changed**2)))
    assert report.max_change == pytest.approx(0.1)


def test_metadata_are_compared_apart(tmp_path: Path) -> None:
    state = {"w": ("U8", (1,), b"a")}
    paths = [write_plain(tmp_path / f"{i}.safetensors", state, {"step": str(i)}) for i in range(2)]
    report = diff(*paths)
    assert (report.is_equal, report.has_same_metadata) == (True, False)
    assert "its tensor is equal bit for bit, metadata differ" in ckptz("diff", *paths).stdout


# --- order and exit code --------------------------------------------------------------------------


def test_tensors_are_sorted_by_change_and_cut_at_top(tmp_path: Path) -> None:
    base = np.full(100, 10.0)
    far = np.concatenate([[25.0], base[1:]])
    a = {name: row_of("F64", base) for name in ("all", "equal", "far", "gone")}
    b = {"all": row_of("F64", base + 2), "equal": row_of("F64", base), "far": row_of("F64", far)}
    names = ["gone", "all", "far", "equal"]
    assert [diff.name for diff in diff_rows(tmp_path, a, b).tensors] == names
    assert [diff.name for diff in diff_rows(tmp_path, a, b, top=2).tensors] == names[:2]
    assert diff_rows(tmp_path, a, b, top=0).n_changed == 2
    run = ckptz("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--top", 1, "--json")
    assert [diff["name"] for diff in run.json["tensors"]] == names[:1]


def test_a_difference_sets_the_exit_code_only_with_the_option(chain: Chain) -> None:
    assert DIFFERENT not in {0, INTERNAL, USAGE, DAMAGED, 4, MISSING, 6, IO, INTERRUPTED}
    ckptz("diff", chain.first, chain.second)
    assert ckptz("diff", chain.first, chain.second, "--exit-code", fails=True).exit_code == DIFFERENT
    ckptz("diff", chain.delta, chain.second, "--exit-code")
    assert ckptz("diff", chain.delta, chain.folder / "none", "--exit-code", fails=True).exit_code == MISSING


# --- inputs ---------------------------------------------------------------------------------------


def test_a_file_and_its_packed_twin_are_equal(chain: Chain) -> None:
    for pair in ((chain.second, chain.delta), (chain.delta, chain.second), (chain.delta, chain.delta)):
        assert diff(*pair).is_equal


def test_every_pair_of_kinds_gives_the_same_figures(chain: Chain) -> None:
    reports = [
        diff(first, second).tensors
        for first in (chain.first, chain.full)
        for second in (chain.second, chain.delta)
    ]
    assert all(report == reports[0] for report in reports)
    assert {diff.kind for diff in reports[0]} == {"equal", "changed"}


def test_folders_and_torch_files_are_read(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    plain = write_plain(tmp_path / "one.safetensors", a_state(n=200))
    assert diff(folder, plain).is_equal
    torch.save({"w": torch.arange(4.0)}, tmp_path / "a.pt")
    write_plain(tmp_path / "b.safetensors", {"w": ("F32", (4,), np.arange(4, dtype="<f4").tobytes())})
    assert diff(tmp_path / "a.pt", tmp_path / "b.safetensors").is_equal


def test_bases_are_found_by_the_search_path(chain: Chain, tmp_path: Path) -> None:
    delta = chain.delta.rename(tmp_path / "delta.ckptz")
    assert ckptz("diff", delta, chain.second, fails=True).exit_code == MISSING
    ckptz("diff", delta, chain.second, "--search-path", chain.folder, "--exit-code")


# --- plain values and random states ---------------------------------------------------------------


def nested(path: Path, **values: Any) -> Path:
    torch.save({"model": {"w": torch.ones(3)}, "epoch": 1, "groups": [{"lr": 0.1}]} | values, path)
    return path


def test_plain_values_that_differ_are_named_with_both(tmp_path: Path) -> None:
    a = nested(tmp_path / "a.pt", name="x" * 300 + "a", only=True)
    b = nested(tmp_path / "b.pt", name="x" * 300 + "b", epoch=1.0, groups=[{"lr": 0.2, "betas": (0.9, 0.99)}])
    report = diff(a, b)
    assert (report.is_equal, report.n_equal, report.n_values, report.n_values_changed) == (False, 1, 6, 6)
    by_name = {value.name: value for value in report.values}
    assert by_name["epoch"] == ValueDiff(name="epoch", value_a="1", value_b="1.0")
    assert by_name["groups.0.lr"] == ValueDiff(name="groups.0.lr", value_a="0.1", value_b="0.2")
    assert by_name["groups.0.betas.1"] == ValueDiff(name="groups.0.betas.1", value_a=None, value_b="0.99")
    assert by_name["only"].value_b is None
    long = by_name["name"]
    assert (long.value_a[:4], long.value_a[-2:], len(long.value_a)) == ("...x", "a'", MAX_SHOWN + 3)
    text = ckptz("diff", a, b).stdout
    assert [line.split() for line in text.splitlines() if line.startswith(("epoch", "only"))] == [
        ["epoch", "1", "1.0"],
        ["only", "True", "-"],
    ]
    assert "1 tensor, 1 equal, 6 values differ" in text
    run = ckptz("diff", a, b, "--top", 1, "--json", "--exit-code", fails=True)
    assert (run.exit_code, run.json["n_values_changed"], len(run.json["values"])) == (DIFFERENT, 6, 1)


def test_equal_values_are_counted_and_a_file_without_any_is_compared_by_tensors(tmp_path: Path) -> None:
    a = nested(tmp_path / "a.pt")
    compress(a)
    dcp.save(torch.load(a), checkpoint_id=tmp_path / "a-dcp", no_dist=True)
    for other in ("a.ckptz", "a-dcp"):
        text = ckptz("diff", a, tmp_path / other, "--exit-code").stdout
        assert "its tensor and 2 values are equal bit for bit" in text
    flat = {"model.w": ("F32", (3,), np.ones(3, "<f4").tobytes())}
    report = diff(a, write_plain(tmp_path / "flat.safetensors", flat))
    assert (report.is_equal, report.n_values) == (True, 0)


# --- steps and folders ----------------------------------------------------------------------------


def train(folder: Path, n_steps: int, nudge: float = 0.0, seed: int = 0) -> Path:
    torch.manual_seed(0)
    random.seed(seed)
    model = torch.nn.Linear(20, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Checkpointer(folder, model, optimizer, every=1) as checkpointer:
        for step in range(1, n_steps + 1):
            model(torch.full((2, 20), 0.5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if nudge:
                optimizer.state[model.weight]["exp_avg"][3, 4] += nudge
            checkpointer.maybe_save(step)
    return folder


def test_a_step_is_compared_with_its_state_file(tmp_path: Path) -> None:
    a, b = train(tmp_path / "a", 2), train(tmp_path / "b", 1)
    assert diff(f"{a}@1", f"{b}@1").is_equal
    assert diff(f"{a}@1", b).is_equal  # a folder means its newest step
    c = train(tmp_path / "c", 1, nudge=1.0)
    changed = [tensor.name for tensor in diff(f"{a}@1", c).tensors if tensor.kind != "equal"]
    assert changed == ["optimizer.weight.exp_avg"]
    assert "model.weight" in {tensor.name for tensor in diff(f"{a}@1", f"{a}@2").tensors}
    (a / "step-00000001.state.ckptz").unlink()
    assert diff(f"{a}@1", f"{b}@1").n_only_b
    run = ckptz("diff", f"{a}@3", a, fails=True)
    assert (run.exit_code, f"{a}: has no .ckptz file of step 3" in run.error) == (MISSING, True)


def test_random_states_are_named_by_their_generator(tmp_path: Path) -> None:
    report = diff(train(tmp_path / "a", 1), train(tmp_path / "b", 1, seed=1))
    assert (report.is_equal, report.n_equal, report.random_states) == (
        False,
        10,
        ("rng.python",),
    )  # equal random states are in n_equal
    torch.save({"rng": {"torch": torch.zeros(9), "numpy": {"position": 1}}}, tmp_path / "a.pt")
    torch.save({"rng": {"torch": torch.ones(9), "numpy": {"position": 2}}}, tmp_path / "b.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (report.random_states, report.tensors, report.values) == (("rng.numpy", "rng.torch"), (), ())
    run = ckptz("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--exit-code", fails=True)
    assert (run.exit_code, "random states differ: rng.numpy, rng.torch" in run.stdout) == (DIFFERENT, True)


def save_folder(
    folder: Path, moment: float, lr: float, seed: float, options: ChainOptions = DEFAULTS
) -> Path:
    """Write the files of the Trainer mixin on two ranks, and one file of the Trainer itself."""
    states = {
        "model": {"w": torch.linspace(0, 1, 4096).reshape(64, 64)},
        "state": {"optimizer": {"w": {"exp_avg": torch.full((3,), moment)}}, "groups": [{"lr": lr}]},
        "rng-00000": {"rng": {"host": torch.zeros(2)}},
        "rng-00001": {"rng": {"host": torch.full((2,), seed)}},
    }
    folder.mkdir(parents=True)
    for name, state in states.items():
        Linked(options).write(folder / f"{name}.ckptz", job_of(state, 2))
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_all_files_of_a_folder_of_the_trainer_are_compared(tmp_path: Path) -> None:
    a = save_folder(tmp_path / "run" / "checkpoint-2", 0.0, 0.1, 1.0)
    assert "equal bit for bit; not compared: trainer_state.json" in ckptz("diff", a, a).stdout
    for i, values in enumerate(((1.0, 0.1, 1.0), (0.0, 0.2, 1.0), (0.0, 0.1, 2.0))):
        report = diff(f"{tmp_path / 'run'}@2", save_folder(tmp_path / f"other-{i}", *values))
        assert not report.is_equal
        changed = [tensor.name for tensor in report.tensors if tensor.kind != "equal"]
        assert changed == ["optimizer.w.exp_avg"] * (i == 0)
        assert [value.name for value in report.values] == ["groups.0.lr"] * (i == 1)
        assert report.random_states == ("rng-00001.rng.host",) * (i == 2)


def test_files_of_other_programs_beside_a_model_are_named(tmp_path: Path) -> None:
    a = save_folder(tmp_path / "a", 0.0, 0.1, 1.0)
    for path in a.glob("*.ckptz"):
        if path.name != "model.ckptz":
            path.unlink()
    (a / "optimizer.bin").write_bytes(b"a pickle of accelerate")
    assert diff(a, a).not_compared == ("optimizer.bin", "trainer_state.json")


def test_a_lossy_folder_is_compared_with_its_residual_files(tmp_path: Path) -> None:
    lossy = ChainOptions(config=KMeans(levels=4, min_elements=1))
    a = save_folder(tmp_path / "a", 0.0, 0.1, 1.0)
    b = save_folder(tmp_path / "b", 0.0, 0.1, 1.0, lossy)
    assert list(b.glob("model.exact-*"))
    assert diff(a, b).is_equal
    assert not diff(a / "model.ckptz", b / "model.ckptz").is_equal


# --- chunks --------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that the index of each decoded chunk is appended to."""
    indices: list[int] = []
    decode: Callable[..., Any] = reader.decode_chunk

    def recording(header: Any, index: int, *arguments: Any) -> Any:
        indices.append(index)
        return decode(header, index, *arguments)

    monkeypatch.setattr(reader, "decode_chunk", recording)
    return indices


def test_chunks_that_are_equal_are_not_decoded_twice(tmp_path: Path, decoded: list[int]) -> None:
    a = np.zeros(3 * CHUNK_VALUES, "u1")
    b = a.copy()
    b[CHUNK_VALUES + 5] = 7
    paths = write_pair(tmp_path, {"w": row_of("U8", a)}, {"w": row_of("U8", b)})
    for path in paths:
        compress([path], jobs=1)
    packed = [path.with_suffix(".ckptz") for path in paths]
    assert diff(packed[0], paths[0]).is_equal
    assert diff(packed[0], packed[0]).is_equal
    assert not decoded
    change = only_tensor(diff(*packed, jobs=1))
    assert (change.max_change, change.changed_share) == (7.0, 1 / len(a))
    assert sorted(decoded) == [0, 1, 1, 2]
    decoded.clear()
    assert only_tensor(diff(packed[0], paths[1])) == change
    assert decoded == [1]
