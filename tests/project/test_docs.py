"""The pages for users: links have targets, named files and objects exist, and code of some pages runs."""

import ast
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ckptz
from tests.support.spec_support import ROOT, block_with, python_of, slug

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

FRAMEWORKS = ("accelerate", "lightning", "trainer", "transformers")
NEED_A_FRAMEWORK = {f"ckptz.integrations.{name}" for name in FRAMEWORKS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_this_repository_that_a_page_names_exists(page: Path) -> None:
    paths = re.findall(
        r"`((?:ckptz|cli|tests|spec|bench|examples|docs)/[\w./-]+\.\w+)`", page.read_text("utf-8")
    )
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_contributing_describes_every_folder_by_its_docstring() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    folders = sorted((ROOT / "ckptz").glob("*/__init__.py"))
    assert folders
    for path in folders:
        sentence = str(ast.get_docstring(ast.parse(path.read_text("utf-8")))).splitlines()[0]
        assert f"| `{path.parent.name}/` | {sentence} |" in text


def test_readme_page_and_code_have_the_same_promise_about_budgets() -> None:
    promise = (
        "A file whose measured change exceeds its limit is refused: the file is written without loss, and "
        "the exit code is 6."
    )
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/search.md")]
    for text in (*texts, str(ckptz.Budget.__doc__)):
        assert promise in " ".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_every_page_compiles(page: Path) -> None:
    compile(python_of(page), page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_names_in_the_code_of_every_page_exist(page: Path) -> None:
    for node in ast.walk(ast.parse(python_of(page))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "ckptz":
            if node.module in NEED_A_FRAMEWORK:
                continue
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ckptz":
            assert hasattr(ckptz, node.attr), node.attr


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with two checkpoints and an evaluation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)  # a module of other tests
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 96), np.float32)
    for step in (100, 200):
        safetensors.numpy.save_file({"w": weight + np.float32(step)}, f"step-{step}.safetensors")
    (tmp_path / "evaluate.py").write_text("def loss(state):\n    return float(state['w'].abs().mean())\n")
    return tmp_path


def test_the_verbs_of_the_quick_start_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckptz.compress("step-100.safetensors")
    exec(block_with(ROOT / "docs" / "quick-start.md", "(report,) = ckptz.compress"), {})
    assert re.fullmatch(r"\d+\.\dx smaller\n", capsys.readouterr().out)
    assert ckptz.inspect(run / "step-200.ckptz").step == 200


def test_the_search_of_its_page_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    try:
        exec(block_with(ROOT / "docs" / "search.md", "from evaluate import loss"), {})
    finally:
        sys.modules.pop("evaluate", None)
    assert "x smaller {" in capsys.readouterr().out
    [promise] = ckptz.inspect(run / "step-100.ckptz").quality
    assert (promise.max_drop, promise.is_met) == (0.01, True)


# --- frameworks -------------------------------------------------------------------------------------------

ASKED_FOR = (
    *("DeepSpeed", "FSDP1", "Megatron", "torchtitan", "torchtune", "TRL", "Lightning Fabric", "JAX/orbax"),
    *("Keras", "MLX", "vLLM", "diffusers", "GGUF", "W&B", "DVC"),
)


def framework_rows() -> dict[str, list[str]]:
    """Return status, way and example of each framework in the table of the page."""
    text = (ROOT / "docs" / "frameworks.md").read_text("utf-8")
    section = text.split("## Which frameworks")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: [cell.strip(" |") for cell in row[1:]] for row in rows[1:]}


def test_every_framework_has_its_row() -> None:
    rows = framework_rows()
    assert set(ASKED_FOR) <= set(rows)
    assert {row[0] for row in rows.values()} == {"supported", "by restoring first", "planned", "never"}


@pytest.mark.parametrize("name", [name for name, row in framework_rows().items() if row[0] == "supported"])
def test_every_supported_framework_has_an_example_that_tests_run(name: str) -> None:
    match = re.search(r"\(\.\./examples/(\w+\.py)\)", framework_rows()[name][-1])
    assert match, "no example"
    modules = (path for path in (ROOT / "tests").rglob("test_*.py") if path.stem != "test_docs")
    tests = [path.read_text("utf-8") for path in modules]
    assert any(f'"{match[1]}"' in test and '"examples"' in test for test in tests), "no test runs it"
