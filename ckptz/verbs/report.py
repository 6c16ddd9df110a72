"""`ckptz report`: an HTML page about checkpoints, from the same numbers that `--json` prints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptz.api.describe import InspectReport
from ckptz.errors import CkptzError, ConfigError, FormatError
from ckptz.foreign.inputs import open_input
from ckptz.format.publish import publish
from ckptz.format.sources import TensorSource
from ckptz.format.suffixes import SUFFIX
from ckptz.parallel import SILENT, Progress
from ckptz.run.step_files import MODEL_PREFIX
from ckptz.search.budget import SearchReport
from ckptz.verbs.diff import NUMBERS, DiffReport, diff
from ckptz.verbs.log import LogReport, inspect, log
from ckptz.verbs.page import MARK, page
from ckptz.verbs.paths import PathLike, check_target, file_path, output_context, to_paths

OnError = Callable[[Exception], None]
T = TypeVar("T")
MAX_DOCUMENT_BYTES: Final = 64 << 20  # largest JSON report of a search that is read
MAX_FILES: Final = 8  # files of the newest step of a run that the page describes
MAX_HISTOGRAMS, N_BINS = 30, 60  # histograms of a file; bins of a histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHistogram:
    """Histogram of the values of one tensor."""

    file: str  # file of the tensor
    tensor: str  # name of the tensor
    low: float  # smallest finite value
    high: float  # largest finite value
    counts: tuple[int, ...]  # values in bins of equal width from `low` to `high`, both included
    n_not_finite: int  # infinities and NaN, which no bin counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedFile:
    """One output of a `compress` with a budget."""

    output: str = ""  # file that was written
    search: SearchReport | None = None  # trials and result of the search


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """The reports of other verbs that one page shows."""

    output: str | None  # page that was written, or None
    paths: tuple[str, ...]  # paths that the caller named
    runs: tuple[LogReport, ...]  # one for each folder
    files: tuple[InspectReport, ...]  # one for each named file, and for files of each folder's newest step
    diff: DiffReport | None  # comparison, if two files were named
    searches: tuple[SearchedFile, ...]  # searches of the named .json files
    histograms: tuple[TensorHistogram, ...]  # one for each selected tensor
    problems: tuple[str, ...]  # unreadable files and missing bases

    @property
    def html(self) -> str:
        """The whole page as HTML text."""
        return page(self)

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in an iframe."""
        frame = 'title="ckptz report" width="100%" height="720" sandbox="allow-scripts allow-downloads"'
        return f'<iframe {frame} srcdoc="{escape(self.html)}"></iframe>'


def report(
    paths_: PathLike | Sequence[PathLike] = ".",
    output: PathLike | None = None,
    *,
    histograms: Sequence[str] = (),
    search_path: Sequence[PathLike] = (),
    force: bool = False,
    jobs: int | None = None,
    on_error: OnError | None = None,
    progress: Progress = SILENT,
) -> PageReport:
    """Write an HTML page about checkpoints: sizes over a run, bytes and errors of each tensor.

    Only indices and headers are read, except for histograms and for a comparison of two files.

    Args:
        paths_: one or several paths. A folder is shown as a run, with details of its newest step; a `.ckptz`
            file with details; two files, which may have other formats, also as a comparison; a `.json` file
            from `ckptz compress --json` as the trials of its searches.
        output: file of the page; None returns it without writing.
        histograms: names of tensors to decode for histograms, with the wildcards * and ?; files of a
            Checkpointer accept the names of the model too.
        search_path: more folders to search for bases, after the folder of each file.
        force: replace an existing output that is no report page. Report pages are always replaced.
        jobs: number of threads, by default one for each core.
        on_error: called with the error of every unreadable file.
        progress: receives the number of bytes compared.

    Returns:
        The page and all reports that it shows.

    Raises:
        ConfigError: a library for report pages is missing, or a path cannot be shown.
        FileNotFoundError: no such path.
        FormatError: only one file was named, and it is damaged.
    """
    if not (find_spec("jinja2") and find_spec("vl_convert")):
        needed = "reports need jinja2 and vl-convert-python"
        raise ConfigError(f"{needed}; install them with: pip install 'ckptz[report]'")
    sources = [paths_] if isinstance(paths_, str | Path) or not isinstance(paths_, Sequence) else paths_
    folders, tensor_files, documents = _by_kind(to_paths(sources))
    page = None if output is None else file_path(output)
    if page is not None:
        _check_output(page, tensor_files, force)
    problems: list[str] = []

    def note(error: Exception) -> None:
        if on_error is not None:
            on_error(error)
        problems.append(str(error))

    search_path = to_paths(search_path)
    runs = [log(folder, search_path=search_path, on_error=note) for folder in folders]
    ckptz_files = [path for path in tensor_files if path.suffix == SUFFIX]
    ckptz_files += [path for folder, run in zip(folders, runs, strict=True) for path in _newest(folder, run)]
    note_or_raise = None if len(tensor_files) == 1 and not folders else note
    inspected = [
        _try(note_or_raise, inspect, path, search_path=search_path) for path in dict.fromkeys(ckptz_files)
    ]
    diff_options = {"jobs": jobs, "search_path": search_path, "progress": progress}
    result = PageReport(
        output=None if output is None else str(output),
        paths=tuple(map(str, sources)),
        runs=tuple(runs),
        files=tuple(filter(None, inspected)),
        diff=_try(note, diff, *tensor_files, **diff_options) if len(tensor_files) == 2 else None,
        searches=tuple(_searches(documents)),
        histograms=tuple(_histograms(histograms, [*ckptz_files, *tensor_files], search_path)),
        problems=tuple(problems),
    )
    if page is not None:
        shown = [*ckptz_files, *tensor_files, *documents]
        shown += [path / e.file for path, run in zip(folders, runs, strict=True) for e in run.entries]
        like = [path for path in shown if path.exists()]
        with output_context(page), publish(page, like) as file:
            file.write(result.html.encode())
    return result


def _try(note: OnError | None, verb: Callable[..., T], *files: Path, **diff_options: Any) -> T | None:
    """Return the report of a verb; with `note`, pass errors to it and return None instead of raising."""
    try:
        return verb(*files, **diff_options)
    except (CkptzError, OSError) as error:
        if note is None:
            raise
        note(error)
    return None


def _check_output(output: Path, read: Sequence[Path], force: bool) -> None:
    """Refuse to replace a file that is no report page."""
    if not force and output.is_file():
        with output.open("rb") as file:
            force = file.read(len(MARK)) == MARK.encode()
    check_target(output, read, force=force)


def _by_kind(sources: Sequence[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Sort paths into folders, files of tensors, and documents."""
    for path in sources:
        path.stat()  # raises FileNotFoundError if nothing exists
    folders = [path for path in sources if path.is_dir()]
    documents = [path for path in sources if path.suffix == ".json" and path not in folders]
    files = [path for path in sources if path not in (*folders, *documents)]
    plain = [path for path in files if path.suffix != SUFFIX]
    if plain and len(files) != 2:
        raise ConfigError(f"{plain[0]}: not a .ckptz file; to compare it, name exactly one other file")
    return folders, files, documents


def _newest(folder: Path, run: LogReport) -> list[Path]:
    """Return the largest files of a run's newest step, or the last file of a folder without steps."""
    kinds = ("full", "delta", "rebased")
    entries = [e for e in run.entries if e.kind in kinds and not (e.is_hidden or Path(e.file).is_absolute())]
    step = max((e.step for e in entries if e.step is not None), default=None)
    last = entries[-1:] if step is None else [e for e in entries if e.step == step]
    return sorted(folder / e.file for e in sorted(last, key=lambda e: -e.tensor_bytes)[:MAX_FILES])


# --- histograms ---------------------------------------------------------------------------------


def _histograms(
    names: Sequence[str], files: Sequence[Path], search_path: Sequence[Path]
) -> Iterator[TensorHistogram]:
    """Yield the histograms of the tensors that match a name.

    Raises:
        ConfigError: no tensor matches.
    """
    wildcards = [pattern for p in names for pattern in (p, f"{MODEL_PREFIX}{p}")]
    n = 0
    for path in dict.fromkeys(files) if names else ():
        with contextlib.closing(open_input(path, search_path)) as file:
            chosen = [name for name in file.tensors if any(fnmatchcase(name, p) for p in wildcards)]
            n += len(chosen)
            for name in chosen[:MAX_HISTOGRAMS]:
                yield from _histogram(file.name, name, file.tensors[name])
    if names and not n:
        raise ConfigError(f"no tensor is named {' or '.join(names)}; ckptz inspect --tensors lists the names")


def _histogram(file: str, name: str, source: TensorSource) -> Iterator[TensorHistogram]:
    """Yield the histogram of a tensor, computed chunk by chunk; none for tensors without finite numbers."""
    if source.dtype.name not in NUMBERS:
        return
    low, high, n_finite = np.inf, -np.inf, 0
    for values in _finite_values(source):
        n_finite += len(values)
        low = min(low, float(values.min(initial=np.inf)))
        high = max(high, float(values.max(initial=-np.inf)))
    if not np.isfinite(high - low):
        return
    counts = np.zeros(N_BINS, np.int64)
    for values in _finite_values(source):
        counts += np.histogram(values, N_BINS, (low, high))[0]
    n_not_finite, n_in_bins = source.n_patterns - n_finite, tuple(counts.tolist())
    yield TensorHistogram(
        file=file, tensor=name, low=low, high=high, counts=n_in_bins, n_not_finite=n_not_finite
    )


def _finite_values(source: TensorSource) -> Iterator[NDArray[np.float64]]:
    for begin, end in source.chunk_bounds():
        values = NUMBERS[source.dtype.name](source.patterns(begin, end)).astype(np.float64)
        yield values[np.isfinite(values)]


# --- searches -----------------------------------------------------------------------------------


class _Document(msgspec.Struct):
    """The JSON that `ckptz compress --json` prints."""

    files: tuple[SearchedFile, ...] = ()


def _searches(documents: Sequence[Path]) -> Iterator[SearchedFile]:
    """Read the searches from JSON reports.

    Raises:
        FormatError: a file is no such report, or contains no search.
    """
    for path in documents:
        searched: list[SearchedFile] = []
        if path.stat().st_size <= MAX_DOCUMENT_BYTES:
            with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                printed = msgspec.json.decode(path.read_bytes(), type=_Document)
                searched = [file for file in printed.files if file.search is not None]
        if not searched:
            raise FormatError(
                f"{path}: contains no search; name a file that ckptz compress --eval ... --json printed"
            )
        yield from searched
