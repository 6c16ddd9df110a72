"""First moments as sums of few outer products: the choice of terms, their decoding, and files with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptz import Checkpointer, Grid, Moments, inspect, rebase, restore
from ckptz.codec.low_rank import FirstMoments, low_rank
from ckptz.format import plan as plan_module
from ckptz.format.dtypes import dtype_of
from ckptz.format.plan import LowRank
from ckptz.format.sources import ArraySource
from ckptz.format.streams import Embedded
from ckptz.kernels import floats, moments
from ckptz.torch import load_file
from tests.support import reference
from tests.support.checkpointer_support import LOSSY

Array = np.ndarray[Any, Any]


def source_of(values: Array, dtype: str = "F32") -> ArraySource:
    f32_patterns = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(-1)
    patterns = floats.from_f32(f32_patterns, {"F32": floats.F32, "BF16": floats.BF16}[dtype])
    return ArraySource(dtype_of(dtype), values.shape, patterns)


def matrix_of(terms: LowRank) -> Array:
    """Decode the sum of the terms, float32 [n_rows, n_columns]."""
    n = terms.n_rows * terms.n_columns
    return terms.products(0, n).view(np.float32).reshape(terms.n_rows, terms.n_columns)


def matrix_of_rank(rng: np.random.Generator, rank: int, shape: tuple[int, int] = (200, 300)) -> Array:
    left, right = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, shape[1]))
    return (left @ right).astype(np.float32)


def share_kept(terms: LowRank, exact: Array, roots: Array | float = 1.0) -> float:
    """Return the share of the squared sum of `exact / roots` that the terms restore: 1 without errors."""
    updates = exact.reshape(terms.n_rows, -1) / roots
    errors = updates - matrix_of(terms) / roots
    return float(1 - (errors**2).sum() / (updates**2).sum())


# --- choice of terms ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_all_strong_directions_are_kept_in_few_bits(dtype: str) -> None:
    rng = np.random.default_rng(0)
    exact = matrix_of_rank(rng, 3) + 0.1 * rng.standard_normal((200, 300)).astype(np.float32)
    terms = low_rank(source_of(exact, dtype), None, 1.0)
    assert len(terms.scales) == 3
    assert share_kept(terms, exact) > 0.97
    assert 8 * len(terms.stored.stream) < 0.15 * exact.size


def test_noise_vectors_and_small_updates_have_no_terms() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((256, 256)).astype(np.float32)
    assert low_rank(source_of(noise), None, 0.2) is None
    strong = matrix_of_rank(rng, 1)
    assert low_rank(source_of(strong), None, 0.4) is not None
    assert low_rank(source_of(strong), None, 1e-4) is None
    assert low_rank(source_of(strong), None, 0.0) is None
    assert low_rank(source_of(strong), None, float("inf")) is None
    assert low_rank(source_of(strong[0]), None, 1.0) is None
    assert low_rank(source_of(np.zeros((50, 60), np.float32)), None, 1.0) is None
    assert low_rank(source_of(strong[:3, :3]), None, 0.3) is None  # a term costs 32 bits and 6 codes


def test_the_rank_grows_with_the_update_scale() -> None:
    rng = np.random.default_rng(0)
    sizes = 0.7 ** np.arange(40)
    exact = (rng.standard_normal((256, 40)) * sizes) @ rng.standard_normal((40, 256))
    ranks = []
    for update_scale in (0.1, 0.3, 1.0, 3.0, 10.0):
        terms = low_rank(source_of(exact.astype(np.float32)), None, update_scale)
        ranks.append(0 if terms is None else len(terms.scales))
    assert ranks == sorted(ranks)
    assert ranks[0] < 4
    assert ranks[-1] > 8


def test_the_rank_may_exceed_the_vectors_of_the_first_iteration() -> None:
    """The first iteration has 16 vectors."""
    rng = np.random.default_rng(0)
    exact = matrix_of_rank(rng, 40)
    terms = low_rank(source_of(exact), None, 3.0)
    assert len(terms.scales) == 40
    assert share_kept(terms, exact) > 0.95


def test_terms_approximate_updates_and_not_moments() -> None:
    """Updates are first moments divided by roots of second moments, which range from e^-4 to e^4 here."""
    rng = np.random.default_rng(0)
    roots = np.exp(rng.uniform(-2, 2, 200))[:, None] * np.exp(rng.uniform(-2, 2, 300))
    updates = matrix_of_rank(rng, 2)
    second = source_of((roots**2).astype(np.float32))
    terms = low_rank(source_of((updates * roots).astype(np.float32)), second, 1.0)
    assert share_kept(terms, updates * roots, roots) > 0.9
    has_gradient = np.where(np.arange(200)[:, None] < 20, 0.0, 1.0)  # by row
    second = source_of((roots * has_gradient).astype(np.float32) ** 2)
    terms = low_rank(source_of((updates * roots * has_gradient).astype(np.float32)), second, 1.0)
    assert not matrix_of(terms)[:20].any()


def test_all_dimensions_but_the_first_are_the_columns_of_a_matrix() -> None:
    rng = np.random.default_rng(0)
    exact = matrix_of_rank(rng, 2, (64, 27 * 16)).reshape(64, 16, 3, 9)
    terms = low_rank(source_of(exact), None, 1.0)
    assert (terms.n_rows, terms.n_columns, len(terms.scales)) == (64, 432, 2)
    assert share_kept(terms, exact) > 0.95


def test_terms_of_the_previous_file_start_the_iteration() -> None:
    rng = np.random.default_rng(0)
    exact = matrix_of_rank(rng, 4) + 2 * rng.standard_normal((200, 300)).astype(np.float32)
    cold = low_rank(source_of(exact), None, 0.5)
    warm = low_rank(source_of(exact), None, 0.5, cold, seed=1)
    assert len(warm.scales) == len(cold.scales)
    assert share_kept(warm, exact) > 0.98 * share_kept(cold, exact)
    narrow = source_of(exact[:, :100])
    assert low_rank(narrow, None, 0.5, cold) is not None, "terms of another shape are ignored"


@pytest.mark.parametrize("n_vectors", [1, 16, 33])
def test_products_of_the_kernels_equal_those_of_numpy(n_vectors: int) -> None:
    rng = np.random.default_rng(n_vectors)
    matrix = rng.standard_normal((70, 90)).astype(np.float32)
    for multiply, factor in ((moments().add_products, matrix), (moments().add_transposed_products, matrix.T)):
        vectors = rng.standard_normal((factor.shape[1], n_vectors)).astype(np.float32)
        before = rng.standard_normal((len(factor), n_vectors)).astype(np.float32)
        out = before.copy()
        multiply(matrix, vectors, out)
        np.testing.assert_allclose(out, before + factor.astype(np.float64) @ vectors, rtol=0, atol=2e-5)


def test_singular_values_and_vectors_equal_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    exact = (matrix_of_rank(rng, 30) * 10).astype(np.float32)
    first_moments = FirstMoments.of(source_of(exact), None)
    left, values, right = first_moments.singular(40, np.empty((300, 0), np.float32), 0)
    expected = np.linalg.svd(exact.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(values[:30], expected[:30], rtol=1e-4)
    assert values[30:].max() < 1e-3 * values[0]
    for vectors in (left[:, :30], right[:, :30]):
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(30), atol=1e-3)
    np.testing.assert_allclose((left[:, :30] * values[:30]) @ right[:, :30].T, exact, atol=1e-3 * values[0])


# --- decoding -------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_range_of_elements_decodes_to_the_bits_of_the_definition(data: st.DataObject) -> None:
    """Each term is added in double precision and rounded to float32, subnormal results included."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rank, n_rows, n_columns = (data.draw(st.integers(1, n)) for n in (5, 9, 9))
    power = data.draw(st.sampled_from([-149, -126, -100, -20, 0, 90]))
    scales = (rng.standard_normal(rank) * 2.0**power).astype(np.float32).view(np.uint32)
    codes = rng.integers(0, 256, rank * (n_rows + n_columns)).astype(np.uint8)
    terms = LowRank(n_rows, n_columns, scales, Embedded.of(codes))
    n = n_rows * n_columns
    levels = codes.view(np.int8).reshape(rank, -1).astype(np.float32).view(np.uint32)
    expected = np.zeros(n, np.uint32)
    for scale, term_levels in zip(scales, levels, strict=True):
        rows = reference.outer_product(term_levels[:n_rows], scale[None], 0, n_rows)
        products = reference.outer_product(rows, term_levels[n_rows:], 0, n)
        sums = reference.widen_f64(expected) + reference.widen_f64(products)
        expected = reference.round_f64(sums)
    np.testing.assert_array_equal(terms.products(0, n), expected)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    np.testing.assert_array_equal(terms.products(begin, end), expected[begin:end])


def test_wide_rows_are_computed_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.arange(1, 14, dtype=np.uint8)
    terms = LowRank(3, 10, np.array([0x3F800000], np.uint32), Embedded.of(codes))
    expected = terms.products(0, 30)
    monkeypatch.setattr(plan_module, "MAX_NUMPY_COLUMNS", 9)
    wide_terms = LowRank(3, 10, terms.scales, terms.stored)
    np.testing.assert_array_equal(wide_terms.products(7, 23), expected[7:23])


# --- files ----------------------------------------------------------------------------------------


class Run:
    """A layer in training whose gradients are one constant direction plus noise."""

    def __init__(self, dtype: torch.dtype = torch.float32, make: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(128, 192, dtype=dtype)
        self.optimizer = make(self.model.parameters(), lr=1e-3)
        self.direction = torch.outer(torch.randn(192), torch.randn(128))

    def train(self, n: int) -> None:
        for _ in range(n):
            self.model.weight.grad = (self.direction + torch.randn(192, 128)).to(self.model.weight.dtype)
            self.model.bias.grad = torch.randn(192).to(self.model.weight.dtype)
            self.optimizer.step()

    def moment(self) -> Array:
        state = self.optimizer.state[self.model.weight]
        key = "exp_avg" if "exp_avg" in state else "momentum_buffer"
        return np.asarray(state[key].to(torch.float32).numpy()).copy()


def train_and_save(folder: Path, run: Run, **options: Any) -> None:
    """Save two steps with 15 updates before each."""
    options = {"config": Grid(), "keep": LOSSY, "background": False, "jobs": 1, **options}
    with Checkpointer(folder, run.model, run.optimizer, **options) as saver:
        for step in (20, 35):
            run.train(15)
            saver.save(step)


def envelope_of(path: Path) -> bytes:
    """Return the first bytes of a file, which list the features that a reader needs."""
    return path.read_bytes()[:4000]


@pytest.mark.parametrize(
    ("dtype", "make", "max_bits"),
    [
        (torch.float32, torch.optim.AdamW, 0.3),
        (torch.bfloat16, lambda p, lr: torch.optim.SGD(p, lr=10 * lr, momentum=0.9), 2.0),
    ],
)
def test_an_optimizer_state_keeps_the_main_direction_of_its_first_moments(
    tmp_path: Path, dtype: torch.dtype, make: Any, max_bits: float
) -> None:
    run = Run(dtype, make)
    run.train(300)  # after few updates, Adam's second moments are much smaller than squared first moments
    train_and_save(tmp_path, run)
    for step in (20, 35):
        path = tmp_path / f"step-{step:08d}.state.ckptz"
        report = inspect(path)
        weight, bias = sorted(
            (t for t in report.tensors if t.name.endswith(("exp_avg", "momentum_buffer"))),
            key=lambda t: -len(t.shape),
        )
        assert report.format_version == "1.1"
        assert b"low-rank" in envelope_of(path)
        assert weight.predictor == "low-rank"
        assert weight.lossy.method == "first-moment"
        assert weight.lossy.settings["rank"] >= 1
        assert weight.bits_per_element < max_bits
        assert bias.lossy.settings["rank"] == 0
        restored = load_file(path)[weight.name].to(torch.float32).numpy()
    exact = run.moment()
    assert (restored * exact).sum() > 0.5 * (exact**2).sum()
    assert inspect(tmp_path / "step-00000035.ckptz").format_version == "1.0"


def test_files_without_low_rank_terms_have_version_1_0(tmp_path: Path) -> None:
    run = Run()
    run.direction *= 0
    train_and_save(tmp_path / "noise", run, config=Grid(moments=Moments()), effort="small")
    train_and_save(tmp_path / "exact", run, config=Grid(moments=None), effort="small")
    for folder in ("noise", "exact"):
        for path in (tmp_path / folder).glob("*.ckptz"):
            assert inspect(path).format_version == "1.0"
            assert b"low-rank" not in envelope_of(path)


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        train_and_save(tmp_path / name, Run())
    for path in (tmp_path / "first").glob("*.ckptz"):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_rebase_and_restore_keep_the_values_of_low_rank_terms(tmp_path: Path) -> None:
    train_and_save(tmp_path, Run())
    path = tmp_path / "step-00000035.state.ckptz"
    expected = load_file(path)
    rebase(path, tmp_path / "rebased.ckptz")
    assert inspect(tmp_path / "rebased.ckptz").format_version == "1.1"
    assert b"low-rank" in envelope_of(tmp_path / "rebased.ckptz")
    rebased = load_file(tmp_path / "rebased.ckptz")
    for name, tensor in expected.items():
        assert torch.equal(rebased[name], tensor)
    restore(path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    first_moment = plain["optimizer"]["weight"]["exp_avg"]
    assert torch.equal(first_moment, expected["optimizer.weight.exp_avg"])


def test_larger_steps_keep_fewer_directions(tmp_path: Path) -> None:
    ranks = []
    for step in (0.1, 1.0, 16.0):
        train_and_save(tmp_path / str(step), Run(), config=Grid(moments=Moments(first_step=step)))
        tensors = inspect(tmp_path / str(step) / "step-00000035.state.ckptz").tensors
        [record] = [tensor.lossy for tensor in tensors if tensor.name == "optimizer.weight.exp_avg"]
        assert record.settings["step"] == step / 2
        ranks.append(record.settings["rank"])
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > ranks[2] == 0
