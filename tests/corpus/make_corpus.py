"""Lists the bytes of every kind of file that ckptz writes, and holds them to those of before.

    python tests/corpus/make_corpus.py --check     names each file that differs from written.csv
    python tests/corpus/make_corpus.py --write     makes written.csv anew

`--portable` passes over what depends on the machine; on the one where the table was made, nothing need be.
Files are hashed as they are, but for fields that differ from one moment to the next: the date of a
measured quality, the random token in the names of DCP shards, and the checksum of the index that names these.
"""

import argparse
import csv
import hashlib
import json
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from corpus_cases import CASES, write_all

TABLE = Path(__file__).with_name("written.csv")
COLUMNS = ("case", "file", "bytes", "sha256")
# Of accelerate and torch; locks say who held them.
FOREIGN = ("optimizer.bin", "random_states_0.pkl", "scheduler.bin", ".ckptz-lock")
# Grids, proxy errors and codes of 8-bit optimizers take sums of products whose last bits depend on the
# processor's BLAS kernels, and the Trainer's files depend on the version of transformers.
LOCAL = re.compile("grid|proxy|^trainer/|^eight-bit/")
CHECKSUM = re.compile(r',"checksum":"[0-9a-f]{16}"')  # of an index of shards, of the tokens too
DATE, TOKEN = re.compile(rb'"date":"[^"]+"'), re.compile(r"(shard-\d{5}-)[0-9a-f]{8}(?=\.ckptz)")
RESIDUAL = re.compile(r"\.exact-[0-9a-f]{16}(?=\.ckptz)")  # its digest depends on dates in the index

Key = tuple[str, str]
Facts = tuple[str, str]


def undated(raw: bytes) -> bytes:
    """A file as it is, but if its index has dates: with the index as text, and without them."""
    if b"__ckptz__.index" not in raw:
        return raw
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    at, end = (begin + offset for offset in header.pop("__ckptz__.index")["data_offsets"])
    index, n_dates = DATE.subn(b'"date":""', zlib.decompress(raw[at + 1 : end]))
    if not n_dates:
        return raw
    del header["__metadata__"]["ckptz.index_sha256"]
    return json.dumps(header).encode() + raw[begin:at] + index + raw[end:]


def facts_of(path: Path) -> Facts:
    """Size and digest of a file."""
    raw = path.read_bytes()
    if path.suffix == ".json":
        raw = CHECKSUM.sub("", TOKEN.sub(r"\1", raw.decode())).encode()
    raw = undated(raw)
    return str(len(raw)), hashlib.sha256(raw).hexdigest()


def files_in(folder: Path, name: str) -> Iterator[tuple[Key, Facts]]:
    """Rows of a case."""
    for path in sorted(p for p in (folder / name).rglob("*") if p.is_file() and p.name not in FOREIGN):
        relative = RESIDUAL.sub(".exact", TOKEN.sub(r"\1", path.relative_to(folder / name).as_posix()))
        yield (name, relative), facts_of(path)


def written(names: list[str]) -> dict[Key, Facts]:
    """Run cases in a temporary folder: what they wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "corpus"
        write_all(names, folder)
        return {key: facts for name in names for key, facts in files_in(folder, name)}


def read_table(path: Path) -> dict[Key, Facts]:
    """Rows of a table."""
    with path.open(newline="") as file:
        return {(row["case"], row["file"]): (row["bytes"], row["sha256"]) for row in csv.DictReader(file)}


def write_table(path: Path, rows: dict[Key, Facts]) -> None:
    """Write rows in the order of their names."""
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows((*key, *facts) for key, facts in sorted(rows.items()))


def differences(wanted: dict[Key, Facts], found: dict[Key, Facts]) -> Iterator[str]:
    """A line for each file that differs, is missing or is new."""
    for key in sorted(wanted.keys() | found.keys()):
        name = "/".join(key)
        if key not in found:
            yield f"{name}: not written any more"
        elif key not in wanted:
            yield f"{name}: not in the table"
        elif wanted[key] != found[key]:
            yield f"{name}: differs: {wanted[key][0]} bytes before, {found[key][0]} bytes now"


def main() -> int:
    """Check or write; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="compare with the table")
    mode.add_argument("--write", action="store_true", help="make the table anew")
    parser.add_argument("--portable", action="store_true", help="pass over what depends on the machine")
    parser.add_argument("--only", nargs="+", choices=CASES, help="these cases")
    parser.add_argument("--without", nargs="+", choices=CASES, default=(), help="all but these cases")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table")
    given = parser.parse_args()
    names = [name for name in given.only or CASES if name not in given.without]
    begin = time.process_time()
    found = written(names)
    print(f"{len(found)} files of {len(names)} cases, {time.process_time() - begin:.0f} s of CPU")
    table = read_table(given.table) if given.table.exists() else {}
    if given.write:
        others = {key: facts for key, facts in table.items() if key[0] in CASES and key[0] not in names}
        write_table(given.table, others | found)
        return 0
    wanted = {key: facts for key, facts in table.items() if key[0] in names or key[0] not in CASES}
    lines = [*differences(wanted, found)]
    lines = [line for line in lines if not (given.portable and LOCAL.search(line.partition(":")[0]))]
    print(*lines, sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
