"""Rules for docstrings: sentences with a subject, and shapes or units of arrays."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Words that do not name an operation, as return, compute, read or select do.
VAGUE = ("Give", "Tell", "Say", "Let", "Bring", "What", "Whether", "Whoever")
ARRAY = re.compile(
    r"\b(NDArray|Patterns|Floats|Reals|Integers|Codes|Labels|Counts|Bytes|Frequencies|Matrix|Logits)\b"
)
SIZED = re.compile(r"\[|\bpatterns?\b|\bunits?\b|\bbytes?\b")
# First words after which readers must guess the subject.
RIDDLES = re.compile(r"(What|Where|How|Which|Of|For|See|As|It|The same|spec/)\b|spec/|\(")
NO_OBJECT = re.compile(r"\w+ (it|them|others|the same|nothing|something|of)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_public(node: Function | ast.ClassDef) -> bool:
    return not node.name.startswith("_")


def decorators(function: Function) -> set[str]:
    return {ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list}


def documented_in(tree: ast.AST) -> Iterator[Function | ast.ClassDef]:
    """Yield public functions, classes, methods and properties that have a docstring."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef) and is_public(node):
            if ast.get_docstring(node) is not None:
                yield node
            if isinstance(node, ast.ClassDef):
                yield from documented_in(node)


def is_property(node: Function | ast.ClassDef) -> bool:
    names = set() if isinstance(node, ast.ClassDef) else decorators(node)
    return any("property" in name or name.endswith(".setter") for name in names)


def faults_of(node: Function | ast.ClassDef) -> Iterator[str]:
    """Yield the faults in the docstring of a function, a property or a class."""
    text = ast.get_docstring(node) or ""
    first, n_words = text.splitlines()[0], len(text.split("\n\n")[0].split())
    if not first.endswith("."):
        yield f"{first!r} does not end with a full stop"
    if n_words < (4 if is_property(node) else 3):
        yield f"{first!r} is too short to say anything"
    if isinstance(node, ast.ClassDef) or is_property(node):
        if RIDDLES.match(first):
            yield f"{first!r} does not begin with its subject"
        return
    yield from faults_of_function(node, text, first)


def faults_of_function(function: Function, text: str, first: str) -> Iterator[str]:
    if NO_OBJECT.match(first):
        yield f"{first!r} does not name its object"
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments] + [function.returns]
    if any(ARRAY.search(ast.unparse(a)) for a in annotations if a) and not SIZED.search(text):
        yield f"{first!r} says no shape or unit of its arrays"


def faults_in(source: str) -> list[str]:
    return [f"{node.name}: {fault}" for node in documented_in(ast.parse(source)) for fault in faults_of(node)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


MODULES = [path for folder in ("ckptz", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_docstrings_are_sentences_about_their_subject() -> None:
    faults = [f"{name_of(path)}: {fault}" for path in MODULES for fault in faults_in(path.read_text())]
    assert not faults, "\n".join(["", *faults])


def vague_in(source: str) -> list[str]:
    """List the first lines of docstrings, also of private functions, that begin with a vague word."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function | ast.ClassDef)]
    lines = [(ast.get_docstring(node) or "-").splitlines()[0] for node in nodes]
    return [line for line in lines if line.split()[0].rstrip(".,:;") in VAGUE]


def test_docstrings_begin_with_a_verb_of_the_field() -> None:
    assert not [(name_of(path), line) for path in MODULES for line in vague_in(path.read_text())]


def test_a_vague_docstring_is_noticed() -> None:
    source = 'def _f() -> int:\n    """Give a number."""\nclass A:\n    """What it is."""'
    assert vague_in(source) == ["Give a number.", "What it is."]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("def f(a: int) -> int:", "'Give a number' does not end with a full stop"),
        ("def f(a: int) -> int:", "'Give it.' is too short to say anything"),
        ("def f(a: int) -> int:", "'Give the same for others.' does not name its object"),
        ("def f(a: NDArray[Any]) -> None:", "'Take an array.' says no shape or unit of its arrays"),
        ("def f() -> Patterns:", "'Read an array.' says no shape or unit of its arrays"),
        ("@property\n  def f(self) -> int:", "'What it is called.' does not begin with its subject"),
        ("@property\n  def f(self) -> int:", "'All of them.' is too short to say anything"),
        ("class f:", "'How the values are spread.' does not begin with its subject"),
        ("class f:", "'The same of a header.' does not begin with its subject"),
        ("class f:", "'spec/registry.md#predictors: a table.' does not begin with its subject"),
        ("class f:", "'One file.' is too short to say anything"),
    ],
)
def test_a_wrong_docstring_is_noticed(line: str, fault: str) -> None:
    text = fault.split("'")[1]
    assert fault in "\n".join(faults_in(f'class A:\n  {line}\n    """{text}"""'))


@pytest.mark.parametrize(
    "source",
    [
        'def f(a: Patterns) -> int:\n    """Count some bit patterns."""',
        'def f(a: Patterns) -> None:\n    """Take an array.\n\n    `a` is [n].\n    """',
        'def _f() -> int:\n    """Of a helper."""',
        'class A:\n  """A new one."""\n  @property\n  def f(self) -> int:\n    """Its items in all."""',
        'class _A:\n    def f(self) -> int:\n        """A number."""',
        "def f() -> int:\n    return 1",
    ],
)
def test_valid_and_private_docstrings_have_no_faults(source: str) -> None:
    assert faults_in(source) == []
