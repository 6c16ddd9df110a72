"""`ckptz diff`: every figure against plain numpy, over all kinds of inputs, with few decodings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptz import compress, diff
from ckptz.codec.units import CHUNK_UNITS
from ckptz.commands.diff import DiffReport, TensorDiff
from ckptz.container import reader
from ckptz_cli.diff import DIFFERENT
from ckptz_cli.errors import DAMAGED, INTERNAL, INTERRUPTED, IO, MISSING, USAGE
from tests.support.cli_support import Chain, Row, a_state, bf16, ckptz, hf_folder, write_plain

ALL_DTYPES = ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"]
OTHERS: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
ALL_INTEGERS = ["I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"]


def written(tmp_path: Path, a: dict[str, Row], b: dict[str, Row]) -> list[Path]:
    return [write_plain(tmp_path / f"{name}.safetensors", rows) for name, rows in (("a", a), ("b", b))]


def diffed(tmp_path: Path, a: dict[str, Row], b: dict[str, Row], **options: Any) -> DiffReport:
    first, second = written(tmp_path, a, b)
    return diff(first, second, jobs=1, **options)


def row(dtype: str, array: np.ndarray) -> Row:
    return dtype, array.shape, array.tobytes()


def one(report: DiffReport) -> TensorDiff:
    [diff] = report.tensors
    return diff


def numpy_dtype(name: str) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    return f"<{name[0].lower()}{int(name[1:]) // 8}"


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_changes_of_floats_are_those_of_numpy(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(0, 1, 5000).astype(numpy_dtype(name))
    b = np.where(rng.random(5000) < 0.4, a, rng.normal(0, 1, 5000).astype(numpy_dtype(name)))
    found = one(diffed(tmp_path, {"w": row(name, a)}, {"w": row(name, b)}))
    exact, change = a.astype(np.float64), b.astype(np.float64) - a.astype(np.float64)
    rms_change, rms = (math.sqrt(np.mean(x**2)) for x in (change, exact))
    assert (found.kind, found.n_not_finite) == ("changed", 0)
    assert found.max_change == np.abs(change).max()
    assert found.rms_change == pytest.approx(rms_change)
    assert found.relative_change == pytest.approx(rms_change / rms)
    patterns = (x.view(f"u{x.itemsize}") for x in (a, b))
    assert found.changed_share == np.mean(np.not_equal(*patterns))


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "BF16"])
def test_every_pattern_has_its_number(name: str, tmp_path: Path) -> None:
    dtype = numpy_dtype(name)
    n_bits = 8 * np.dtype(dtype).itemsize
    a = np.arange(1 << n_bits, dtype=f"u{n_bits // 8}").view(dtype)
    with np.errstate(invalid="ignore"):
        values = a.astype(np.float64)
    zeros = np.zeros_like(a)
    finite = np.isfinite(values)
    found = one(diffed(tmp_path, {"w": row(name, zeros)}, {"w": row(name, a)}))
    assert found.n_not_finite == np.count_nonzero(~finite)
    assert found.max_change == np.abs(values[finite]).max()
    assert found.rms_change == pytest.approx(math.sqrt(np.mean(values[finite] ** 2)))
    assert found.relative_change is None  # of nothing


@pytest.mark.parametrize("name", ALL_INTEGERS)
def test_changes_of_integers_are_exact(name: str, tmp_path: Path) -> None:
    info = np.iinfo(numpy_dtype(name))
    a = np.array([info.min, info.max, 5, 100], numpy_dtype(name))
    for b in (a[::-1].copy(), a ^ np.array(1, a.dtype)):
        found = one(diffed(tmp_path, {"w": row(name, a)}, {"w": row(name, b)}))
        wanted = max(abs(int(x) - int(y)) for x, y in zip(a, b, strict=True))
        assert found.max_change == float(wanted) >= 1
        assert found.changed_share == 1


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    a = np.array([1, np.nan, np.inf, -np.inf, 2, 0], "<f4")
    b = np.array([1, np.nan, np.inf, 3, np.nan, 0.5], "<f4")
    found = one(diffed(tmp_path, {"w": row("F32", a)}, {"w": row("F32", b)}))
    assert (found.n_not_finite, found.max_change) == (4, 0.5)
    assert found.changed_share == 0.5
    assert "4 not finite" in ckptz("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout


def test_what_exceeds_a_double_is_not_reported(tmp_path: Path) -> None:
    a, b = np.array([-1.7e308, 1], "<f8"), np.array([1.7e308, 1], "<f8")
    found = one(diffed(tmp_path, {"w": row("F64", a)}, {"w": row("F64", b)}))
    assert (found.max_change, found.rms_change, found.relative_change) == (None, None, None)
    assert found.changed_share == 0.5
    run = ckptz("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert "Infinity" not in run.stdout


def test_signs_of_zeros_are_bits_and_no_change(tmp_path: Path) -> None:
    a, b = np.zeros(4, "<f4"), -np.zeros(4, "<f4")
    found = one(diffed(tmp_path, {"w": row("F32", a)}, {"w": row("F32", b)}))
    assert (found.kind, found.changed_share, found.max_change) == ("changed", 1.0, 0.0)


def test_dtypes_without_numbers_still_have_a_share(tmp_path: Path) -> None:
    found = one(diffed(tmp_path, {"w": ("F4", (4,), b"ab")}, {"w": ("F4", (4,), b"ac")}))
    assert (found.changed_share, found.max_change) == (0.5, None)


# --- what differs ---------------------------------------------------------------------------------


def test_names_dtypes_and_shapes_that_differ(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 6).astype("<f4")
    a = {
        "same": row("F32", values),
        "gone": row("F32", values),
        "cast": row("F32", values),
        "bits": row("F32", values),
        "bent": row("F32", values),
        "none": ("F32", (0, 7), b""),
    }
    b = {
        "same": row("F32", values),
        "cast": ("BF16", (6,), bf16(values).tobytes()),
        "bits": ("F4", (6,), b"abc"),
        "bent": row("F32", values.reshape(2, 3)),
        "none": ("F32", (0, 7), b""),
        "new": row("F32", values),
    }
    report = diffed(tmp_path, a, b, sort="name")
    found = {diff.name: diff for diff in report.tensors}
    assert {name: diff.kind for name, diff in found.items()} == {
        **{"bent": "reshaped", "bits": "retyped", "cast": "retyped", "gone": "only in A"},
        **{"new": "only in B", "none": "equal", "same": "equal"},
    }
    assert (found["bent"].shape_a, found["bent"].shape_b) == ((6,), (2, 3))
    assert (found["gone"].dtype_a, found["gone"].dtype_b) == ("F32", None)
    cut = (bf16(values).astype("<u4") << 16).view("<f4")
    assert found["cast"].max_change == float(np.abs(values - cut).max())
    assert found["cast"].changed_share == np.mean(values != cut)
    assert found["bits"].max_change is None
    counts = (report.n_tensors, report.n_equal, report.n_changed, report.n_only_a, report.n_only_b)
    assert counts == (7, 2, 3, 1, 1)
    text = ckptz("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout
    for part in ("6 -> 2x3", "F32 -> BF16", "only in B", "7 tensors, 2 equal, 3 changed, 1 only in A"):
        assert part in text


def test_the_total_is_over_all_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    a = {name: rng.normal(0, 1, n) for name, n in (("x", 1000), ("y", 3000), ("z", 500))}
    b = {name: array + 0.1 * (name != "z") for name, array in a.items()}
    report = diffed(tmp_path, *({n: row("F64", x) for n, x in s.items()} for s in (a, b)))
    changed = np.concatenate([a["x"], a["y"]])
    assert report.changed_share == pytest.approx(4000 / 4500)
    assert report.relative_change == pytest.approx(0.1 / math.sqrt(np.mean(changed**2)))
    assert report.max_change == pytest.approx(0.1)


def test_metadata_are_compared_apart(tmp_path: Path) -> None:
    state = {"w": ("U8", (1,), b"a")}
    paths = [write_plain(tmp_path / f"{i}.safetensors", state, {"step": str(i)}) for i in range(2)]
    report = diff(*paths)
    assert (report.is_equal, report.has_same_metadata) == (True, False)
    assert "all 1 tensors are equal bit for bit, metadata differ" in ckptz("diff", *paths).stdout


# --- order and exit code --------------------------------------------------------------------------


def sortable() -> tuple[dict[str, Row], dict[str, Row]]:
    base = np.full(100, 10.0)
    far = base.copy()
    far[0] = 25
    a = {name: row("F64", base) for name in ("all", "equal", "far", "gone")}
    return a, {"all": row("F64", base + 2), "equal": row("F64", base), "far": row("F64", far)}


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("change", ["gone", "all", "far", "equal"]),
        ("max", ["gone", "far", "all", "equal"]),
        ("share", ["gone", "all", "far", "equal"]),
        ("name", ["all", "equal", "far", "gone"]),
    ],
)
def test_tensors_are_sorted_and_cut(sort: Any, names: list[str], tmp_path: Path) -> None:
    a, b = sortable()
    assert [diff.name for diff in diffed(tmp_path, a, b, sort=sort).tensors] == names
    assert [diff.name for diff in diffed(tmp_path, a, b, sort=sort, top=2).tensors] == names[:2]
    assert diffed(tmp_path, a, b, top=0).n_changed == 2
    run = ckptz(
        "diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--sort", sort, "--top", 1, "--json"
    )
    assert [diff["name"] for diff in run.json["tensors"]] == names[:1]


def test_the_exit_code_tells_only_if_asked_and_is_no_error(chain: Chain) -> None:
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
        for first in (chain.first, chain.anchor)
        for second in (chain.second, chain.delta)
    ]
    assert all(report == reports[0] for report in reports)
    assert {diff.kind for diff in reports[0]} == {"equal", "changed"}


def test_folders_and_torch_files_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = hf_folder(tmp_path / "hf")
    plain = write_plain(tmp_path / "one.safetensors", a_state(n=200))
    assert diff(folder, plain).is_equal
    torch.save({"w": torch.arange(4.0)}, tmp_path / "a.pt")
    write_plain(tmp_path / "b.safetensors", {"w": ("F32", (4,), np.arange(4, dtype="<f4").tobytes())})
    assert diff(tmp_path / "a.pt", tmp_path / "b.safetensors").is_equal


def test_bases_are_found_by_the_search_path(chain: Chain, tmp_path: Path) -> None:
    alone = chain.delta.rename(tmp_path / "alone.ckptz")
    assert ckptz("diff", alone, chain.second, fails=True).exit_code == MISSING
    ckptz("diff", alone, chain.second, "--search-path", chain.folder, "--exit-code")


# --- codes and chunks -----------------------------------------------------------------------------


def test_codes_that_moved_are_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(0, 1, (100, 100)).astype("<f4")
    b = a.copy()
    b[:10] = rng.normal(0, 1, (10, 100))
    paths = written(tmp_path, {"w": row("F32", a)}, {"w": row("F32", b)})
    ckptz("compress", *paths, "--chain", "--method", "kmeans", "--levels", 16)
    found = one(diff(tmp_path / "a.ckptz", tmp_path / "b.ckptz"))
    assert found.codes_moved is not None
    assert 0.05 < found.codes_moved < 0.15
    assert one(diff(tmp_path / "a.ckptz", paths[1])).codes_moved is None
    assert "codes moved" in ckptz("diff", tmp_path / "a.ckptz", tmp_path / "b.ckptz").stdout
    assert "codes moved" not in ckptz("diff", *paths).stdout


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every chunk that is decoded."""
    calls: list[int] = []
    decode: Callable[..., Any] = reader.decode_chunk

    def counting(header: Any, index: int, *rest: Any) -> Any:
        calls.append(index)
        return decode(header, index, *rest)

    monkeypatch.setattr(reader, "decode_chunk", counting)
    return calls


def test_chunks_that_are_equal_are_not_decoded_twice(tmp_path: Path, counted: list[int]) -> None:
    a = np.zeros(3 * CHUNK_UNITS, "u1")
    b = a.copy()
    b[CHUNK_UNITS + 5] = 7
    paths = written(tmp_path, {"w": row("U8", a)}, {"w": row("U8", b)})
    for path in paths:
        compress([path], jobs=1)
    packed = [path.with_suffix(".ckptz") for path in paths]
    assert diff(packed[0], paths[0]).is_equal
    assert diff(packed[0], packed[0]).is_equal
    assert not counted
    found = one(diff(*packed, jobs=1))
    assert (found.max_change, found.changed_share) == (7.0, 1 / len(a))
    assert sorted(counted) == [0, 1, 1, 2]
    counted.clear()
    assert one(diff(packed[0], paths[1])) == found
    assert counted == [1]
