"""Groups: many small tensors share frames, and every reader and verb handles such files."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from ckptz import Grid, inspect, rebase, restore, safe_open, verify
from ckptz.codec.restored import CachedTensor
from ckptz.errors import CkptzError, MissingBaseError
from ckptz.format.byte_source import MemoryBytes
from ckptz.format.caches import CachedChunks, Decoded
from ckptz.format.index import GROUPS_FEATURE
from ckptz.format.reader import Container, GroupMember, frames_of, group_base
from ckptz.numpy import load_file, save_file
from ckptz.verbs.diff import diff
from ckptz.write.groups import LEAST_TENSORS

Arrays = dict[str, NDArray[np.float32]]


def small(n: int = LEAST_TENSORS, scale: float = 1.0) -> Arrays:
    """Build `n` biases of 1 to 20 values, by default enough to share frames, and three other tensors."""
    rng = np.random.default_rng(n)
    arrays = {f"layer.{i}.bias": rng.normal(0, scale, 1 + i % 20).astype(np.float32) for i in range(n)}
    arrays["layer.0.weight"] = rng.normal(0, scale, (40, 100)).astype(np.float32)
    return {**arrays, "nothing": np.empty((0, 3), np.float32), "step": np.array(n, np.int64)}


def scaled(arrays: Arrays) -> Arrays:
    return {name: np.asarray(array * 1.001).astype(array.dtype) for name, array in arrays.items()}


def container_of(path: Path) -> Container:
    return Container(MemoryBytes(path.read_bytes()))


def is_same(loaded: Arrays, expected: Arrays) -> bool:
    return loaded.keys() == expected.keys() and all(
        loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)
        for name, array in expected.items()
    )


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, Path, Arrays]:
    """Write a file with groups and a delta of it; return both paths and the tensors of the delta."""
    full, delta, arrays = tmp_path / "full.ckptz", tmp_path / "delta.ckptz", small()
    save_file(arrays, full)
    save_file(scaled(arrays), delta, base=full)
    return full, delta, scaled(arrays)


def test_many_small_tensors_share_frames_and_keep_their_order(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.ckptz", tmp_path / "a.safetensors"
    save_file(small(), path)
    safetensors.numpy.save_file(small(), plain)
    container = container_of(path)
    assert GROUPS_FEATURE in container.features
    assert container.version == "1.2"
    with safe_open(path, "np") as ours, safetensors.safe_open(plain, "np") as theirs:
        assert ours.offset_keys() == theirs.offset_keys()
    assert is_same(load_file(path), small())
    assert is_same(load_file(path, jobs=2), small())
    assert path.stat().st_size < plain.stat().st_size


def test_norms_and_their_moments_share_a_frame(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.ckptz", np.random.default_rng(0)
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    arrays = {
        f"{i}.norm.{kind}": rng.normal(0, 1, 768).astype(np.float32) for i in range(25) for kind in kinds
    }
    save_file(arrays, path)
    assert len(set(frames_of(container_of(path).tensors))) == 1
    assert is_same(load_file(path), arrays)


def test_few_small_tensors_have_separate_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.ckptz"
    save_file(small(LEAST_TENSORS - 1), path)
    container = container_of(path)
    assert container.version == "1.0"
    assert not any(isinstance(source, GroupMember) for source in container.tensors.values())


def test_small_tensors_beyond_the_size_of_a_group_are_in_several(tmp_path: Path) -> None:
    path = tmp_path / "a.ckptz"
    arrays = {f"{i}": np.full(256, i, np.float32) for i in range(300)}
    save_file(arrays, path)
    assert {entry.group for entry in container_of(path).index.tensors} == {0, 1}
    assert is_same(load_file(path), arrays)


def test_members_and_their_slices_are_read_separately(chain: tuple[Path, Path, Arrays]) -> None:
    for path in chain[:2]:
        with safe_open(path, "np") as file:
            tensor = file.get_tensor("layer.13.bias")
            assert np.array_equal(file.get_slice("layer.13.bias")[3:7], tensor[3:7])
            tensor[:] = 0
            assert file.get_tensor("layer.13.bias").any()  # the cached values are not changed


def test_a_delta_is_stored_against_the_groups_of_its_base(chain: tuple[Path, Path, Arrays]) -> None:
    full, delta, arrays = chain
    assert is_same(load_file(delta), arrays)
    assert inspect(delta).depth == 1
    assert {t.predictor for t in inspect(delta).tensors if t.name.endswith("bias")} == {"base"}
    assert delta.stat().st_size < full.stat().st_size


def test_a_delta_of_a_plain_file_has_groups(tmp_path: Path) -> None:
    plain, delta = tmp_path / "a.safetensors", tmp_path / "b.ckptz"
    safetensors.numpy.save_file(small(), plain)
    save_file(scaled(small()), delta, base=plain)
    assert is_same(load_file(delta), scaled(small()))
    assert {t.predictor for t in inspect(delta).tensors if t.name.endswith("bias")} == {"base"}


def test_a_group_that_the_base_lacks_is_stored_without_a_base(tmp_path: Path) -> None:
    full, delta = tmp_path / "a.ckptz", tmp_path / "b.ckptz"
    save_file(small(LEAST_TENSORS - 1), full)
    arrays = {**scaled(small(LEAST_TENSORS - 1)), "layer.x.bias": np.ones(3, np.float32)}
    save_file(arrays, delta, base=full)
    assert is_same(load_file(delta), arrays)
    predictors = {t.name: t.predictor for t in inspect(delta).tensors}
    assert (predictors["layer.1.bias"], predictors["layer.0.weight"]) == ("zero", "base")


def test_lossy_tensors_have_separate_frames(tmp_path: Path) -> None:
    path, arrays = tmp_path / "a.ckptz", small()
    save_file(arrays, path, config=Grid())
    tensors = container_of(path).tensors
    assert isinstance(tensors["layer.1.bias"], GroupMember)
    assert not isinstance(tensors["layer.0.weight"], GroupMember)
    loaded = load_file(path)
    assert np.array_equal(loaded["layer.1.bias"], arrays["layer.1.bias"])


def test_verify_restore_and_diff_read_members(chain: tuple[Path, Path, Arrays], tmp_path: Path) -> None:
    full, delta, arrays = chain
    assert verify(delta).n_tensors == len(arrays)
    restore(delta, tmp_path / "back.safetensors")
    assert is_same(safetensors.numpy.load_file(tmp_path / "back.safetensors"), arrays)
    assert verify(delta, against=tmp_path / "back.safetensors").content_id == verify(delta).content_id
    assert diff(delta, tmp_path / "back.safetensors").n_changed == 0
    assert diff(full, delta).n_changed == len(arrays) - 2


def test_sizes_of_members_add_up_to_their_frames(chain: tuple[Path, Path, Arrays]) -> None:
    container = container_of(chain[0])
    report = inspect(chain[0])
    frames = {entry.offset: entry.n_bytes for entry in container.index.tensors}
    assert sum(tensor.stored_bytes for tensor in report.tensors) == sum(frames.values())
    assert sum(report.coders.values()) == pytest.approx(1)


def test_a_rebased_file_has_groups_and_needs_no_base(chain: tuple[Path, Path, Arrays]) -> None:
    full, delta, arrays = chain
    rebase(delta)
    full.unlink()
    assert is_same(load_file(delta), arrays)
    assert GROUPS_FEATURE in container_of(delta).features


def test_damage_names_the_file_and_a_tensor(chain: tuple[Path, Path, Arrays]) -> None:
    full = chain[0]
    entry = next(e for e in container_of(full).index.tensors if e.group is not None)
    data = bytearray(full.read_bytes())
    last = 8 + int.from_bytes(data[:8], "little") + entry.offset + entry.n_bytes - 1
    data[last] ^= 1
    full.write_bytes(data)
    with pytest.raises(CkptzError, match=rf"full\.ckptz.*{entry.name}"):
        load_file(full)
    with pytest.raises(CkptzError, match=r"full\.ckptz"):
        verify(full)


def test_a_base_without_the_group_is_refused(chain: tuple[Path, Path, Arrays]) -> None:
    delta = container_of(chain[1])
    with pytest.raises(MissingBaseError, match="no such group"):
        delta.tensors["layer.2.bias"].patterns(0, 1)


def test_a_member_has_the_interface_of_other_sources(chain: tuple[Path, Path, Arrays]) -> None:
    full, _, _ = chain
    arrays, container = small(), container_of(full)
    member, separate = (container.tensors[name] for name in ("layer.7.bias", "layer.0.weight"))
    assert isinstance(member, GroupMember)
    expected = arrays["layer.7.bias"].view(np.uint32)
    out = np.empty_like(expected)
    member.decode_chunk(0, out)
    copied, codes = member.patterns_and_codes(0, expected.size)
    for patterns in (out, copied, member.patterns(0, expected.size), member.chunk(0)):
        np.testing.assert_array_equal(patterns, expected)
    assert codes is member.codes(0, expected.size) is None
    assert member.coders(0) == member.group.coders(0) != set()
    assert member.base is member.group.base is None
    assert member.needs(only_codes=True) == separate.needs(only_codes=True) == []
    assert member.decoded(0, only_codes=True, dependencies={}) == Decoded(None, None)
    for source in (member, separate):
        patterns = source.patterns(0, source.n_patterns)
        assert source.holds(0, patterns)
        assert not source.holds(0, patterns ^ 1)
    member.checked_payload(0)


def test_the_base_of_a_group_is_found_through_cached_tensors(chain: tuple[Path, Path, Arrays]) -> None:
    tensors = container_of(chain[0]).tensors
    group, cache = tensors["layer.7.bias"].group, CachedChunks()
    cached = {name: CachedTensor(source, name, cache) for name, source in tensors.items()}
    assert group_base(group.dtype, group.members, cached) is group


def test_a_lossless_delta_needs_no_codes_of_its_base(chain: tuple[Path, Path, Arrays]) -> None:
    _, delta, _ = chain
    source = container_of(delta).tensors["layer.0.weight"]
    assert source.header.plan.needs_base
    assert source.needs(only_codes=True) == []


def test_a_nested_state_of_small_tensors_is_restored(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from ckptz.torch import load_state, save_state

    state = {"layers": [torch.full((3,), float(i)) for i in range(LEAST_TENSORS)]}
    save_state(state, tmp_path / "a.ckptz")
    assert GROUPS_FEATURE in container_of(tmp_path / "a.ckptz").features
    restored = load_state(tmp_path / "a.ckptz", jobs=1)
    assert all(map(torch.equal, restored["layers"], state["layers"]))
