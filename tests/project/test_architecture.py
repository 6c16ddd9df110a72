"""The shape of the code base: who may import whom, and what loading the package costs."""

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

# Lowest floor first. Imports go strictly downwards; neighbours on a floor never import each other.
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

# Third parties have owners; what one may lack loads inside functions elsewhere.
OWNERS = {
    "numba": ("ckptz.kernels",),
    "llvmlite": ("ckptz.kernels",),
    "xxhash": ("ckptz.format.bits",),
    "zstandard": ("ckptz.format.streams",),
    "click": ("ckptz_cli",),
    "rich": ("ckptz_cli",),
    # With stand-ins; the name of an error.
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
LATE = (  # what few runs of a command need, for its start
    ("ckptz.verbs.compress", "ckptz.search.run"),
    ("ckptz.verbs.compress", "ckptz.search.target_size"),
    ("ckptz.api.save", "ckptz.write.job"),
    ("ckptz.api.save", "ckptz.write.writer"),
    ("ckptz.guidance.side_information", "ckptz.foreign.inputs"),
    ("ckptz.foreign.trainer_folders", "ckptz.state.torch"),
)
BLAS_NAMES = {f"np.{name}" for name in ("linalg", "dot", "vdot", "inner", "matmul", "tensordot")}
LAZY_DOORS = ("ckptz_cli",)  # its functions may import what stands below
# Modules that load others by names that they make: public names of a package, compiled kernels.
NAMES_MODULES = ("ckptz", "ckptz.wire", "ckptz.kernels.loaders", "ckptz.lazy")


def folder_of(module: str) -> str:
    """The unit that has a floor: `ckptz.format.bits` lives in `ckptz.format.bits`."""
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


def lazily_imported(node: ast.AST) -> list[str]:
    """The module of our own that a call of the lazy door names, which must be a constant."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("lazy.module", "importlib.import_module"):
        name = node.args[0]
        return [name.value] if isinstance(name, ast.Constant) and name.value in SOURCES else []
    return []


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether inside a function) of every import below `tree`; typing-only ones are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from ((name, inside) for name in imported(node))
        yield from ((name, False) for name in lazily_imported(node))
        yield from imports(node, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def check_import(module: str, name: str, inside: bool) -> None:
    """Hold one import against the floors, the owners and the rule that imports stand at the top."""
    folder, package = folder_of(module), name.split(".")[0]
    check_down(module, name)
    is_lazy = inside and (package in OPTIONAL or (module, name) in LATE)
    owned = is_lazy or any(f"{module}.".startswith(f"{o}.") for o in OWNERS.get(package, (module,)))
    assert owned, f"{module} imports {name}, which is not its own"
    assert not inside or is_lazy or folder in LAZY_DOORS, f"{module} imports {name} inside a function"


def check_down(module: str, name: str) -> None:
    """Hold one import, which may be for types only, against the floors."""
    folder = folder_of(module)
    if name.split(".")[0] in ("ckptz", "ckptz_cli"):
        down = folder_of(name) == folder or FLOOR_OF[folder_of(name)] < FLOOR_OF[folder]
        assert down, f"{module} imports {name}, which is not below it"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_strictly_down(module: str) -> None:
    assert folder_of(module) in FLOOR_OF, f"{module} has no floor: name it here and in the architecture"
    for name, inside in imports(trees()[module]):
        check_import(module, name, inside)
    for name in own_imports(module):
        check_down(module, name)


def users_of(is_use: Callable[[ast.AST], bool]) -> set[str]:
    """Return the names of the modules that contain a node for which `is_use` is true."""
    return {module for module, tree in trees().items() if any(map(is_use, ast.walk(tree)))}


def is_named(*names: str) -> Callable[[ast.AST], bool]:
    """Return a test of nodes: is it one of these names, dotted ones such as `json.loads` included?"""
    return lambda node: isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in names


def test_one_module_imports_by_name() -> None:
    users = users_of(is_named("import_module", "importlib.import_module"))
    assert users == {"ckptz.lazy", "ckptz.search.measures"}, "the latter loads the user's own module"


def test_modules_are_loaded_by_names_that_can_be_read() -> None:
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy.module":
                is_constant = isinstance(node.args[0], ast.Constant)
                assert is_constant or module in NAMES_MODULES, f"{module}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("module", "name", "inside"),
    [
        ("ckptz.format.bits", "ckptz.codec.chunk", False),  # up
        ("ckptz.store.lock", "ckptz.state.flatten", False),  # sideways
        ("ckptz.store.resolve", "torch", False),  # too early
        ("ckptz.codec.chunk", "zstandard", False),  # another's
        ("ckptz_cli.main", "pickle", True),  # never
        ("ckptz.codec.chunk", "ckptz.format.streams", True),  # hidden
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
    """Modules of our own that these import, at whatever distance; packages load their `__init__`."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in found or module not in SOURCES:
            continue
        found.add(module)
        waiting += [name for name, _ in imports(trees()[module])]
        waiting.append(module.rpartition(".")[0])
    return found


def test_what_reads_files_knows_nothing_of_what_an_encoder_decides() -> None:
    folders = {folder_of(module) for module in reached(READERS)}
    assert {"ckptz.format"} <= folders
    assert not folders & {f"ckptz.{folder}" for folder in ENCODERS}


def test_the_writer_is_noticed_among_readers() -> None:
    assert "ckptz.codec" in {folder_of(module) for module in reached(("ckptz.write.writer",))}


def own_imports(module: str) -> set[str]:
    """Return the modules of ckptz that a module imports, for types only and lazily too."""
    nodes = list(ast.walk(trees()[module]))
    names = {name for node in nodes for name in (*imported(node), *lazily_imported(node))}
    return names & set(SOURCES) - {module}


def test_no_modules_import_each_other_not_even_for_types() -> None:
    graph = {module: own_imports(module) for module in SOURCES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def subclasses(kind: type) -> set[str]:
    """Names of all classes below one."""
    return {name for one in kind.__subclasses__() for name in (one.__name__, *subclasses(one))}


def config_checks(tree: ast.AST) -> Iterator[str]:
    """`isinstance` tests on configurations and recipes of methods, and casts to them."""
    known = {*(method.__name__ for method in METHODS.values()), *subclasses(Recipe), "Moments"}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Call) else ""
        if re.match(r"(isinstance|cast)\(", text) and known & set(re.findall(r"\w+", text)):
            yield text


def test_only_methods_ask_which_method_it_is() -> None:
    outside = {module: tree for module, tree in trees().items() if folder_of(module) != "ckptz.codec"}
    found = [f"{module}: {check}" for module, tree in outside.items() for check in config_checks(tree)]
    assert not found
    for check in ("isinstance(config, (int, KMeans))", "isinstance(a, Clusters)", "cast(KMeans, config)"):
        assert list(config_checks(ast.parse(check)))


def test_one_function_publishes_files() -> None:
    users = users_of(is_named("os.replace", "os.rename", "shutil.move"))
    assert users == {"ckptz.format.publish"}


# Whoever deletes, what, and what that rests on: see test_deletions.py.
DELETES = {
    "ckptz.verbs.compress": "with --resume, unfinished files of processes that have ended",
    # Own temporary files and copies, which nothing that was saved is in.
    "ckptz.format.publish": "temporary files that got no name",
    "ckptz.integrations.accelerate": "the mark of a complete folder that is written anew",
    "ckptz.integrations.trainer": "the same",
    "ckptz.wire.state": "the file of sample buffers that a full disk left no room for",
    "ckptz.store.storage": "`remove` of a folder, which those below call",
    "ckptz.run.links": "symbolic links of its own that lead nowhere",
    "ckptz.store.lock": "its own lease; copies of what was uploaded or not saved; spools nobody holds",
    "ckptz.foreign.dcp": "a folder that this very call made, when writing it failed",
    # Others' files, by the rule.
    "ckptz.run.folder": "leftovers of killed writers, under the lock; what a prune tells it to",
    "ckptz.run.prune": "files of a Checkpointer that no rule keeps: needs of those that stay were read",
    "ckptz.run.deletion": "what `keep.py` or a framework lets go, and bases: needs of what stays were read",
    "ckptz.integrations.lightning": "what Lightning tells it to, by `linked_files`",
    "ckptz.integrations.dcp_write": "shards that the whole index does not name; bases by `linked_files`",
    "ckptz.integrations.dcp_run": "folders of old steps: those that stay were read; cut-off saves: no index",
    "ckptz.sync.publisher": "what is older than full files that were read; files of a step that failed",
}
CALLS = {"unlink", "remove", "rmtree", "rmdir", "rm", "rm_file", "remove_checkpoint"}


def deletes(call: ast.AST) -> bool:
    """Whether a call may delete a file: by name, less what lists, sets and torch's hooks have, too."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS):
        return False
    other = ("missing", "features", "self.waiting", "self._handle", "self", "self._handles.pop()")
    return ast.unparse(call.func.value) not in other


def test_every_module_that_deletes_is_known() -> None:
    assert users_of(deletes) == set(DELETES)


def test_one_function_makes_folders() -> None:
    users = users_of(lambda node: isinstance(node, ast.Attribute) and node.attr in ("mkdir", "makedirs"))
    # A folder that nobody synced in its parent may go in a power cut; remote ones have no such thing.
    # What a power cut takes of compiled kernels is compiled again.
    assert users == {"ckptz.format.publish", "ckptz.format.uploads", "ckptz.kernels.cache"}


@pytest.mark.parametrize("command", ["import ckptz", "from ckptz_cli.main import main; main(['--help'])"])
def test_a_look_loads_neither_torch_nor_numba_nor_what_makes_pages(command: str) -> None:
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {command}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "ckptz" in loaded
    assert not loaded & {"torch", "numba", "jinja2", "vl_convert"}


def test_the_changelog_opens_with_this_version_and_its_format() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    version, *sections = re.findall(r"^(?:### )?\[?([\w.]+)", newest, re.MULTILINE)[:2]
    assert version == __version__
    assert sections == ["Format"], "what changed in the format comes first"
    assert f"Format version {FORMAT_VERSION}" in newest


def test_the_blas_of_numpy_is_called_where_forks_wait_for_it() -> None:
    """OpenBLAS ends its threads at a fork: a call under way on a thread would never return."""
    products = users_of(lambda node: isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
    assert products | users_of(is_named(*BLAS_NAMES)) == {"ckptz.kernels.blas"}
