"""Docstrings say in one sentence what a function does, and of arrays which shape or unit they have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

VERBS = """
    Become Cut Do Set Spell
    Add Apply Ask Average Begin Bind Bring Call Check Choose Close Code Compare Compress Compute Convert
    Copy Count Decide Decode Delete Describe Draw Encode End Expand Factor Fill Find Fit Forget Give Go
    Group Hash Hold Join Keep Leave Let List Load Look Make Map Mark Match Measure Merge Move Name Open
    Pack Parse Plan Predict Print Propose Prune Publish Put Quantize Rank Read Receive Record Refuse
    Release Remember Remove Replace Require Restore Round Run Sample Save Say Scale Search Send Share
    Show Sketch Sort Split Start Stop Store Subtract Sum Take Tell Try Turn Undo Update Use Verify Wait
    Warn Weigh Wrap Write
"""
ARRAY = re.compile(
    r"\b(NDArray|Units|Floats|Reals|Integers|Codes|Labels|Counts|Bytes|Frequencies|Matrix|Logits)\b"
)
SIZED = re.compile(r"\[|\bunits?\b|\bbytes?\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_public(node: Function | ast.ClassDef) -> bool:
    return not node.name.startswith("_")


def decorators(function: Function) -> set[str]:
    return {ast.unparse(one).split("(")[0] for one in function.decorator_list}


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Public functions and methods with a docstring; those of public classes, but no properties."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and is_public(node):
            yield from functions_in(node)
        if not isinstance(node, Function) or not is_public(node) or ast.get_docstring(node) is None:
            continue
        if not {name for name in decorators(node) if "property" in name or name.endswith(".setter")}:
            yield node


def faults_of(function: Function) -> Iterator[str]:
    """What is wrong with the docstring of one function."""
    text = ast.get_docstring(function) or ""
    first = text.splitlines()[0]
    if first.split()[0].rstrip(".,:;") not in VERBS.split():
        yield f"{first!r} does not begin with a verb"
    if not first.endswith("."):
        yield f"{first!r} does not end with a full stop"
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [one.annotation for one in arguments] + [function.returns]
    if any(ARRAY.search(ast.unparse(one)) for one in annotations if one) and not SIZED.search(text):
        yield f"{first!r} says no shape or unit of its arrays"


def found_in(source: str) -> list[str]:
    return [f"{one.name}: {fault}" for one in functions_in(ast.parse(source)) for fault in faults_of(one)]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


MODULES = [path for folder in ("ckptz", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", MODULES, ids=room_of)
def test_docstrings_are_sentences_that_begin_with_a_verb(path: Path) -> None:
    faults = found_in(path.read_text())
    assert not faults, "\n".join(["", *faults])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("def f(a: int) -> int:", "'Codes of it.' does not begin with a verb"),
        ("def f(a: int) -> int:", "'Give it' does not end with a full stop"),
        ("def f(a: NDArray[Any]) -> None:", "'Take it.' says no shape or unit of its arrays"),
        ("def f() -> Units:", "'Read it.' says no shape or unit of its arrays"),
    ],
)
def test_a_wrong_docstring_is_noticed(line: str, fault: str) -> None:
    text = fault.split("'")[1]
    assert found_in(f'{line}\n    """{text}"""') == [f"f: {fault}"]
    assert found_in(f'class A:\n  {line}\n    """{text}"""') == [f"f: {fault}"]


@pytest.mark.parametrize(
    "source",
    [
        'def f(a: Units) -> int:\n    """Count units."""',
        'def f(a: Units) -> None:\n    """Take it.\n\n    `a` is [n].\n    """',
        'def _f() -> int:\n    """Of a helper."""',
        'class A:\n    """A thing."""\n    @property\n    def f(self) -> int:\n        """A number."""',
        'class _A:\n    def f(self) -> int:\n        """A number."""',
        "def f() -> int:\n    return 1",
    ],
)
def test_what_is_right_or_private_is_let_through(source: str) -> None:
    assert found_in(source) == []
