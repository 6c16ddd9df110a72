"""The second decoder, written from the specification alone, reads our files; it runs in its own process."""

import ast
import hashlib
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file as save_plain

from ckptz import KMeans
from ckptz.numpy import load_file, save_file
from tests.format.test_spec_refusals import CASES
from tests.support.cli_support import ckptz
from tests.support.spec_cases import ALSO, lenient
from tests.support.spec_support import SPEC, page
from tests.support.vector_support import FOLDER, INVALID, VALID, sessions

DECODER = SPEC / "decoder" / "ckptz_decode.py"
SOURCES = sorted(DECODER.parent.glob("*.py"))
DTYPES = (np.float32, np.float16, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 3, 4), (64, 70))

State = dict[str, np.ndarray[Any, Any]]
Row = dict[str, Any]


def decode_alone(paths: Sequence[Path]) -> list[Row]:
    """Return the output of the second decoder for each file, from one process that cannot import ckptz."""
    command = [sys.executable, "-s", "-E", str(DECODER), *map(str, paths)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode in (0, 1), run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == len(paths), run.stderr
    assert run.returncode == any("refused" in row for row in rows)
    return rows


# --- vectors ------------------------------------------------------------------------------------


def test_it_decodes_every_valid_vector() -> None:
    for vector, row in zip(VALID, decode_alone([vector.paths[0] for vector in VALID]), strict=True):
        assert row.get("tensors") == vector.row["tensors"], (vector.name, row)


def test_it_refuses_every_invalid_vector_by_its_rule() -> None:
    for vector, row in zip(INVALID, decode_alone([vector.paths[0] for vector in INVALID]), strict=True):
        if "when" in vector.row:  # the rule is about optional records, which this decoder does not read
            assert "tensors" in row
        else:
            assert row["refused"]["rule"] in {vector.row["breaks"], *vector.row["also"]}, (vector.name, row)


def test_it_refuses_inputs_that_are_too_large_to_be_vectors(tmp_path: Path) -> None:
    """Vectors have at most 4096 bytes."""
    paths, rules = [], []
    for rule, cases in CASES.items():
        for number, case in enumerate(cases):
            files = {} if isinstance(case, lenient) else case.files()
            if max(map(len, files.values()), default=0) > 4096:
                paths.append(tmp_path / f"{rule}-{number}.ckptz")
                paths[-1].write_bytes(next(iter(files.values())))
                rules.append({rule, *ALSO.get(f"{rule}-{number}", [])})
    assert len(paths) >= 4
    for row, allowed in zip(decode_alone(paths), rules, strict=True):
        assert row["refused"]["rule"] in allowed, row


def test_it_receives_every_session_of_a_link() -> None:
    script = DECODER.parent / "ckptz_wire.py"
    command = [sys.executable, "-s", "-E", str(script), str(FOLDER / "manifest.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    results = {row["name"]: row["results"] for row in map(json.loads, run.stdout.splitlines())}
    assert results == {
        row["name"]: [message.get("tensor_sha256", row.get("breaks")) for message in row["messages"]]
        for row in sessions()
    }


# --- random files -------------------------------------------------------------------------------


def random_state(rng: np.random.Generator) -> State:
    """Generate 1 to 4 tensors of random dtype and shape, and two weights [64, 72], large enough for maps."""
    state: State = {}
    for i in range(int(rng.integers(1, 5))):
        dtype, shape = rng.choice(DTYPES), SHAPES[rng.integers(len(SHAPES))]
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)
        with np.errstate(all="ignore"):
            state[f"tensor.{i}"] = np.asarray(values).astype(dtype)
    for name in ("up.weight", "token.weight"):
        state[name] = (rng.standard_normal((64, 72)) * 0.02).astype(rng.choice((np.float32, np.float16)))
    return state


def next_state(state: State, rng: np.random.Generator) -> State:
    """Change each float by about 1 %; keep the other tensors."""
    return {
        name: np.asarray(t * (1 + 0.01 * rng.standard_normal(t.shape)), t.dtype) if t.dtype.kind == "f" else t
        for name, t in state.items()
    }


def random_chain(folder: Path, seed: int) -> list[Path]:
    """Write a chain of three files, lossless or with a random k-means configuration, to a new folder."""
    rng = np.random.default_rng(seed)
    lossy = KMeans(levels=int(rng.integers(2, 40)), prune=0.1 * (seed % 3), protect=0.01 * (seed % 2))
    config = {"config": lossy} if rng.random() < 0.6 else {}
    state, paths = random_state(rng), []
    folder.joinpath(str(seed)).mkdir()
    for step in range(3):
        paths.append(folder / str(seed) / f"{step}.ckptz")
        base = paths[-2] if step else None
        save_file(state, paths[-1], {"seed": str(seed)}, base=base, **config)
        state = next_state(state, rng)
    return paths


def digests(path: Path) -> dict[str, str]:
    return {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in load_file(path).items()}


@pytest.mark.parametrize(
    ("first", "n_chains"), [(0, 8), pytest.param(1000, 334, marks=pytest.mark.slow)], ids=["few", "1000"]
)
def test_it_decodes_random_chains_to_the_same_values(tmp_path: Path, first: int, n_chains: int) -> None:
    paths = [path for seed in range(first, first + n_chains) for path in random_chain(tmp_path, seed)]
    for begin in range(0, len(paths), 51):
        batch = paths[begin : begin + 51]  # for one process
        for path, row in zip(batch, decode_alone(batch), strict=True):
            assert "tensors" in row, row
            assert {tensor["name"]: tensor["sha256"] for tensor in row["tensors"]} == digests(path), path


def test_it_restores_the_compressed_safetensors_file(tmp_path: Path) -> None:
    plain, out = tmp_path / "w.safetensors", tmp_path / "out.safetensors"
    save_plain({"w": np.arange(64, dtype=np.float32), "b": np.zeros(3, np.int8)}, plain, {"format": "np"})
    ckptz("compress", plain)
    subprocess.run([sys.executable, str(DECODER), str(tmp_path / "w.ckptz"), "-o", str(out)], check=True)
    assert out.read_bytes() == plain.read_bytes()


# --- arithmetic ---------------------------------------------------------------------------------

ENTRIES = "return [[nearest(scale[r] * x + offset[r]) for x in level] for r in range(rows)]"
SUM = "total = nearest(number(p) + number(entry))"
PRODUCT = "nearest(number(row[i // n]) * number(column[i % n]))"
TERM = "total = nearest(number(total) + number(product_at(row, column, i)))"
TO_BF16 = '(p + 0x7FFF + (p >> 16 & 1)) >> 16 if name == "BF16"'
TO_F16 = 'nearest(number(p), "e")'

# Mistakes that a reader may make: the correct code, the wrong code, and vectors that must fail with it.
MISTAKES: dict[str, tuple[str, str, set[str]]] = {
    "product and sum fused": (
        ENTRIES,
        "from fractions import Fraction as F\n        "
        + ENTRIES.replace("scale[r] * x + offset[r]", "float(F(scale[r]) * F(x) + F(offset[r]))"),
        {"valid/float-fused"},
    ),
    "subnormal results of binary64 flushed": (
        ENTRIES,
        ENTRIES.replace("scale[r] * x", "(scale[r] * x if abs(scale[r] * x) >= 2.0**-1022 else 0.0)"),
        {"chain/delta-float-subnormal-entry"},
    ),
    "subnormal entries flushed": (
        ENTRIES,
        "flush = lambda y: y if abs(y) >= 2.0**-126 else 0.0\n        "
        + ENTRIES.replace("scale[r] * x + offset[r]", "flush(scale[r] * x + offset[r])"),
        {"valid/float-subnormal-entry"},
    ),
    "subnormal sums flushed": (
        SUM,
        "x = number(p) + number(entry)\n            total = nearest(x if abs(x) >= 2.0**-126 else x * 0.0)",
        {"chain/delta-map-linear", "valid/float-product-underflow"},
    ),
    "subnormal operands flushed": (
        SUM,
        f"p, entry = (x if x & 0x7F800000 else x & 0x80000000 for x in (p, entry))\n            {SUM}",
        {"chain/delta-map-linear"},
    ),
    "subnormal products flushed": (
        PRODUCT,
        f"(lambda u: u if u & 0x7F800000 else 0)({PRODUCT})",
        {"valid/float-product-underflow"},
    ),
    "terms fused": (
        TERM,
        "total = nearest(number(total) + number(row[0]) * number(column[0]))",
        {"valid/map-low-rank-not-fused"},
    ),
    "terms in another order": (
        "in self.plan.terms:",
        "in reversed(self.plan.terms):",
        {"valid/map-low-rank-in-order"},
    ),
    "sums not rounded before the cast": (
        SUM,
        f"{SUM}\n"
        "            error = number(p) + number(entry) - number(total)\n"
        "            total += (error > 0) if total >> 31 == 0 else (error < 0)",
        {"chain/delta-float-rounded-twice"},
    ),
    "a cast to BF16 that truncates": (TO_BF16, 'p >> 16 if name == "BF16"', {"valid/float-cast-bf16"}),
    "a cast to BF16 that rounds half up": (
        TO_BF16,
        '(p + 0x8000) >> 16 if name == "BF16"',
        {"valid/float-cast-bf16", "chain/delta-float-rounded-twice"},
    ),
    "a cast to F16 that truncates": (
        TO_F16,
        f"(lambda u: u - (abs(number(u, 'e')) > abs(number(p))))({TO_F16})",
        {"valid/float-cast-f16"},
    ),
    "a cast to F16 that rounds half up": (
        TO_F16,
        f"(lambda u: u + (number(u + 1, 'e') - number(p) == number(p) - number(u, 'e')))({TO_F16})",
        {"valid/float-cast-f16"},
    ),
    "a cast to F16 that flushes subnormals": (
        TO_F16,
        f"(p >> 16 & 0x8000 if p & 0x7FFFFFFF < 0x38800000 else {TO_F16})",
        {"valid/float-cast-f16", "chain/delta-float-f16-subnormal"},
    ),
    "a predictor of -0.0": (
        "return [0] * self.n",
        "return [0x80000000] * self.n",
        {"valid/map-linear-negative-zero"},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_in_the_arithmetic_of_a_reader_fails_vectors(tmp_path: Path, mistake: str) -> None:
    right, wrong, expected = MISTAKES[mistake]
    source = (DECODER.parent / "ckptz_frame.py").read_text()
    assert source.count(right) == 1
    wrong_folder = tmp_path / "decoder"
    wrong_folder.mkdir()
    (wrong_folder / "ckptz_frame.py").write_text(source.replace(right, wrong))
    (wrong_folder / DECODER.name).write_bytes(DECODER.read_bytes())
    with_floats = [vector for vector in VALID if re.search("float|map", vector.name)]
    paths = [str(vector.paths[0]) for vector in with_floats]
    command = [sys.executable, str(wrong_folder / DECODER.name), *paths]
    rows = map(json.loads, subprocess.run(command, capture_output=True, text=True).stdout.splitlines())
    failed = {
        vector.name
        for vector, row in zip(with_floats, rows, strict=True)
        if row.get("tensors") != vector.row["tensors"]
    }
    assert expected <= failed


# --- its source --------------------------------------------------------------------------------


def test_it_imports_only_itself_and_zstandard() -> None:
    modules = {path.stem for path in SOURCES}
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
        foreign = {name.split(".")[0] for name in names} - modules - set(sys.stdlib_module_names)
        assert foreign <= {"zstandard"}, path


def _plain(text: str) -> str:
    """Remove the Markdown marks and line breaks of a text."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)  # links
    return re.sub(r"\s+", " ", text.replace("*", "").replace("`", "").replace("\\|", "|"))


def _quotes(path: Path) -> list[str]:
    """Return the quotations of at least 8 characters in the comments and docstrings of a source file."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))[2:]
    texts = [t.string.strip('"') for t in tokens if t.type == tokenize.STRING and t.string.startswith('"""')]
    texts += [t.string for t in tokens if t.type == tokenize.COMMENT]
    closed = [_plain(text + '"' * (text.count('"') % 2)) for text in texts[1:]]
    return [quote for text in closed for quote in re.findall(r'"([^"]{8,})"', text)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_its_quotations_are_sentences_of_the_specification(path: Path) -> None:
    pages = "\n".join(_plain(file.read_text()) for file in sorted(SPEC.glob("*.md")))
    quotes = _quotes(path)
    assert len(quotes) >= 10
    assert [quote for quote in quotes if quote not in pages] == []


def test_every_question_about_the_pages_links_to_its_answer() -> None:
    text = (DECODER.parent / "questions.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .+ \| \[.+\]\(\.\./(.+\.md)#(.+)\) \|$", text, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, 76))
    for number, name, anchor in rows:
        assert anchor in page(name), f"question {number}: {name} has no #{anchor}"
