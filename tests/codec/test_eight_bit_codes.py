"""Codes of 8-bit optimizers have sums of outer products as contexts where this makes frames smaller."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptz import inspect, rebase
from ckptz.codec import eight_bit
from ckptz.codec.lossless import Lossless
from ckptz.format import frame
from ckptz.format.byte_source import FileBytes
from ckptz.format.context_rules import Products
from ckptz.format.envelope import read_envelope
from ckptz.numpy import load_file, save_file

Array = np.ndarray[Any, Any]
SHAPES = [(256, 192), (1100, 1024)]  # one chunk, and two chunks
NAMES = ("w.state1", "w.state2")


def codes_of(shape: tuple[int, int], seed: int = 0, rank: int = 3) -> dict[str, Array]:
    """Return uint8 codes of two moments of low rank plus noise, and the scales of blocks of 256 elements."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, shape[1]))
    noise = rng.standard_normal(shape)
    codes = {}
    for k, name in enumerate(NAMES):
        values = rows @ columns + (0.2 + k) * noise
        codes[name] = np.clip(np.rint(values * 24 + 128), 0, 255).astype(np.uint8)
        codes[f"w.absmax{name[-1]}"] = np.ones(shape[0] * shape[1] // 256, np.float32)
    return codes


def features_of(path: Path) -> tuple[str, str]:
    """Return the format version and the required features of a file."""
    metadata = read_envelope(FileBytes(path)).metadata
    return metadata["ckptz.version"], metadata["ckptz.required_features"]


def bytes_of(path: Path) -> int:
    """Return the stored bytes of the codes in a file."""
    return sum(tensor.stored_bytes for tensor in inspect(path).tensors if tensor.name in NAMES)


def check_restored(path: Path, tensors: Mapping[str, Array]) -> None:
    restored = load_file(path)
    assert restored.keys() == tensors.keys()
    for name, values in tensors.items():
        assert np.array_equal(restored[name], values), name


@pytest.mark.parametrize("shape", SHAPES)
def test_products_make_codes_of_low_rank_smaller(shape: tuple[int, int], tmp_path: Path) -> None:
    codes = codes_of(shape)
    save_file(codes, tmp_path / "a.ckptz")
    save_file(codes, tmp_path / "fast.ckptz", effort="fast")
    assert features_of(tmp_path / "a.ckptz") == ("1.3", "lossless,products")
    assert "products" not in features_of(tmp_path / "fast.ckptz")[1]
    assert bytes_of(tmp_path / "a.ckptz") < bytes_of(tmp_path / "fast.ckptz")
    check_restored(tmp_path / "a.ckptz", codes)


@pytest.mark.parametrize(("max_rank", "has_products"), [(3, False), (5, True)])
def test_the_rank_is_limited_by_the_levels_that_readers_allow(
    max_rank: int, has_products: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit matters for matrices of a million rows; the lowest rank is 4."""
    codes = codes_of(SHAPES[0])
    for module in (frame, eight_bit):
        monkeypatch.setattr(module, "MAX_INDICES", max_rank * sum(SHAPES[0]), raising=False)
    save_file(codes, tmp_path / "a.ckptz", effort="small")
    assert ("products" in features_of(tmp_path / "a.ckptz")[1]) is has_products
    check_restored(tmp_path / "a.ckptz", codes)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_delta_uses_the_base_or_products_whichever_is_smaller(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    before, after = codes_of(shape), codes_of(shape, seed=1)
    after["w.state2"] = before["w.state2"] + (np.arange(before["w.state2"].size) % 17 == 0).reshape(shape)
    save_file(before, tmp_path / "a.ckptz")
    save_file(after, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    assert features_of(tmp_path / "b.ckptz") == ("1.3", "delta,lossless,products")
    predictors = {tensor.name: tensor.predictor for tensor in inspect(tmp_path / "b.ckptz").tensors}
    assert (predictors["w.state1"], predictors["w.state2"]) == ("zero", "base")
    check_restored(tmp_path / "b.ckptz", after)
    rebase(tmp_path / "b.ckptz", tmp_path / "rebased.ckptz")
    assert features_of(tmp_path / "rebased.ckptz") == ("1.3", "lossless,products")
    check_restored(tmp_path / "rebased.ckptz", after)


def test_random_codes_have_no_products(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes = codes_of((64, 64)) | {name: rng.integers(0, 256, (64, 64), np.uint8) for name in NAMES}
    save_file(codes, tmp_path / "a.ckptz")
    save_file({**codes, "w.state2": codes["w.state2"] + 1}, tmp_path / "b.ckptz", base=tmp_path / "a.ckptz")
    rebase(tmp_path / "b.ckptz", tmp_path / "rebased.ckptz")
    for name in ("a", "rebased"):
        assert features_of(tmp_path / f"{name}.ckptz") == ("1.0", "lossless")
    assert features_of(tmp_path / "b.ckptz") == ("1.0", "delta,lossless")


@pytest.mark.parametrize(
    "change",
    [
        lambda codes: {name: values for name, values in codes.items() if "absmax" not in name},
        lambda codes: {name.replace("state", "codes"): values for name, values in codes.items()},
        lambda codes: {name: values.reshape(-1) for name, values in codes.items()},
        lambda codes: {n: v.reshape(2, -1) if v.dtype == np.uint8 else v for n, v in codes.items()},
        lambda codes: {n: v.view(np.int8) if v.dtype == np.uint8 else v for n, v in codes.items()},
    ],
    ids=["no scales", "other names", "no matrix", "two rows", "another dtype"],
)
def test_uint8_tensors_that_are_not_codes_of_moments_have_no_products(change: Any, tmp_path: Path) -> None:
    codes = change(codes_of((64, 64)))
    save_file(codes, tmp_path / "a.ckptz")
    assert "products" not in features_of(tmp_path / "a.ckptz")[1]
    check_restored(tmp_path / "a.ckptz", codes)


def test_sparse_deltas_and_constant_codes_have_no_products(tmp_path: Path) -> None:
    codes = {name: np.full_like(values, 7) for name, values in codes_of((64, 64)).items()}
    save_file(codes, tmp_path / "a.ckptz", config=Lossless(sparse=True))
    save_file(codes, tmp_path / "b.ckptz")
    for name in ("a", "b"):
        assert features_of(tmp_path / f"{name}.ckptz") == ("1.0", "lossless")
        check_restored(tmp_path / f"{name}.ckptz", codes)


@pytest.mark.parametrize(
    ("n_rows", "n_columns", "begin", "end"),
    [
        (7, 5, 3, 31),
        (7, 5, 8, 9),
        (1, 9000, 40, 8000),
        (3, 5000, 4990, 15000),
        (40, 4096, 0, 131072),
    ],
)
def test_contexts_equal_products_of_integer_matrices(
    n_rows: int, n_columns: int, begin: int, end: int
) -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(-128, 128, (64, n_rows + n_columns)).astype(np.int8)
    products = levels[:, :n_rows].T.astype(np.int64) @ levels[:, n_rows:].astype(np.int64)
    for shift in (0, 9, 20):
        expected = np.clip(128 + (products >> shift), 0, 255).reshape(-1)[begin:end]
        labels = Products(shift, n_rows, levels).labels(begin, end)
        assert labels.dtype == np.uint8
        assert np.array_equal(labels, expected)
