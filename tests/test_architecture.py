"""The shape of the code base: who may import whom, and what loading the package costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptz._version import __version__
from ckptz.container.index import FORMAT_VERSION

ROOT = Path(__file__).parent.parent

# Lowest floor first. Imports go strictly downwards; neighbours on a floor never import each other.
FLOORS = (
    ("_version", "errors"),
    ("dtypes", "parallel", "config"),
    ("kernels", "bits"),
    ("entropy",),
    ("quant", "roles", "transform"),
    ("codec",),
    ("container", "wire", "frameworks"),
    ("store", "search", "reading"),
    ("handle", "convert"),
    ("saving", "applying"),
    ("numpy", "torch"),
    ("sync",),
    ("hooks",),
    ("integrations",),
)
FLOOR_OF = {f"ckptz.{room}": floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FLOOR_OF |= {"ckptz": len(FLOORS), "ckptz_cli": len(FLOORS) + 1}

# Third parties have owners; torch and ml_dtypes, which a reader may lack, load inside functions elsewhere.
OWNERS = {
    "numba": ("ckptz.kernels",),
    "xxhash": ("ckptz.bits",),
    "zstandard": ("ckptz.entropy",),
    "click": ("ckptz_cli",),
    "rich": ("ckptz_cli",),
    "pickle": (),
    "torch": (
        *("ckptz.kernels.torch", "ckptz.kernels.wire_torch", "ckptz.frameworks.torch"),
        *("ckptz.torch", "ckptz.applying"),
        *("ckptz.hooks", "ckptz.integrations"),
        *("ckptz.wire.link", "ckptz.wire.loopback", "ckptz.wire.stage"),
    ),
    "ml_dtypes": (),
}
OPTIONAL = ("torch", "ml_dtypes")
LAZY_DOORS = ("ckptz", "ckptz.kernels", "ckptz_cli")  # their functions may import what stands below


def room_of(module: str) -> str:
    """The unit that has a floor: `ckptz.bits.cursor` lives in `ckptz.bits`."""
    return "ckptz_cli" if module.startswith("ckptz_cli") else ".".join(module.split(".")[:2])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p not in ("cli", "__init__"))


SOURCES = {module_of(p): p for folder in ("ckptz", "cli") for p in sorted((ROOT / folder).rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def imported(node: ast.AST) -> list[str]:
    """Modules that one statement imports; `from a import b` counts as a.b where that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "relative import"
    return [
        full if (full := f"{node.module}.{alias.name}") in SOURCES else str(node.module)
        for alias in node.names
    ]


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether inside a function) of every import below `tree`; typing-only ones are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from ((name, inside) for name in imported(node))
        yield from imports(node, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def check_import(module: str, name: str, inside: bool) -> None:
    """Hold one import against the floors, the owners and the rule that imports stand at the top."""
    room, package = room_of(module), name.split(".")[0]
    if package in ("ckptz", "ckptz_cli"):
        down = room_of(name) == room or FLOOR_OF[room_of(name)] < FLOOR_OF[room]
        assert down, f"{module} imports {name}, which is not below it"
    is_lazy = inside and package in OPTIONAL
    owned = is_lazy or any(f"{module}.".startswith(f"{o}.") for o in OWNERS.get(package, (module,)))
    assert owned, f"{module} imports {name}, which is not its own"
    assert not inside or is_lazy or room in LAZY_DOORS, f"{module} imports {name} inside a function"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_strictly_down(module: str) -> None:
    assert room_of(module) in FLOOR_OF, f"{module} has no floor: name it here and in the architecture"
    for name, inside in imports(TREES[module]):
        check_import(module, name, inside)


@pytest.mark.parametrize(
    ("module", "name", "inside"),
    [
        ("ckptz.bits.cursor", "ckptz.codec.frame", False),  # up
        ("ckptz.bits.cursor", "ckptz.kernels.reference", False),  # sideways
        ("ckptz.store.resolve", "torch", False),  # too early
        ("ckptz.codec.encode", "zstandard", False),  # another's
        ("ckptz_cli.main", "pickle", True),  # never
        ("ckptz.codec.encode", "ckptz.entropy.streams", True),  # hidden
    ],
)
def test_a_wrong_import_is_noticed(module: str, name: str, inside: bool) -> None:
    with pytest.raises(AssertionError):
        check_import(module, name, inside)


def test_one_function_publishes_files() -> None:
    renames = ("os.replace", "os.rename", "shutil.move")
    users = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in renames
    }
    assert users == {"ckptz.container.publish"}


def test_one_function_makes_folders() -> None:
    users = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("mkdir", "makedirs")
    }
    # A folder that nobody synced in its parent may go in a power cut; remote ones have no such thing.
    assert users == {"ckptz.container.publish", "ckptz.store.places", "ckptz.store.remote"}


@pytest.mark.parametrize("command", ["import ckptz", "from ckptz_cli.main import main; main(['--help'])"])
def test_a_look_loads_neither_torch_nor_numba(command: str) -> None:
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {command}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "ckptz" in loaded
    assert not loaded & {"torch", "numba"}


def test_the_changelog_opens_with_this_version_and_its_format() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    version, *sections = re.findall(r"^(?:### )?\[?([\w.]+)", newest, re.MULTILINE)[:2]
    assert version == __version__
    assert sections == ["Format"], "what changed in the format comes first"
    assert f"Format version {FORMAT_VERSION}" in newest
