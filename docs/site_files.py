"""Hook of mkdocs: pages that stand elsewhere in the repository become pages of the site; links follow.

A page keeps its path in the repository, less a leading `docs/`, and README.md becomes the first page. So a
link is written once, as it works in the repository, and means the same on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
ELSEWHERE: Final = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "examples/*.py"),
    *("spec/**/*.md", "spec/*/*.py", "spec/vectors/manifest.json", "bench/README.md", "bench/results/*"),
)
LINK: Final = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")
PAIR: Final = re.compile(r"(```.*?```|`[^`]*`)|\]\[", re.DOTALL)  # T[r][c], which Markdown takes for a link
MEMBERS: Final = re.compile(r"members: \[(.*?)\]")
SHOWN: Final = re.compile(r"""<h3 id="ckptz[\w.]*\.(\w+)\"""")  # members of classes
LOADED: Final = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def _place(path: str) -> str:
    """Return the place of a repository file on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _origin(place: str) -> str:
    """Undo `_place`."""
    if place == "index.md":
        return "README.md"
    return place if (ROOT / place).exists() else f"docs/{place}"


def on_files(files: Files, config: Any) -> Files:
    """Add what stands outside of docs/."""
    for path in sorted({path for pattern in ELSEWHERE for path in ROOT.glob(pattern) if path.is_file()}):
        where = _place(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, where, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links to repository files to their places on the site."""
    here = _origin(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _place(posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2])))
        return match[1] + posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return PAIR.sub(lambda match: match[1] or "]&#91;", LINK.sub(moved, markdown))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Show options without a default as such: mkdocs-click writes what click has in its place.

    Raises:
        PluginError: the page shows a placeholder of click, or members of a class that it does not name.
    """
    html = html.replace("<code>Sentinel.UNSET</code>", "")
    if "Sentinel" in html:
        raise PluginError(f"{page.file.src_uri}: shows a placeholder of click, Sentinel")
    named = set(re.findall(r"\w+", " ".join(MEMBERS.findall(page.markdown or ""))))
    for name in SHOWN.findall(html):
        if name not in named:
            raise PluginError(f"{page.file.src_uri}: shows {name}, which it does not name among members")
    return html


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would load anything from the network.

    Raises:
        PluginError: one does.
    """
    for tag in LOADED.findall(output):
        if 'rel="canonical"' not in tag:
            raise PluginError(f"{page.file.src_uri}: loads from the network: {tag}")
    return output
