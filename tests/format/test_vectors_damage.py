"""Every vector cut and flipped, in slow tests at every bit: refused, or read as if nothing had happened."""

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
    """One file of a vector: the one to read, or one of its bases."""

    vector: Vector
    path: Path

    @property
    def name(self) -> str:
        return f"{self.vector.name}/{self.path.name}"

    def read(self, data: bytes) -> State:
        """Return the content of other bytes in its place; its own bases are unchanged."""
        return read_bytes(data, self.path.parent)


MEMBERS = [Member(vector, path) for vector in VALID for path in vector.paths]
# A plain safetensors file has no checksums: a flipped bit of a value or of a name is another one.
GUARDED = [member for member in MEMBERS if member.path.suffix == ".ckptz"]
CHAINS = [vector for vector in VALID if len(vector.paths) > 1]


def name_of(case: Any) -> str:
    return str(case.name)


# All, or every so many from another one in each vector: what they have in common is damaged everywhere.
each_stride = pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
each_length = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])


def prefixes(data: bytes, stride: int = 1) -> Iterator[bytes]:
    return (data[:n] for n in range(zlib.crc32(data) % stride, len(data), stride))


def bits_of(data: bytes, stride: int = 1) -> range:
    return range(zlib.crc32(data) % stride, 8 * len(data), stride)


# --- cut ----------------------------------------------------------------------------------------


@each_length
@pytest.mark.parametrize("member", MEMBERS, ids=name_of)
def test_every_strict_prefix_of_a_file_is_refused(member: Member, stride: int) -> None:
    for data in prefixes(member.path.read_bytes(), stride):
        with pytest.raises(CkptzError):
            member.read(data)


def test_a_prefix_of_a_whole_file_is_truncated() -> None:
    for data in prefixes((FOLDER / "valid" / "coder-stored.ckptz").read_bytes()):
        with pytest.raises(TruncatedError):
            read_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("vector", INVALID, ids=name_of)
def test_every_strict_prefix_of_an_invalid_vector_is_refused(vector: Vector) -> None:
    if vector.name == "invalid/C5-0":
        pytest.skip("without the byte behind its end the file is right")
    path = vector.paths[0]
    for data in prefixes(path.read_bytes()):
        with pytest.raises(CkptzError):
            read_bytes(data, path.parent)


# --- flipped ------------------------------------------------------------------------------------


@each_stride
@pytest.mark.parametrize("member", GUARDED, ids=name_of)
def test_a_flipped_bit_of_a_file_is_refused_or_changes_nothing(member: Member, stride: int) -> None:
    data = member.path.read_bytes()
    whole, bits, n_refused = member.read(data), bits_of(data, stride), 0
    for bit, changed in zip(bits, flipped(data, bits), strict=True):
        try:
            assert member.read(changed) == whole, f"bit {bit % 8} of byte {bit // 8} changes what is read"
        except CkptzError:
            n_refused += 1
    assert n_refused > len(bits) * 3 / 4  # not the size that a zstd frame announces, for one


@pytest.mark.slow
@pytest.mark.parametrize("vector", INVALID, ids=name_of)
def test_a_flipped_bit_of_an_invalid_vector_is_refused_or_makes_a_file(vector: Vector) -> None:
    path = vector.paths[0]
    whole = path.read_bytes()
    n_refused = 0
    for changed in flipped(whole, bits_of(whole)):
        try:
            read_bytes(changed, path.parent)
        except CkptzError:
            n_refused += 1
    assert n_refused >= 6 * len(whole)  # one of them is empty


# --- bases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A vector with its bases in a folder where they may be damaged."""

    vector: Vector
    folder: Path

    def reads(self, damage: Callable[[bytes], Iterable[bytes]]) -> int:
        """Damage one base after the other: how often nothing was noticed and nothing changed."""
        first, *bases = (self.folder / path.name for path in self.vector.paths)
        for path in self.vector.paths:
            shutil.copy(path, self.folder)
        whole, n_read = read_path(first), 0
        for base in bases:
            data = base.read_bytes()
            for n, changed in enumerate(damage(data)):
                base.write_bytes(changed)
                try:
                    assert read_path(first) == whole, f"damage {n} of {base.name} changes what is read"
                    n_read += 1
                except CkptzError:
                    pass
            base.write_bytes(data)
        return n_read


each_damage = pytest.mark.parametrize("stride", [151, pytest.param(1, marks=pytest.mark.slow)])


@each_damage
@pytest.mark.parametrize("vector", CHAINS, ids=name_of)
def test_a_chain_with_a_cut_base_is_refused(vector: Vector, stride: int, tmp_path: Path) -> None:
    assert Chain(vector, tmp_path).reads(lambda data: prefixes(data, stride)) == 0


@each_damage
@pytest.mark.parametrize("vector", CHAINS, ids=name_of)
def test_a_chain_with_a_flipped_bit_in_a_base_is_refused_or_unchanged(
    vector: Vector, stride: int, tmp_path: Path
) -> None:
    Chain(vector, tmp_path).reads(lambda data: flipped(data, bits_of(data, stride)))
