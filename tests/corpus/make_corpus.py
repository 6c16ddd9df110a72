"""Lists size and digest of every kind of file that ckptz writes, and compares them with the committed table.

    python tests/corpus/make_corpus.py --check     names each file that differs from written.csv
    python tests/corpus/make_corpus.py --write     rewrites written.csv

`--portable` skips files that depend on the machine; it is not needed on the machine that wrote the table.
Files are hashed as they are, except for fields that differ in every run: the date of a measured quality, the
random token in the names of DCP shards, and the checksum of the index that contains these names.
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
# Files of accelerate and torch; lock files name their process.
FOREIGN = ("optimizer.bin", "random_states_0.pkl", "scheduler.bin", ".ckptz-lock")
# Grids, proxy errors and codes of 8-bit optimizers use sums of products whose last bits depend on the
# processor's BLAS kernels, and the Trainer's files depend on the version of transformers.
LOCAL = re.compile("grid|proxy|^trainer/|^eight-bit/")
CHECKSUM = re.compile(r',"checksum":"[0-9a-f]{16}"')  # of an index of shards, which covers the tokens
DATE, TOKEN = re.compile(rb'"date":"[^"]+"'), re.compile(r"(shard-\d{5}-)[0-9a-f]{8}(?=\.ckptz)")
RESIDUAL = re.compile(r"\.exact-[0-9a-f]{16}(?=\.ckptz)")  # its digest depends on dates in the index

Key = tuple[str, str]
Facts = tuple[str, str]


def undated(raw: bytes) -> bytes:
    """Return the bytes of a file; if its index has dates, with the index as text without dates."""
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
    """Return size and digest of a file."""
    raw = path.read_bytes()
    if path.suffix == ".json":
        raw = CHECKSUM.sub("", TOKEN.sub(r"\1", raw.decode())).encode()
    raw = undated(raw)
    return str(len(raw)), hashlib.sha256(raw).hexdigest()


def files_in(folder: Path, name: str) -> Iterator[tuple[Key, Facts]]:
    """Yield the rows of a case."""
    for path in sorted(p for p in (folder / name).rglob("*") if p.is_file() and p.name not in FOREIGN):
        relative = RESIDUAL.sub(".exact", TOKEN.sub(r"\1", path.relative_to(folder / name).as_posix()))
        yield (name, relative), facts_of(path)


def written(names: list[str]) -> dict[Key, Facts]:
    """Run cases in a temporary folder and return the rows of the files that they write."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "corpus"
        write_all(names, folder)
        return {key: facts for name in names for key, facts in files_in(folder, name)}


def read_table(path: Path) -> dict[Key, Facts]:
    """Read the rows of a table."""
    with path.open(newline="") as file:
        return {(row["case"], row["file"]): (row["bytes"], row["sha256"]) for row in csv.DictReader(file)}


def write_table(path: Path, rows: dict[Key, Facts]) -> None:
    """Write rows sorted by name."""
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows((*key, *facts) for key, facts in sorted(rows.items()))


def differences(expected: dict[Key, Facts], actual: dict[Key, Facts]) -> Iterator[str]:
    """Yield a line for each file that differs, is missing or is new."""
    for key in sorted(expected.keys() | actual.keys()):
        name = "/".join(key)
        if key not in actual:
            yield f"{name}: not written any more"
        elif key not in expected:
            yield f"{name}: not in the table"
        elif expected[key] != actual[key]:
            yield f"{name}: differs: {expected[key][0]} bytes before, {actual[key][0]} bytes now"


def main() -> int:
    """Check or write the table; return 1 if a file differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="compare with the table")
    mode.add_argument("--write", action="store_true", help="make the table anew")
    parser.add_argument("--portable", action="store_true", help="pass over what depends on the machine")
    parser.add_argument("--only", nargs="+", choices=CASES, help="these cases")
    parser.add_argument("--without", nargs="+", choices=CASES, default=(), help="all but these cases")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table")
    options = parser.parse_args()
    names = [name for name in options.only or CASES if name not in options.without]
    begin = time.process_time()
    actual = written(names)
    print(f"{len(actual)} files of {len(names)} cases, {time.process_time() - begin:.0f} s of CPU")
    table = read_table(options.table) if options.table.exists() else {}
    if options.write:
        other_cases = {key: facts for key, facts in table.items() if key[0] in CASES and key[0] not in names}
        write_table(options.table, other_cases | actual)
        return 0
    expected = {key: facts for key, facts in table.items() if key[0] in names or key[0] not in CASES}
    lines = [*differences(expected, actual)]
    lines = [line for line in lines if not (options.portable and LOCAL.search(line.partition(":")[0]))]
    print(*lines, sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
