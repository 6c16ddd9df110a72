"""The structure of the code: allowed imports, modules that may delete files, and the cost of importing."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptz._version import __version__
from ckptz.codec.method import Recipe
from ckptz.codec.registry import METHODS
from ckptz.format.index import FORMAT_VERSION

ROOT = Path(__file__).parents[2]

# From the lowest floor to the highest. Imports only go down; folders on one floor never import each other.
FLOORS = (
    ("_version", "errors", "lazy", "words"),
    ("kernels",),
    ("parallel",),
    ("format",),
    ("state", "store", "wire"),
    ("codec", "run"),
    ("foreign",),
    ("guidance",),
    ("write",),
    ("search", "api"),
    ("verbs", "sync", "hooks", "numpy", "torch"),
    ("training",),
    ("integrations",),
)
FLOOR_OF = {f"ckptz.{folder}": floor for floor, folders in enumerate(FLOORS) for folder in folders}
FLOOR_OF |= {"ckptz": len(FLOORS), "ckptz_cli": len(FLOORS) + 1, "ckptz.__main__": len(FLOORS) + 2}

# Third-party packages and the modules that may import them; optional ones are imported inside functions.
OWNERS = {
    "numba": ("ckptz.kernels",),
    "llvmlite": ("ckptz.kernels",),
    "xxhash": ("ckptz.format.bits",),
    "zstandard": ("ckptz.format.streams",),
    "click": ("ckptz_cli",),
    "rich": ("ckptz_cli",),
    # Only the name of an error, or with restricted unpicklers.
    "pickle": ("ckptz.foreign.pickled", "ckptz.foreign.torch_files", "ckptz.integrations.accelerate"),
    "torch": (
        *("ckptz.kernels.torch", "ckptz.kernels.wire_torch", "ckptz.state.torch"),
        *("ckptz.state.modules", "ckptz.torch", "ckptz.api.apply"),
        *("ckptz.hooks", "ckptz.training", "ckptz.integrations"),
        *("ckptz.wire.link", "ckptz.wire.stage", "ckptz.wire.ddp"),
    ),
    "ml_dtypes": (),
    "vl_convert": (),
    "jinja2": (),
}
OPTIONAL = ("torch", "transformers", "ml_dtypes", "vl_convert", "jinja2")
LATE = (  # imports inside functions, because few runs of a command need them
    ("ckptz.verbs.compress", "ckptz.search.run"),
    ("ckptz.verbs.compress", "ckptz.search.target_size"),
    ("ckptz.api.save", "ckptz.write.job"),
    ("ckptz.api.save", "ckptz.write.writer"),
    ("ckptz.guidance.side_information", "ckptz.foreign.inputs"),
    ("ckptz.foreign.trainer_folders", "ckptz.state.torch"),
)
BLAS_NAMES = {f"np.{name}" for name in ("linalg", "dot", "vdot", "inner", "matmul", "tensordot")}
LAZY_DOORS = ("ckptz_cli",)  # functions of these may import what is below them
# Modules that load others by computed names: public names of a package, compiled kernels.
NAMES_MODULES = ("ckptz", "ckptz.wire", "ckptz.kernels.loaders", "ckptz.lazy")


def folder_of(module: str) -> str:
    """Return the folder or module of the table of floors that a module belongs to."""
    return "ckptz_cli" if module.startswith("ckptz_cli") else ".".join(module.split(".")[:2])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p not in ("cli", "__init__"))


SOURCES = {module_of(p): p for folder in ("ckptz", "cli") for p in sorted((ROOT / folder).rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Parse the modules on first use, so that collecting the tests does not."""
    return {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def imported(node: ast.AST) -> list[str]:
    """List the modules that a statement imports; `from a import b` counts as a.b if that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "relative import"
    return [
        module if (module := f"{node.module}.{alias.name}") in SOURCES else str(node.module)
        for alias in node.names
    ]


def lazily_imported(node: ast.AST) -> list[str]:
    """List the module of ckptz that a call of `lazy.module` names by a constant."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("lazy.module", "importlib.import_module"):
        name = node.args[0]
        return [name.value] if isinstance(name, ast.Constant) and name.value in SOURCES else []
    return []


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield (module, whether inside a function) of every import below `tree`, except for typing only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from ((name, inside) for name in imported(node))
        yield from ((name, False) for name in lazily_imported(node))
        yield from imports(node, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def check_import(module: str, name: str, inside: bool) -> None:
    """Require that an import respects floors and owners, and is at the top of its module."""
    folder, package = folder_of(module), name.split(".")[0]
    check_down(module, name)
    is_lazy = inside and (package in OPTIONAL or (module, name) in LATE)
    is_allowed = is_lazy or any(f"{module}.".startswith(f"{o}.") for o in OWNERS.get(package, (module,)))
    assert is_allowed, f"{module} imports {name}, which is not its own"
    assert not inside or is_lazy or folder in LAZY_DOORS, f"{module} imports {name} inside a function"


def check_down(module: str, name: str) -> None:
    """Require that an import, even for typing only, goes to a lower floor."""
    folder = folder_of(module)
    if name.split(".")[0] in ("ckptz", "ckptz_cli"):
        down = folder_of(name) == folder or FLOOR_OF[folder_of(name)] < FLOOR_OF[folder]
        assert down, f"{module} imports {name}, which is not below it"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_strictly_down(module: str) -> None:
    assert folder_of(module) in FLOOR_OF, f"{module} has no floor: name it here and in the architecture"
    for name, inside in imports(trees()[module]):
        check_import(module, name, inside)
    for name in imports_of(module):
        check_down(module, name)


def users_of(is_use: Callable[[ast.AST], bool]) -> set[str]:
    """Return the names of the modules that contain a node for which `is_use` is true."""
    return {module for module, tree in trees().items() if any(map(is_use, ast.walk(tree)))}


def is_named(*names: str) -> Callable[[ast.AST], bool]:
    """Return a test of nodes: is it one of these names, dotted ones such as `json.loads` included?"""
    return lambda node: isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in names


def test_one_module_imports_by_computed_names() -> None:
    users = users_of(is_named("import_module", "importlib.import_module"))
    assert users == {"ckptz.lazy", "ckptz.search.measures"}, "the latter loads the user's own module"


def test_lazy_modules_are_loaded_by_constant_names() -> None:
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy.module":
                is_constant = isinstance(node.args[0], ast.Constant)
                assert is_constant or module in NAMES_MODULES, f"{module}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("module", "name", "inside"),
    [
        ("ckptz.format.bits", "ckptz.codec.chunk", False),  # from a higher floor
        ("ckptz.store.lock", "ckptz.state.flatten", False),  # from the same floor
        ("ckptz.store.resolve", "torch", False),  # loaded too early
        ("ckptz.codec.chunk", "zstandard", False),  # owned by another module
        ("ckptz_cli.main", "pickle", True),  # never allowed
        ("ckptz.codec.chunk", "ckptz.format.streams", True),  # inside a function
    ],
)
def test_a_wrong_import_is_noticed(module: str, name: str, inside: bool) -> None:
    with pytest.raises(AssertionError):
        check_import(module, name, inside)


READERS = (
    *("ckptz.format.decode", "ckptz.format.reader", "ckptz.format.envelope", "ckptz.store.resolve"),
    *("ckptz.api.read", "ckptz.api.describe", "ckptz.api.apply"),
)
ENCODERS = ("codec", "write", "guidance", "search")


def reached(modules: tuple[str, ...]) -> set[str]:
    """Return the modules of ckptz that these import, directly or not; packages load their `__init__`."""
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in seen or module not in SOURCES:
            continue
        seen.add(module)
        waiting += [name for name, _ in imports(trees()[module])]
        waiting.append(module.rpartition(".")[0])
    return seen


def test_readers_import_no_encoders() -> None:
    folders = {folder_of(module) for module in reached(READERS)}
    assert {"ckptz.format"} <= folders
    assert not folders & {f"ckptz.{folder}" for folder in ENCODERS}


def test_an_import_of_an_encoder_is_noticed() -> None:
    assert "ckptz.codec" in {folder_of(module) for module in reached(("ckptz.write.writer",))}


def imports_of(module: str) -> set[str]:
    """Return the modules of ckptz that a module imports, for types only and lazily too."""
    nodes = list(ast.walk(trees()[module]))
    names = {name for node in nodes for name in (*imported(node), *lazily_imported(node))}
    return names & set(SOURCES) - {module}


def test_imports_have_no_cycles_not_even_for_types() -> None:
    graph = {module: imports_of(module) for module in SOURCES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def subclasses(kind: type) -> set[str]:
    """Return the names of all direct and indirect subclasses."""
    return {name for child in kind.__subclasses__() for name in (child.__name__, *subclasses(child))}


def config_checks(tree: ast.AST) -> Iterator[str]:
    """Yield `isinstance` tests and casts that name a configuration or a recipe of a method."""
    class_names = {*(method.__name__ for method in METHODS.values()), *subclasses(Recipe), "Moments"}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Call) else ""
        if re.match(r"(isinstance|cast)\(", text) and class_names & set(re.findall(r"\w+", text)):
            yield text


def test_only_methods_ask_which_method_it_is() -> None:
    outside = {module: tree for module, tree in trees().items() if folder_of(module) != "ckptz.codec"}
    checks = [f"{module}: {check}" for module, tree in outside.items() for check in config_checks(tree)]
    assert not checks
    for check in ("isinstance(config, (int, KMeans))", "isinstance(a, Clusters)", "cast(KMeans, config)"):
        assert list(config_checks(ast.parse(check)))


def test_one_function_publishes_files() -> None:
    users = users_of(is_named("os.replace", "os.rename", "shutil.move"))
    assert users == {"ckptz.format.publish"}


# Modules that delete files: which files, and why these are not needed. See test_deletions.py.
DELETES = {
    "ckptz.verbs.compress": "with --resume, unfinished files of processes that have ended",
    # Temporary files and copies made by ckptz; no saved data is lost with them.
    "ckptz.format.publish": "temporary files that were not published",
    "ckptz.integrations.accelerate": "the file that marks a complete folder, before the folder is rewritten",
    "ckptz.integrations.trainer": "the same file",
    "ckptz.wire.state": "the file of sample buffers that a full disk left no room for",
    "ckptz.store.storage": "`remove` of a folder, which those below call",
    "ckptz.run.links": "symbolic links of its own that lead nowhere",
    "ckptz.store.lock": "its own lease; copies of uploaded or abandoned files; spools of ended processes",
    "ckptz.foreign.dcp": "a folder that the same call created, if writing it failed",
    # Files of users, by their rules.
    "ckptz.run.folder": "leftovers of killed writers, under the lock; files that a prune lists",
    "ckptz.run.prune": "files of a Checkpointer that no rule keeps, after reading what the kept files need",
    "ckptz.run.deletion": "files that `keep.py` or a framework deletes, after reading what kept files need",
    "ckptz.integrations.lightning": "files that Lightning deletes, by `linked_files`",
    "ckptz.integrations.dcp_write": "shards that the index does not list; bases by `linked_files`",
    "ckptz.integrations.dcp_run": "old steps, after reading the kept ones; folders of aborted saves",
    "ckptz.sync.publisher": "files older than full files that were read; files of a step that failed",
}
CALLS = {"unlink", "remove", "rmtree", "rmdir", "rm", "rm_file", "remove_checkpoint"}


def deletes(call: ast.AST) -> bool:
    """Return whether a call may delete a file: by its method, except on lists, sets and hooks of torch."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS):
        return False
    not_files = ("missing", "features", "self.waiting", "self._handle", "self", "self._handles.pop()")
    return ast.unparse(call.func.value) not in not_files


def test_every_module_that_deletes_is_known() -> None:
    assert users_of(deletes) == set(DELETES)


def test_one_function_makes_folders() -> None:
    users = users_of(lambda node: isinstance(node, ast.Attribute) and node.attr in ("mkdir", "makedirs"))
    # A new folder that is not synced in its parent may be lost in a power cut; remote stores have no folders.
    # Lost kernels are compiled again.
    assert users == {"ckptz.format.publish", "ckptz.format.uploads", "ckptz.kernels.cache"}


@pytest.mark.parametrize("command", ["import ckptz", "from ckptz_cli.main import main; main(['--help'])"])
def test_help_loads_neither_torch_nor_numba_nor_report_libraries(command: str) -> None:
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {command}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(process.stderr.split())
    assert "ckptz" in loaded
    assert not loaded & {"torch", "numba", "jinja2", "vl_convert"}


def test_the_changelog_opens_with_this_version_and_its_format() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    version, *sections = re.findall(r"^(?:### )?\[?([\w.]+)", newest, re.MULTILINE)[:2]
    assert version == __version__
    assert sections == ["Format"], "changes of the format must come first"
    assert f"Format version {FORMAT_VERSION}" in newest


def test_the_blas_of_numpy_is_called_where_forks_wait_for_it() -> None:
    """A fork ends the threads of OpenBLAS, so a call that another thread has begun would never return."""
    products = users_of(lambda node: isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
    assert products | users_of(is_named(*BLAS_NAMES)) == {"ckptz.kernels.blas"}
