"""`apply_`: exact, in place, checked before the first write, and all or nothing."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptz.api import apply as applying
from ckptz.errors import ChecksumError, CkptzError, FormatError, MissingBaseError
from ckptz.format.reader import FrameSource
from ckptz.format.sources import CHUNK_VALUES
from ckptz.store.resolve import open_checkpoint
from ckptz.torch import apply_, save_file
from tests.support.sync_support import (
    SPARSE,
    State,
    a_pair,
    a_state,
    bits,
    cloned,
    moved,
    refused,
    same,
    untouched,
)


def delta_of(first: State, second: State, folder: Path, **options: Any) -> Path:
    """Write two states and return the path of the delta between them."""
    save_file(first, folder / "a.ckptz")
    save_file(second, folder / "b.ckptz", base=folder / "a.ckptz", **options)
    return folder / "b.ckptz"


# --- values and memory --------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("check", ["base", "stored"])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.02, 0.2, 0.9])
def test_every_dtype_ends_up_bit_for_bit(tmp_path: Path, share: float, check: Any, jobs: int) -> None:
    first, second, delta = a_pair(tmp_path, share)
    live = cloned(first)
    memory = {name: tensor.data_ptr() for name, tensor in live.items()}
    report = apply_(live, delta, check=check, jobs=jobs)
    assert same(live, second)
    assert memory == {name: tensor.data_ptr() for name, tensor in live.items()}
    changed = [name for name in first if not torch.equal(bits(first[name]), bits(second[name]))]
    assert (report.n_changed_tensors, report.n_tensors) == (len(changed), len(first))


def test_the_bytes_of_a_delta_do_as_well_as_its_file(tmp_path: Path) -> None:
    live, second, delta = a_pair(tmp_path)
    apply_(live, delta.read_bytes())
    assert same(live, second)


def test_a_delta_of_dense_frames_is_applied_too(tmp_path: Path) -> None:
    first = a_state()
    second = moved(first, 3)
    delta = delta_of(first, second, tmp_path)  # the smallest files, with contexts by the base's magnitude
    apply_(first, delta)
    assert same(first, second)


def test_tensors_that_are_not_in_the_delta_do_not_change(tmp_path: Path) -> None:
    live, second, delta = a_pair(tmp_path)
    live["extra"] = torch.ones(3)
    apply_(live, delta)
    assert same(live, second | {"extra": torch.ones(3)})


def test_a_model_is_updated_through_its_state_dict(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    other.load_state_dict(moved(dict(model.state_dict()), 0, 0.1))
    delta = delta_of(dict(model.state_dict()), dict(other.state_dict()), tmp_path, config=SPARSE)
    apply_(model.state_dict(), delta)
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert model.weight.requires_grad


def strided_states() -> dict[str, torch.Tensor]:
    images = torch.randn(4, 8, 6, 5).to(memory_format=torch.channels_last)
    return {
        "channels last": images,
        "transposed": torch.randn(40, 30).bfloat16().T,
        "every other": torch.randn(90, 2)[:, 1],
        "complex": torch.randn(30, 20, dtype=torch.complex64).T,
        "bytes": torch.arange(100, dtype=torch.uint8).reshape(10, 10).T,
    }


@pytest.mark.parametrize("name", strided_states())
def test_a_tensor_of_any_layout_keeps_it(tmp_path: Path, name: str) -> None:
    live = strided_states()[name]
    first = {"x": live.contiguous().clone()}
    second = moved(first, 2, 0.1)
    strides = live.stride()
    apply_({"x": live}, delta_of(first, second, tmp_path, config=SPARSE))
    assert torch.equal(bits(live), bits(second["x"]))
    assert live.stride() == strides
    save_file(first, tmp_path / "full.ckptz")
    apply_({"x": live}, tmp_path / "full.ckptz")
    assert torch.equal(bits(live), bits(first["x"]))


def test_one_element_may_have_any_stride(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "full.ckptz")
    live = torch.zeros(6)
    apply_({"x": live[::4][:1]}, tmp_path / "full.ckptz")
    assert live.tolist() == [1, 0, 0, 0, 0, 0]


def test_tied_tensors_are_updated_together(tmp_path: Path) -> None:
    first = {"embedding": torch.ones(50, 4), "head": torch.ones(50, 4)}
    second = moved({"embedding": torch.ones(50, 4)}, 1, 0.1)
    second["head"] = second["embedding"].clone()
    delta = delta_of(first, second, tmp_path, config=SPARSE)
    live = torch.ones(50, 4)
    apply_({"embedding": live, "head": live}, delta)
    assert torch.equal(live, second["head"])


def test_more_than_one_chunk(tmp_path: Path) -> None:
    first = {"x": torch.zeros(2 * CHUNK_VALUES + 5, dtype=torch.bfloat16)}
    second = cloned(first)
    second["x"][[0, CHUNK_VALUES - 1, CHUNK_VALUES, -1]] = 2
    live = cloned(first)
    report = apply_(live, delta_of(first, second, tmp_path, config=SPARSE))
    assert same(live, second)
    assert report.n_written == 4


def test_what_does_not_change_is_neither_decoded_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, second, delta = a_pair(tmp_path, 0.01)
    monkeypatch.setattr(FrameSource, "decode_chunk", None)
    written: list[int] = []
    put = applying._HostTensor.put
    monkeypatch.setattr(
        applying._HostTensor, "put", lambda self, at, new: (written.append(len(at)), put(self, at, new))
    )
    report = apply_(live, delta)
    assert same(live, second)
    n_changed = sum(
        int((a.reshape(-1, tensor.element_size()) != b.reshape(-1, tensor.element_size())).any(1).sum())
        for tensor, a, b in ((t, bits(t), bits(second[name])) for name, t in a_state().items())
        if tensor.numel()
    )
    assert sum(written) == report.n_written == n_changed


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply deltas to host tensors by the code for accelerators."""
    monkeypatch.setattr(applying, "_HostTensor", applying._FlatTensor)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("check", ["base", "stored"])
def test_the_way_of_a_device_gives_the_same_bits(tmp_path: Path, check: Any) -> None:
    live, second, delta = a_pair(tmp_path)
    apply_(live, delta, check=check)
    assert same(live, second)
    apply_(live, tmp_path / "first.ckptz")
    assert same(live, a_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", ["base", "stored"])
def test_tensors_on_a_gpu(tmp_path: Path, check: Any) -> None:
    first, second, delta = a_pair(tmp_path)
    live = {name: tensor.cuda() for name, tensor in first.items()}
    apply_(live, delta, check=check)
    assert same({name: tensor.cpu() for name, tensor in live.items()}, second)


# --- what it refuses ----------------------------------------------------------------------------


def test_a_delta_for_another_base(tmp_path: Path) -> None:
    first, _, delta = a_pair(tmp_path)
    for name in ("bfloat16", "frozen", "scalar"):  # also where nothing would change
        live = cloned(first)
        live[name].view(-1)[-1:] = 7
        with (
            untouched(live),
            refused(MissingBaseError, f"second.ckptz: .*{name}.* apply the deltas in order"),
        ):
            apply_(live, delta)


def test_a_delta_of_tensors_stored_whole_applied_twice(tmp_path: Path) -> None:
    second = {"new": torch.randn(5000), "same": torch.ones(500)}
    delta = delta_of({"same": torch.ones(500)}, second, tmp_path, config=SPARSE)
    live = {"new": torch.zeros(5000), "same": torch.ones(500)}
    apply_(live, delta)
    assert same(live, second)
    with untouched(live), refused(MissingBaseError, "applied before"):
        apply_(live, delta)


@pytest.mark.parametrize("check", ["base", "stored"])
def test_a_damaged_delta_changes_nothing(tmp_path: Path, check: Any) -> None:
    live, _, delta = a_pair(tmp_path, 0.05)
    raw = delta.read_bytes()
    for position in range(0, len(raw), 37):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        with untouched(live), pytest.raises(CkptzError):
            apply_(live, bytes(damaged), check=check, jobs=1)
    for end in range(0, len(raw), 211):
        with untouched(live), pytest.raises(FormatError):
            apply_(live, raw[:end], check=check, jobs=1)


def test_damage_in_the_last_chunk_is_found_before_the_first_write(tmp_path: Path) -> None:
    first = {f"layer {i}": torch.zeros(5000) for i in range(4)}
    live, second = cloned(first), moved(first, 1)
    delta = delta_of(first, second, tmp_path, config=SPARSE)
    damaged = bytearray(delta.read_bytes())
    with contextlib.closing(open_checkpoint(delta)) as opened:
        last = opened.container.index.tensors[-1]
    end = 8 + int.from_bytes(damaged[:8], "little") + last.offset + last.n_bytes
    damaged[end - 1] ^= 1
    with untouched(live), refused(ChecksumError, "'layer 3'"):
        apply_(live, bytes(damaged), check="stored")


# --- all or nothing -----------------------------------------------------------------------------


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException, then: int = 0) -> None:
    """Raise `error` in the middle of write number `at`, and again `then` writes later if it is not 0."""
    n_writes = 0

    put = applying._HostTensor.put

    def failing(self: Any, where: Any, patterns: Any) -> None:
        nonlocal n_writes
        n_writes += 1
        if n_writes == at or (then and n_writes == at + then):
            half = len(patterns) // 2
            is_slice = isinstance(where, slice)
            put(self, slice(where.start, where.start + half) if is_slice else where[:half], patterns[:half])
            raise error
        put(self, where, patterns)

    monkeypatch.setattr(applying._HostTensor, "put", failing)


@pytest.mark.parametrize("share", [0.02, 0.9])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_an_interrupted_write_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, share: float
) -> None:
    live, second, delta = a_pair(tmp_path, share)
    with monkeypatch.context() as patched:
        interrupt(patched, at, KeyboardInterrupt())
        with untouched(live), pytest.raises(KeyboardInterrupt):
            apply_(live, delta)
    apply_(live, delta)
    assert same(live, second)


def test_where_even_that_fails_the_error_names_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, _, delta = a_pair(tmp_path)
    interrupt(monkeypatch, 3, RuntimeError("device lost"), then=1)
    with refused(CkptzError, r"\['complex64', 'float64', 'int64'\] may hold .*device lost.* full file"):
        apply_(live, delta)
