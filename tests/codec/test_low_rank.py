"""First moments as sums of few outer products: what is worth its bits is kept, and decodes alike."""

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


def source(values: Array, dtype: str = "F32") -> ArraySource:
    f32_patterns = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(-1)
    patterns = floats.from_f32(f32_patterns, {"F32": floats.F32, "BF16": floats.BF16}[dtype])
    return ArraySource(dtype_of(dtype), values.shape, patterns)


def whole(found: LowRank) -> Array:
    n = found.n_rows * found.n_columns
    return found.products(0, n).view(np.float32).reshape(found.n_rows, found.n_columns)


def few_directions(rng: np.random.Generator, rank: int, shape: tuple[int, int] = (200, 300)) -> Array:
    left, right = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, shape[1]))
    return (left @ right).astype(np.float32)


def share_kept(found: LowRank, exact: Array, roots: Array | float = 1.0) -> float:
    lost = (exact.reshape(found.n_rows, -1) - whole(found)) / roots
    return float(1 - (lost**2).sum() / ((exact.reshape(found.n_rows, -1) / roots) ** 2).sum())


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_directions_that_move_much_are_kept(dtype: str) -> None:
    rng = np.random.default_rng(0)
    exact = few_directions(rng, 3) + 0.1 * rng.standard_normal((200, 300)).astype(np.float32)
    found = low_rank(source(exact, dtype), None, 1.0)
    assert len(found.scales) == 3
    assert share_kept(found, exact) > 0.97
    assert 8 * len(found.stored.stream) < 0.15 * exact.size


def test_noise_vectors_and_what_moves_little_are_not_kept() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((256, 256)).astype(np.float32)
    assert low_rank(source(noise), None, 0.2) is None
    strong = few_directions(rng, 1)
    assert low_rank(source(strong), None, 0.4) is not None
    assert low_rank(source(strong), None, 1e-4) is None
    assert low_rank(source(strong), None, 0.0) is None
    assert low_rank(source(strong), None, float("inf")) is None
    assert low_rank(source(strong[0]), None, 1.0) is None
    assert low_rank(source(np.zeros((50, 60), np.float32)), None, 1.0) is None
    assert low_rank(source(strong[:3, :3]), None, 0.3) is None  # too few moves for 32 bits and 6 codes


def test_the_more_moves_are_worth_the_more_directions_are_kept() -> None:
    rng = np.random.default_rng(0)
    sizes = 0.7 ** np.arange(40)
    exact = (rng.standard_normal((256, 40)) * sizes) @ rng.standard_normal((40, 256))
    ranks = []
    for update_scale in (0.1, 0.3, 1.0, 3.0, 10.0):
        found = low_rank(source(exact.astype(np.float32)), None, update_scale)
        ranks.append(0 if found is None else len(found.scales))
    assert ranks == sorted(ranks)
    assert ranks[0] < 4
    assert ranks[-1] > 8


def test_more_directions_than_are_probed_at_first_are_found() -> None:
    rng = np.random.default_rng(0)
    exact = few_directions(rng, 40)
    found = low_rank(source(exact), None, 3.0)
    assert len(found.scales) == 40
    assert share_kept(found, exact) > 0.95


def test_moves_count_and_not_moments() -> None:
    """A direction that is small beside its second moments moves little, however large it is."""
    rng = np.random.default_rng(0)
    roots = np.exp(rng.uniform(-2, 2, 200))[:, None] * np.exp(rng.uniform(-2, 2, 300))
    moves = few_directions(rng, 2)
    second = source((roots**2).astype(np.float32))
    found = low_rank(source((moves * roots).astype(np.float32)), second, 1.0)
    assert share_kept(found, moves * roots, roots) > 0.9
    unseen = np.where(np.arange(200)[:, None] < 20, 0.0, 1.0)  # rows that never had a gradient
    second = source((roots * unseen).astype(np.float32) ** 2)
    found = low_rank(source((moves * roots * unseen).astype(np.float32)), second, 1.0)
    assert not whole(found)[:20].any()


def test_more_dimensions_are_a_matrix_of_the_first_by_the_others() -> None:
    rng = np.random.default_rng(0)
    exact = few_directions(rng, 2, (64, 27 * 16)).reshape(64, 16, 3, 9)
    found = low_rank(source(exact), None, 1.0)
    assert (found.n_rows, found.n_columns, len(found.scales)) == (64, 432, 2)
    assert share_kept(found, exact) > 0.95


def test_the_terms_of_the_file_before_are_where_the_search_begins() -> None:
    rng = np.random.default_rng(0)
    exact = few_directions(rng, 4) + 2 * rng.standard_normal((200, 300)).astype(np.float32)
    cold = low_rank(source(exact), None, 0.5)
    warm = low_rank(source(exact), None, 0.5, cold, seed=1)
    assert len(warm.scales) == len(cold.scales)
    assert share_kept(warm, exact) > 0.98 * share_kept(cold, exact)
    assert low_rank(source(exact[:, :100]), None, 0.5, cold) is not None, (
        "those of another shape are passed over"
    )


@pytest.mark.parametrize("n_vectors", [1, 16, 33])
def test_products_with_vectors_are_those_of_numpy(n_vectors: int) -> None:
    rng = np.random.default_rng(n_vectors)
    matrix = rng.standard_normal((70, 90)).astype(np.float32)
    for multiply, wide in ((moments().add_products, matrix), (moments().add_transposed_products, matrix.T)):
        vectors = rng.standard_normal((wide.shape[1], n_vectors)).astype(np.float32)
        before = rng.standard_normal((len(wide), n_vectors)).astype(np.float32)
        found = before.copy()
        multiply(matrix, vectors, found)
        np.testing.assert_allclose(found, before + wide.astype(np.float64) @ vectors, rtol=0, atol=2e-5)


def test_singular_values_and_vectors_are_those_of_the_whole_matrix() -> None:
    rng = np.random.default_rng(0)
    exact = (few_directions(rng, 30) * 10).astype(np.float32)
    found = FirstMoments.of(source(exact), None)
    left, values, right = found.singular(40, np.empty((300, 0), np.float32), 0)
    expected = np.linalg.svd(exact.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(values[:30], expected[:30], rtol=1e-4)
    assert values[30:].max() < 1e-3 * values[0]
    for vectors in (left[:, :30], right[:, :30]):
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(30), atol=1e-3)
    np.testing.assert_allclose((left[:, :30] * values[:30]) @ right[:, :30].T, exact, atol=1e-3 * values[0])


# --- decoding -------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rows_decode_alone_to_the_same_bits_with_and_without_subnormals(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rank, n_rows, n_columns = (data.draw(st.integers(1, n)) for n in (5, 9, 9))
    power = data.draw(st.sampled_from([-149, -126, -100, -20, 0, 90]))
    scales = (rng.standard_normal(rank) * 2.0**power).astype(np.float32).view(np.uint32)
    codes = rng.integers(0, 256, rank * (n_rows + n_columns)).astype(np.uint8)
    found = LowRank(n_rows, n_columns, scales, Embedded.of(codes))
    n = n_rows * n_columns
    levels = codes.view(np.int8).reshape(rank, -1).astype(np.float32).view(np.uint32)
    expected = np.zeros(n, np.uint32)
    for scale, term in zip(scales, levels, strict=True):
        rows = reference.outer_product(term[:n_rows], scale[None], 0, n_rows)
        products = reference.outer_product(rows, term[n_rows:], 0, n)
        sums = reference.widen_f64(expected) + reference.widen_f64(products)
        expected = reference.round_f64(sums)
    np.testing.assert_array_equal(found.products(0, n), expected)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    np.testing.assert_array_equal(found.products(begin, end), expected[begin:end])


def test_wide_rows_are_computed_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.arange(1, 14, dtype=np.uint8)
    found = LowRank(3, 10, np.array([0x3F800000], np.uint32), Embedded.of(codes))
    expected = found.products(0, 30)
    monkeypatch.setattr(plan_module, "MAX_NUMPY_COLUMNS", 9)
    other = LowRank(3, 10, found.scales, found.stored)
    np.testing.assert_array_equal(other.products(7, 23), expected[7:23])


# --- files ----------------------------------------------------------------------------------------


class Run:
    """A layer whose gradients are mostly of one direction."""

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


def saved(folder: Path, run: Run, steps: tuple[int, ...] = (20, 35), **options: Any) -> None:
    options = {"config": Grid(), "keep": LOSSY, "background": False, "jobs": 1, **options}
    with Checkpointer(folder, run.model, run.optimizer, **options) as saver:
        for step in steps:
            run.train(15)
            saver.save(step)


def envelope_of(path: Path) -> bytes:
    return path.read_bytes()[:4000]


@pytest.mark.parametrize(
    ("dtype", "make", "most_bits"),
    [
        (torch.float32, torch.optim.AdamW, 0.3),
        (torch.bfloat16, lambda p, lr: torch.optim.SGD(p, lr=10 * lr, momentum=0.9), 2.0),
    ],
)
def test_a_state_keeps_the_directions_of_its_first_moments(
    tmp_path: Path, dtype: torch.dtype, make: Any, most_bits: float
) -> None:
    run = Run(dtype, make)
    run.train(300)  # young second moments are small beside the first ones of gradients that agree
    saved(tmp_path, run)
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
        assert weight.bits_per_element < most_bits
        assert bias.lossy.settings["rank"] == 0
        restored = load_file(path)[weight.name].to(torch.float32).numpy()
    exact = run.moment()
    assert (restored * exact).sum() > 0.5 * (exact**2).sum()
    assert inspect(tmp_path / "step-00000035.ckptz").format_version == "1.0"


def test_files_without_such_a_tensor_stay_of_the_first_version(tmp_path: Path) -> None:
    run = Run()
    run.direction *= 0
    with torch.no_grad():
        run.model.weight *= 1
    saved(tmp_path / "noise", run, config=Grid(moments=Moments()), effort="small")
    saved(tmp_path / "exact", run, config=Grid(moments=None), effort="small")
    for folder in ("noise", "exact"):
        for path in (tmp_path / folder).glob("*.ckptz"):
            assert inspect(path).format_version == "1.0"
            assert b"low-rank" not in envelope_of(path)


def test_two_writers_of_one_state_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        saved(tmp_path / name, Run())
    for path in (tmp_path / "one").glob("*.ckptz"):
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


def test_other_programs_carry_such_tensors_on(tmp_path: Path) -> None:
    run = Run()
    saved(tmp_path, run)
    path = tmp_path / "step-00000035.state.ckptz"
    expected = load_file(path)
    rebase(path, tmp_path / "alone.ckptz")
    assert inspect(tmp_path / "alone.ckptz").format_version == "1.1"
    assert b"low-rank" in envelope_of(tmp_path / "alone.ckptz")
    restore(path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    moved = load_file(tmp_path / "alone.ckptz")
    for name, tensor in expected.items():
        assert torch.equal(moved[name], tensor)
    first = plain["optimizer"]["weight"]["exp_avg"]
    assert torch.equal(first, expected["optimizer.weight.exp_avg"])


def test_larger_steps_keep_fewer_directions(tmp_path: Path) -> None:
    ranks = []
    for step in (0.1, 1.0, 16.0):
        saved(tmp_path / str(step), Run(), config=Grid(moments=Moments(first_step=step)))
        tensors = inspect(tmp_path / str(step) / "step-00000035.state.ckptz").tensors
        [record] = [t.lossy for t in tensors if t.name == "optimizer.weight.exp_avg"]
        assert record.settings["step"] == step / 2
        ranks.append(record.settings["rank"])
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > ranks[2] == 0
