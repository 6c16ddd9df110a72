"""The pages for users: their links lead somewhere, and the code of some of them runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptz.methods.table import METHODS
from tests.support.spec_support import ROOT, slug

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)}


def python_of(page: Path) -> str:
    """The Python of a page, one block behind the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_has_its_place(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_every_page_compiles(page: Path) -> None:
    compile(python_of(page), page.name, "exec")


def test_the_method_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        exec(compile(python_of(ROOT / "docs" / "adding-a-method.md"), "page", "exec", dont_inherit=True), names)
    finally:
        METHODS.pop("sign", None)
    weight, restored = names["weight"], names["restored"]
    np.testing.assert_array_equal(restored >= 0, weight >= 0)
    assert set(np.unique(np.abs(restored))) == {np.float32(2.0 * np.abs(weight).mean())}
