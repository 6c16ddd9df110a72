"""Lazy reading: a handle decodes only the chunks of an index, caches them, and is thread-safe."""

import gc
import os
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptz import CkptzError
from ckptz.api import read as reading
from ckptz.errors import ChecksumError, LimitError
from ckptz.format.caches import CACHE_BYTES, CachedChunks, Decoded
from ckptz.format.reader import FrameSource
from ckptz.format.sources import CHUNK_VALUES
from tests.support.api_support import CKPTZ, make, outcome, same

LARGE = make(torch.uint8, 5, 1 << 10, 1 << 10)  # five rows of one chunk each
SLANTED = make(torch.bfloat16, 4000, 777)  # three chunks
TENSORS = {"large": LARGE, "slanted": SLANTED, "small": make(torch.float32, 7, 5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Write a full file and a chain of two deltas."""
    root = tmp_path_factory.mktemp("lazy")
    CKPTZ.torch.save_file(TENSORS, root / "full.ckptz")
    CKPTZ.torch.save_file(step(1), root / "one.ckptz", base=root / "full.ckptz")
    CKPTZ.torch.save_file(step(2), root / "two.ckptz", base=root / "one.ckptz")
    return root


def step(n: int) -> dict[str, torch.Tensor]:
    """Return TENSORS with a few values changed."""
    changed = {name: tensor.clone() for name, tensor in TENSORS.items()}
    for tensor in changed.values():
        tensor.view(-1).view(torch.uint8)[:: 100_003 // n] ^= n
    return changed


def test_a_chain_is_restored_into_the_tensors_without_second_buffers(tmp_path: Path) -> None:
    tensor = make(torch.float32, 2 * CHUNK_VALUES)
    paths = [tmp_path / f"{n}.ckptz" for n in range(3)]
    CKPTZ.torch.save_file({"w": tensor}, paths[0])
    for base, path in pairwise(paths):
        tensor = tensor * 1.001
        CKPTZ.torch.save_file({"w": tensor}, path, base=base, effort="fast")
    peaks = {}
    for path in (paths[0], paths[2], paths[0], paths[2]):  # the first reads may also build tables
        tracemalloc.start()
        loaded = CKPTZ.torch.load_file(path, jobs=1)["w"]
        peaks[path] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert same(loaded, tensor)
    assert (
        peaks[paths[2]] < peaks[paths[0]] + CHUNK_VALUES
    )  # in bytes; a buffer for a chunk of the base would add 4x that


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str, int]]:
    """Return the number of times that each (file, tensor, chunk) is decoded."""
    counts: Counter[tuple[str, str, int]] = Counter()
    decode = FrameSource._decode

    def counting(self: FrameSource, index: int, out: Any, patterns: Any) -> Any:
        counts[Path(self._container.name).stem, self.entry.name, index] += 1
        return decode(self, index, out, patterns)

    monkeypatch.setattr(FrameSource, "_decode", counting)
    return counts


@pytest.mark.parametrize(
    ("index", "chunks"),
    [
        (2, {2}),
        ((2, slice(3, 9)), {2}),
        (slice(1, 3), {1, 2}),
        (slice(None, None, 2), {0, 2, 4}),
        (slice(4, 0), set()),
        ((slice(None), 5, 7), {0, 1, 2, 3, 4}),
        ((slice(None, None, 4), slice(None), 1), {0, 4}),
        ([4, 0, 4], {0, 1, 2, 3, 4}),
        ((slice(2, 4), [0, 9]), {0, 1, 2, 3, 4}),
        (..., {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_a_slice_decodes_the_chunks_it_touches_once(
    folder: Path, decoded: Counter[Any], index: Any, chunks: set[int]
) -> None:
    part = CKPTZ.safe_open(folder / "full.ckptz", "pt").get_slice("large")[index]
    assert same(part, LARGE[index])
    assert dict(decoded) == {("full", "large", chunk): 1 for chunk in chunks}


def test_a_slice_of_a_delta_decodes_the_same_chunks_in_every_file(
    folder: Path, decoded: Counter[Any]
) -> None:
    with CKPTZ.safe_open(folder / "two.ckptz", "np") as handle:
        part = handle.get_slice("large")[1:3, 5]
    assert same(part, step(2)["large"][1:3, 5].numpy())
    assert dict(decoded) == {(f, "large", c): 1 for f in ("full", "one", "two") for c in (1, 2)}


def test_decoded_chunks_are_cached_for_the_next_slice(folder: Path, decoded: Counter[Any]) -> None:
    part = CKPTZ.safe_open(folder / "two.ckptz", "pt").get_slice("slanted")
    for column in range(5):
        assert same(part[:, column], step(2)["slanted"][:, column].contiguous())
    assert set(decoded.values()) == {1}


def test_shapes_and_names_decode_nothing(folder: Path, decoded: Counter[Any]) -> None:
    with CKPTZ.safe_open(folder / "two.ckptz", "pt") as handle:
        for name in handle.keys():  # noqa: SIM118  # the handle is no dict
            assert handle.get_slice(name).get_shape() == list(TENSORS[name].shape)
        assert handle.metadata() is None
        assert isinstance(outcome(lambda: handle.get_slice("large")[99]), IndexError)
    assert not decoded


def test_a_failed_decoding_is_tried_again() -> None:
    cache = CachedChunks()
    with pytest.raises(ChecksumError):
        cache.get(("x", 0), lambda: (_ for _ in ()).throw(ChecksumError("changed")))
    chunk = Decoded(np.ones(1, np.uint8), None)
    assert cache.get(("x", 0), lambda: chunk) is chunk


def random_index(random: np.random.Generator, shape: tuple[int, ...]) -> Any:
    items: list[Any] = []
    for n in shape[: random.integers(1, len(shape) + 1)]:
        begin = int(random.integers(0, n))
        items.append(
            begin if random.random() < 0.3 else slice(begin, int(random.integers(begin, n)) + 1, None)
        )
    return tuple(items)


@pytest.mark.parametrize("file", ["full", "two"])
def test_sixteen_threads_slice_one_handle(folder: Path, file: str) -> None:
    expected = TENSORS if file == "full" else step(2)
    handle = CKPTZ.safe_open(folder / f"{file}.ckptz", "pt", jobs=2)
    names = sorted(expected)
    begin = threading.Barrier(16)

    def read(seed: int) -> int:
        random = np.random.default_rng(seed)
        begin.wait()
        for _ in range(12):
            name = names[random.integers(len(names))]
            index = random_index(random, tuple(expected[name].shape))
            if not same(handle.get_slice(name)[index], expected[name][index].contiguous()):
                return 1
        return 0 if same(handle.get_tensor("small"), expected["small"]) else 1

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(read, range(16))) == 0


def test_threads_may_read_while_another_closes(folder: Path) -> None:
    handle = CKPTZ.safe_open(folder / "two.ckptz", "pt")
    parts = [handle.get_slice("slanted") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(part.__getitem__, ...) for part in parts]
        handle.__exit__(None, None, None)
        assert all(same(read.result(), step(2)["slanted"]) for read in reads)
    with pytest.raises(CkptzError, match="File is closed"):
        handle.get_slice("slanted")


def open_files(folder: Path) -> list[str]:
    links = Path("/proc/self/fd")
    if not links.exists():
        pytest.skip("no list of open files on this system")
    targets = (os.readlink(link) for link in links.iterdir() if link.is_symlink())
    return sorted(Path(t).name for t in targets if t.startswith(str(folder)))


def test_files_are_closed_with_the_last_handle_or_slice(folder: Path) -> None:
    gc.collect()
    assert open_files(folder) == []
    with CKPTZ.safe_open(folder / "two.ckptz", "pt") as handle:
        part = handle.get_slice("small")
    assert open_files(folder) == ["full.ckptz", "one.ckptz", "two.ckptz"]
    del part
    assert open_files(folder) == []
    with pytest.raises(CkptzError):
        CKPTZ.safe_open(folder / "two.ckptz", "tf")
    assert open_files(folder) == []


# --- deltas -----------------------------------------------------------------------------------------------


def test_a_delta_reads_like_any_other_file(folder: Path) -> None:
    loaded = CKPTZ.torch.load_file(folder / "two.ckptz")
    assert all(same(loaded[name], tensor) for name, tensor in step(2).items())
    assert os.path.getsize(folder / "two.ckptz") < os.path.getsize(folder / "full.ckptz") / 10
    as_bytes = (folder / "two.ckptz").read_bytes()
    assert same(CKPTZ.torch.load(as_bytes, search_path=[folder]), loaded)


# --- errors that safetensors does not have ----------------------------------------------------------------


def test_damage_names_the_file_and_the_tensor(folder: Path, tmp_path: Path) -> None:
    data = bytearray((folder / "full.ckptz").read_bytes())
    with CKPTZ.safe_open(folder / "full.ckptz", "np") as handle:
        source = handle._opened.sources["slanted"]
        data[source._container._data_offset + source.entry.offset + source.entry.n_bytes - 9] ^= 1
    (tmp_path / "changed.ckptz").write_bytes(data)
    with CKPTZ.safe_open(tmp_path / "changed.ckptz", "pt") as handle:
        assert same(handle.get_slice("slanted")[0], SLANTED[0])
        for read in (lambda: handle.get_slice("slanted")[-1], lambda: handle.get_tensor("slanted")):
            with pytest.raises(ChecksumError, match=r"changed\.ckptz.*slanted"):
                read()


def test_limits_hold_for_tensors_and_slices(folder: Path) -> None:
    with CKPTZ.safe_open(folder / "full.ckptz", "pt", max_decoded_bytes=1 << 20) as handle:
        assert same(handle.get_slice("large")[3], LARGE[3])
        for read in (
            handle.get_tensors,
            lambda: handle.get_tensor("large"),
            lambda: handle.get_slice("large")[:2],
        ):
            with pytest.raises(LimitError, match=r"full\.ckptz.*max_decoded_bytes"):
                read()


def test_free_memory_is_the_limit_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHECKED_BYTES", 1)
    monkeypatch.setattr(reading, "available_memory", lambda: 1 << 20)
    with pytest.raises(LimitError, match="are free"):
        CKPTZ.torch.load_file(folder / "full.ckptz")
    assert CKPTZ.torch.load_file(folder / "full.ckptz", max_decoded_bytes=1 << 30)


def test_free_memory_is_plausible_or_unknown() -> None:
    free = reading.available_memory()
    assert free is None or 1 << 20 < free < 1 << 50


def test_the_cache_has_room_for_a_chunk_of_eight_bytes_per_value() -> None:
    assert CACHE_BYTES >= 8 * CHUNK_VALUES
