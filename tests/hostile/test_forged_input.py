"""Forged files with valid checksums, absurd sizes or valid bombs: bounded memory and an error of ckptz."""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckptz import inspect, restore, verify
from ckptz.errors import CkptzError, FormatError, UnsupportedError
from ckptz.format.bits import xxh64
from ckptz.format.frame import CHECKSUM_BYTES
from ckptz.format.index import envelope_metadata
from ckptz.format.streams import CoderId, decode_stream, encode_stream
from tests.support.cli_support import (
    Chain,
    bomb,
    ckptz,
    flipped,
    forge,
    hf_folder,
    regions_of,
    spread,
    write_index,
)

# --- forgeries: damage with checksums that fit ----------------------------------------------------


def try_everything(path: Path, folder: Path) -> None:
    """Run every verb on a file and require success or an error of ckptz."""
    target = folder / "forged-out"
    actions: tuple[Callable[[], object], ...] = (
        lambda: inspect(path),
        lambda: verify(path, jobs=1),
        lambda: restore(path, target, jobs=1, force=True, max_decoded_bytes=1 << 24),
    )
    for action in actions:
        with contextlib.suppress(CkptzError, FileNotFoundError):
            action()


NUMBERS = (-1, 0, 1 << 40, 1 << 63, 1 << 70, 1e308)
HOSTILE: tuple[Any, ...] = (*NUMBERS, True, None, "", "../x", "/x", "\0", [], {})


def mutations(value: Any) -> Iterator[Any]:
    """Yield copies of `value` with one part replaced by a hostile value, removed or added, at every depth."""
    yield from HOSTILE
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: part} for part in mutations(value[key]))
        yield {**value, "unknown": 1}
    if isinstance(value, list) and value:
        yield value[1:]
        yield [*value, value[-1]]
        for i in (0, len(value) - 1):
            yield from ([*value[:i], part, *value[i + 1 :]] for part in mutations(value[i]))


def sampled(variants: Iterable[Any], most: int) -> list[Any]:
    candidates = list(variants)
    return [candidates[i] for i in spread(len(candidates), most)]


@pytest.mark.parametrize("most", [400, pytest.param(10**9, marks=pytest.mark.slow)])
def test_a_forged_index_gives_an_error_of_ours(most: int, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    ckptz("compress", folder)
    kept: list[Any] = []
    genuine = forge(
        folder / "model.ckptz", folder / "forged.ckptz", lambda index: kept.append(index) or index
    )
    try_everything(genuine, tmp_path)
    for variant in sampled(mutations(kept[0]), most):
        path = forge(folder / "model.ckptz", folder / "forged.ckptz", lambda _, v=variant: v)
        try_everything(path, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} <= {"hf", "forged-out"}


@pytest.mark.parametrize("most", [300, pytest.param(10**9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["full", "delta"])
def test_a_forged_frame_header_gives_an_error_of_ours(name: str, most: int, chain: Chain) -> None:
    path: Path = getattr(chain, name)
    content = path.read_bytes()
    where = regions_of(content)["frame header"]
    begin, end = where.start // 8, where.stop // 8 - CHECKSUM_BYTES
    bits = range(8 * begin, 8 * end)
    for bit in (bits[i] for i in spread(len(bits), most)):
        [changed] = flipped(content, [bit])
        checksum = xxh64(changed[begin:end]).to_bytes(CHECKSUM_BYTES, "little")
        path.write_bytes(changed[:end] + checksum + changed[end + CHECKSUM_BYTES :])
        try_everything(path, chain.folder)


@pytest.mark.parametrize("n_cases", [1500, pytest.param(60_000, marks=pytest.mark.slow)])
def test_any_bytes_given_to_any_coder_end_in_an_error_or_in_codes(n_cases: int) -> None:
    """Decoders get damaged streams before any checksum is compared."""
    rng = np.random.default_rng(0)
    for _ in range(n_cases):
        n = int(rng.integers(1, 3000))
        codes = np.minimum(rng.geometric(rng.uniform(0.05, 0.999), n) - 1, 255).astype(np.uint8)
        coder, stream = encode_stream(codes)
        data = np.frombuffer(stream, np.uint8)[: rng.integers(0, len(stream) + 1) or None].copy()
        data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        out = np.empty(int(rng.integers(1, 3000)) if rng.random() < 0.3 else n, np.uint8)
        coder = CoderId(rng.integers(0, 6)) if rng.random() < 0.2 else coder
        with contextlib.suppress(FormatError, UnsupportedError):
            decode_stream(coder, data.data, out)


# --- sizes ----------------------------------------------------------------------------------------


def test_a_valid_bomb_is_refused_before_the_disk_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bomb(tmp_path / "bomb.ckptz", 4000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    run = ckptz("restore", path, fails=True)
    assert run.exit_code == 7
    assert "free some space" in run.error
    assert [p.name for p in tmp_path.iterdir()] == ["bomb.ckptz"]
    assert ckptz("inspect", path, "--json").json["tensor_bytes"] == 4000 << 20


def test_an_index_that_inflates_without_end_is_refused(chain: Chain) -> None:
    header = {"__metadata__": envelope_metadata(["lossless"], b"")}
    packed = b"\x01" + zlib.compress(b" " * (65 << 20))
    path = write_index(chain.folder / "inflating.ckptz", header, b"", packed)
    assert len(packed) < 100_000
    run = ckptz("inspect", path, fails=True)
    assert run.exit_code == 3
    assert "64 MiB" in run.error


def test_a_shape_of_millions_of_dimensions_takes_no_time(tmp_path: Path) -> None:
    sizes = b",".join([b"9223372036854775807"] * 1_000_000)
    header = b'{"a":{"dtype":"U8","shape":[' + sizes + b'],"data_offsets":[0,1]}}'
    path = tmp_path / "wide.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    assert ckptz("compress", path, fails=True).exit_code == 3
