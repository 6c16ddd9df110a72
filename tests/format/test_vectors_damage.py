"""Vectors with damage are refused or decoded unchanged: cut, with a flipped bit, or with a damaged base.

Slow tests do so at every byte and bit.
"""

import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptz.errors import CkptzError, TruncatedError
from tests.support.cli_support import flipped
from tests.support.vector_support import FOLDER, INVALID, VALID, State, Vector, read_bytes, read_path


@dataclass(frozen=True)
class Member:
    """A file of a vector: the one to read, or one of its bases."""

    vector: Vector
    path: Path

    @property
    def name(self) -> str:
        return f"{self.vector.name}/{self.path.name}"

    def read(self, data: bytes) -> State:
        """Decode `data` in place of the file, with intact bases."""
        return read_bytes(data, self.path.parent)


MEMBERS = [Member(vector, path) for vector in VALID for path in vector.paths]
# A plain safetensors file has no checksums: a flipped bit gives another value or name.
WITH_CHECKSUMS = [member for member in MEMBERS if member.path.suffix == ".ckptz"]
CHAINS = [vector for vector in VALID if len(vector.paths) > 1]


def name_of(case: Any) -> str:
    return str(case.name)


# One bit or length in `stride` is damaged. The first one differs between vectors, so that the parts that all
# vectors have are damaged in many places.
each_stride = pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
each_length = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])


def prefixes(data: bytes, stride: int = 1) -> Iterator[bytes]:
    """Yield every `stride`-th strict prefix."""
    return (data[:n] for n in range(zlib.crc32(data) % stride, len(data), stride))


def bits_of(data: bytes, stride: int = 1) -> range:
    """Return every `stride`-th bit position."""
    return range(zlib.crc32(data) % stride, 8 * len(data), stride)


# --- cut ----------------------------------------------------------------------------------------


@each_length
@pytest.mark.parametrize("member", MEMBERS, ids=name_of)
def test_every_strict_prefix_of_a_file_is_refused(member: Member, stride: int) -> None:
    for data in prefixes(member.path.read_bytes(), stride):
        with pytest.raises(CkptzError):
            member.read(data)


def test_every_prefix_of_a_file_is_a_truncation_error() -> None:
    for data in prefixes((FOLDER / "valid" / "coder-stored.ckptz").read_bytes()):
        with pytest.raises(TruncatedError):
            read_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("vector", INVALID, ids=name_of)
def test_every_strict_prefix_of_an_invalid_vector_is_refused(vector: Vector) -> None:
    if vector.name == "invalid/C5-0":
        pytest.skip("valid without its last byte")
    path = vector.paths[0]
    for data in prefixes(path.read_bytes()):
        with pytest.raises(CkptzError):
            read_bytes(data, path.parent)


# --- flipped ------------------------------------------------------------------------------------


@each_stride
@pytest.mark.parametrize("member", WITH_CHECKSUMS, ids=name_of)
def test_a_flipped_bit_of_a_file_is_refused_or_changes_nothing(member: Member, stride: int) -> None:
    data = member.path.read_bytes()
    expected, bits, n_refused = member.read(data), bits_of(data, stride), 0
    for bit, changed in zip(bits, flipped(data, bits), strict=True):
        try:
            assert member.read(changed) == expected, f"bit {bit % 8} of byte {bit // 8} changes what is read"
        except CkptzError:
            n_refused += 1
    assert n_refused > len(bits) * 3 / 4  # some are without effect: the content size of a zstd frame


@pytest.mark.slow
@pytest.mark.parametrize("vector", INVALID, ids=name_of)
def test_a_flipped_bit_of_an_invalid_vector_is_refused_or_makes_it_valid(vector: Vector) -> None:
    path = vector.paths[0]
    data = path.read_bytes()
    n_refused = 0
    for changed in flipped(data, bits_of(data)):
        try:
            read_bytes(changed, path.parent)
        except CkptzError:
            n_refused += 1
    assert n_refused >= 6 * len(data)  # of 8; equal for the empty vector


# --- bases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A vector whose bases are copied to a folder and damaged there."""

    vector: Vector
    folder: Path

    def n_accepted(self, damage: Callable[[bytes], Iterable[bytes]]) -> int:
        """Damage one base after the other; return how often the file was decoded, which must be unchanged."""
        first, *bases = (self.folder / path.name for path in self.vector.paths)
        for path in self.vector.paths:
            shutil.copy(path, self.folder)
        expected, n_accepted = read_path(first), 0
        for base in bases:
            data = base.read_bytes()
            for i, changed in enumerate(damage(data)):
                base.write_bytes(changed)
                try:
                    assert read_path(first) == expected, f"damage {i} of {base.name} changes what is read"
                    n_accepted += 1
                except CkptzError:
                    pass
            base.write_bytes(data)
        return n_accepted


each_damage = pytest.mark.parametrize("stride", [151, pytest.param(1, marks=pytest.mark.slow)])


@each_damage
@pytest.mark.parametrize("vector", CHAINS, ids=name_of)
def test_a_chain_with_a_cut_base_is_refused(vector: Vector, stride: int, tmp_path: Path) -> None:
    assert Chain(vector, tmp_path).n_accepted(lambda data: prefixes(data, stride)) == 0


@each_damage
@pytest.mark.parametrize("vector", CHAINS, ids=name_of)
def test_a_chain_with_a_flipped_bit_in_a_base_is_refused_or_unchanged(
    vector: Vector, stride: int, tmp_path: Path
) -> None:
    Chain(vector, tmp_path).n_accepted(lambda data: flipped(data, bits_of(data, stride)))
