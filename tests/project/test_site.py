"""The site: every public name has a page and a docstring, and every error a remedy."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptz.errors
from ckptz._version import __version__
from ckptz.errors import CkptzError
from tests.support.spec_support import ROOT

API = sorted((ROOT / "docs" / "api").glob("*.md"))
MODULES = (
    *("ckptz", "ckptz.torch", "ckptz.numpy", "ckptz.hooks", "ckptz.sync", "ckptz.wire", "ckptz.errors"),
    *(f"ckptz.integrations.{name}" for name in ("accelerate", "dcp", "lightning", "loggers", "trainer")),
    "ckptz.integrations.transformers",
)
ERRORS = [c for c in vars(ckptz.errors).values() if isinstance(c, type) and issubclass(c, CkptzError)]


def source_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text("utf-8"))


def public_names(module: str) -> list[str]:
    """List the names in `__all__` of a module, or else its classes with a capital letter."""
    tree = tree_of(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name != "__version__"]
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0].isupper()]


Home = tuple[str, ast.ClassDef | ast.FunctionDef]


def home_of(module: str, name: str) -> Home | None:
    """Return a class or function of ckptz and the module that defines it, or None for anything else."""
    tree = tree_of(module)
    for node in ast.walk(tree):
        is_import = isinstance(node, ast.ImportFrom) and str(node.module).startswith("ckptz")
        if is_import and name in {alias.asname or alias.name for alias in node.names}:
            return home_of(node.module, name)
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
    return (module, nodes[0]) if nodes else None


def methods_of(home: Home | None) -> Iterator[ast.FunctionDef]:
    """Yield the public methods of a class, then those of its bases."""
    if home is None or not isinstance(home[1], ast.ClassDef):
        return
    yield from (n for n in home[1].body if isinstance(n, ast.FunctionDef) and n.name[0] != "_")
    for base in home[1].bases:
        yield from methods_of(home_of(home[0], ast.unparse(base)))


def undocumented(home: Home) -> list[str]:
    """List a class or function without a docstring, and its methods without one in a base either."""
    methods = list(methods_of(home))
    documented = {method.name for method in methods if ast.get_docstring(method)}
    nodes = (home[1], *methods)
    return [n.name for n in nodes if not ast.get_docstring(n) and n.name not in documented]


NAMES = [(module, name) for module in MODULES for name in public_names(module)]


def test_every_public_name_has_a_page_and_nothing_else_has() -> None:
    documented = re.findall(
        r"^::: (ckptz\S*)", "\n".join(page.read_text("utf-8") for page in API), re.MULTILINE
    )
    assert sorted(documented) == sorted(f"{module}.{name}" for module, name in NAMES)


def test_modules_with_public_names_are_all_listed() -> None:
    for pattern in ("*.py", "*/__init__.py", "integrations/*.py"):
        for path in (ROOT / "ckptz").glob(pattern):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            assert "\n__all__ = " not in path.read_text("utf-8") or module in MODULES


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda part: part)
def test_every_public_name_has_a_docstring(module: str, name: str) -> None:
    home = home_of(module, name)
    assert home is None or undocumented(home) == []


def test_a_missing_docstring_is_noticed() -> None:
    tree = ast.parse('class A:\n  """A."""\n  def f(self): ...\n  def _g(self): ...\ndef b(): ...')
    assert [undocumented(("m", node)) for node in tree.body] == [["f"], ["b"]]


def test_every_error_has_its_remedy_and_its_exit_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| [^|]* \|([^|]*)\|$", page, re.MULTILINE))
    assert len(ERRORS) > 10
    for error in ERRORS:
        assert len(re.findall(rf"^### {error.__name__}\n\n\w", page, re.MULTILINE)) == 1
        below_another = f"[{error.__name__}]" not in page and issubclass(error, ckptz.errors.FormatError)
        assert below_another or error.__name__ in rows[str(error.exit_code)]


# --- files for others ---------------------------------------------------------------------------


def test_the_workflow_runs_what_ci_runs_on_every_system() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]["all"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert {name.split("-")[0] for name in job["strategy"]["matrix"]["os"]} == {"ubuntu", "macos", "windows"}
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        assert {"name", "description", "body"} <= set(yaml.safe_load(form.read_text()))


def test_the_citation_names_the_version_and_both_papers() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["cff-version"], cited["version"]) == ("1.2.0", __version__)
    papers = {identifier["value"] for paper in cited["references"] for identifier in paper["identifiers"]}
    assert papers == {"arXiv:2306.11800", "arXiv:2401.07788"}


def test_the_figures_of_the_pages_are_those_of_the_results() -> None:
    report, summary = (pytest.importorskip(f"bench.core.{name}") for name in ("report", "summary"))
    rows = summary.readme_rows(summary.read_rows("demo"))
    assert [{name: str(value) for name, value in row.items()} for row in rows] == summary.read_rows("readme")
    for page in report.PAGES:
        text = page.read_text("utf-8")
        assert report.rendered(text) == text, page


# --- the hook of mkdocs -------------------------------------------------------------------------


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> object:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "site_files", raising=False)
    import site_files

    return site_files


def test_links_are_converted_for_the_site(hook: object) -> None:
    class Page:
        def __init__(self, path: str) -> None:
            self.file = self
            self.src_uri = path

    def converted(path: str, link: str) -> str:
        return hook.on_page_markdown(f"[a]({link})", page=Page(path))

    assert converted("index.md", "docs/search.md") == "[a](search.md)"
    assert (
        converted("search.md", "../spec/README.md#the-ckptz-format") == "[a](spec/README.md#the-ckptz-format)"
    )
    assert converted("search.md", "../README.md") == "[a](index.md)"
    assert converted("spec/05-frame.md", "../docs/glossary.md") == "[a](../glossary.md)"
    assert converted("search.md", "https://a.b/c.md") == "[a](https://a.b/c.md)"
    assert converted("search.md", "#more") == "[a](#more)"


@pytest.mark.parametrize(
    "tag", ['<script src="https://a.b/c.js">', '<link rel="stylesheet" href=//a.b/c.css>']
)
def test_a_page_that_loads_from_the_network_is_refused(hook: object, tag: str) -> None:
    from mkdocs.exceptions import PluginError

    class Page:
        class file:
            src_uri = "a.md"

    with pytest.raises(PluginError, match=r"a\.md: loads from the network"):
        hook.on_post_page(tag, page=Page)
    assert hook.on_post_page('<a href="https://a.b">', page=Page)


@pytest.mark.parametrize(
    ("html", "message"),
    [
        ("<td><code>Sentinel.UNSET</code></td>", ""),
        ("<td>Sentinel.UNSET</td>", "shows a placeholder of click"),
        ('<h3 id="ckptz.Checkpointer.save" class="doc">', ""),
        ('<h3 id="ckptz.Grid.recipe" class="doc">', "shows recipe, which it does not name"),
    ],
)
def test_a_page_with_placeholders_or_internals_is_refused(hook: object, html: str, message: str) -> None:
    from mkdocs.exceptions import PluginError

    class Page:
        markdown = "::: ckptz.Checkpointer\n    options: { members: [save, wait] }\n"

        class file:
            src_uri = "a.md"

    if not message:
        assert "Sentinel" not in hook.on_page_content(html, page=Page)
        return
    with pytest.raises(PluginError, match=message):
        hook.on_page_content(html, page=Page)
