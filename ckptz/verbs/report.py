"""`ckptz report`: one page that shows checkpoints to people, of the very numbers that `--json` prints."""

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
from ckptz.foreign.inputs import PathLike, check_target, file_path, open_input, output_context, to_paths
from ckptz.format.publish import publish
from ckptz.format.sources import TensorSource
from ckptz.parallel import SILENT, Progress
from ckptz.search.budget import SearchReport
from ckptz.store.resolve import SUFFIX
from ckptz.verbs.diff import NUMBERS, DiffReport, diff
from ckptz.verbs.log import LogReport, inspect, log
from ckptz.verbs.page import MARK, page

Tell = Callable[[Exception], None]
T = TypeVar("T")
MAX_DOCUMENT_BYTES: Final = 64 << 20  # of the JSON of a search
MAX_FILES, MAX_HISTOGRAMS, N_BINS = 8, 30, 60  # of a run's newest step, of a file, of a histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHistogram:
    """The spread of one tensor's values."""

    file: str  # that has the tensor
    tensor: str  # its name
    low: float  # smallest
    high: float  # largest
    counts: tuple[int, ...]  # values in each of equal parts between them; the last part has its upper end
    n_not_finite: int  # infinities and NaN, which are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedFile:
    """One output of a `compress` with a budget, as its report tells it."""

    output: str = ""  # file that was written
    search: SearchReport | None = None  # how its configuration was found


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """The reports that one page shows, as the other verbs make them."""

    output: str | None  # page that was written, or None
    paths: tuple[str, ...]  # what was asked for
    runs: tuple[LogReport, ...]  # one of each folder
    files: tuple[InspectReport, ...]  # of each file that was named, and of the newest step of each folder
    diff: DiffReport | None  # of two files
    searches: tuple[SearchedFile, ...]  # with trials
    histograms: tuple[TensorHistogram, ...]  # of the tensors that were asked for
    problems: tuple[str, ...]  # files that cannot be read, and bases that are missing

    @property
    def html(self) -> str:
        """The whole page as HTML text."""
        return page(self)

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own."""
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
    tell: Tell | None = None,
    progress: Progress = SILENT,
) -> PageReport:
    """Make a page of checkpoints: sizes over a run, where the bytes are, what was lost, every tensor.

    Only indices and headers are read, but for histograms and for the comparison of two files.

    Args:
        paths_: one or several. Of a folder the page shows the run, and its newest step from inside; of a
            `.ckptz` file the inside; of two files, which may be of other formats, also what changed; of a
            `.json` file that `ckptz compress --json` printed the trials of its searches.
        output: where the page goes; without, it is only returned.
        histograms: names of tensors, with * and ?, whose values to decode and to count; those of a
            Checkpointer's files are the model's own, too.
        search_path: folders to look for bases in, after each file's own.
        force: replace an output that is no such page. Pages are replaced anyway.
        jobs: threads, all cores by default.
        tell: is given the error of every file that cannot be read.
        progress: is told of the bytes that are compared.

    Raises:
        ConfigError: a library that makes pages is missing, or a path is nothing that can be shown.
        FileNotFoundError: no such path.
        FormatError: one file was named, and it is damaged.
    """
    if not (find_spec("jinja2") and find_spec("vl_convert")):
        needed = "a report is made with jinja2 and vl-convert-python"
        raise ConfigError(f"{needed}; install them with: pip install 'ckptz[report]'")
    given = [paths_] if isinstance(paths_, str | Path) or not isinstance(paths_, Sequence) else paths_
    folders, named, documents = _by_kind(to_paths(given))
    page = None if output is None else file_path(output)
    if page is not None:
        _check_output(page, named, force)
    problems: list[str] = []

    def note(error: Exception) -> None:
        (tell or (lambda error: None))(error)
        problems.append(str(error))

    search_path = to_paths(search_path)
    runs = [log(folder, search_path=search_path, tell=note) for folder in folders]
    inside = [path for path in named if path.suffix == SUFFIX]
    inside += [path for folder, run in zip(folders, runs, strict=True) for path in _newest(folder, run)]
    noted = None if len(named) == 1 and not folders else note
    inspected = [_tried(noted, inspect, path, search_path=search_path) for path in dict.fromkeys(inside)]
    how = {"jobs": jobs, "search_path": search_path, "progress": progress}
    made = PageReport(
        output=None if output is None else str(output),
        paths=tuple(map(str, given)),
        runs=tuple(runs),
        files=tuple(filter(None, inspected)),
        diff=_tried(note, diff, *named, **how) if len(named) == 2 else None,
        searches=tuple(_searches(documents)),
        histograms=tuple(_histograms(histograms, [*inside, *named], search_path)),
        problems=tuple(problems),
    )
    if page is not None:
        shown = [*inside, *named, *documents]
        shown += [path / e.file for path, run in zip(folders, runs, strict=True) for e in run.entries]
        like = [path for path in shown if path.exists()]
        with output_context(page), publish(page, like) as file:
            file.write(made.html.encode())
    return made


def _tried(note: Tell | None, verb: Callable[..., T], *files: Path, **how: Any) -> T | None:
    """Return the report of a verb; errors become notes, or are raised without `note`."""
    try:
        return verb(*files, **how)
    except (CkptzError, OSError) as error:
        if note is None:
            raise
        note(error)
    return None


def _check_output(output: Path, read: Sequence[Path], force: bool) -> None:
    """Refuse to replace anything but a page."""
    if not force and output.is_file():
        with output.open("rb") as file:
            force = file.read(len(MARK)) == MARK.encode()
    check_target(output, read, force=force)


def _by_kind(given: Sequence[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Sort paths into folders, files of tensors, and documents."""
    for path in given:
        path.stat()  # says so where nothing is there
    folders = [path for path in given if path.is_dir()]
    documents = [path for path in given if path.suffix == ".json" and path not in folders]
    files = [path for path in given if path not in (*folders, *documents)]
    plain = [path for path in files if path.suffix != SUFFIX]
    if plain and len(files) != 2:
        raise ConfigError(f"{plain[0]}: is no .ckptz file; to compare it, give one other file with it")
    return folders, files, documents


def _newest(folder: Path, run: LogReport) -> list[Path]:
    """Return the largest files of a run's newest step; of a folder without steps the last file."""
    kinds = ("full", "delta", "rebased")
    own = [e for e in run.entries if e.kind in kinds and not (e.is_hidden or Path(e.file).is_absolute())]
    step = max((e.step for e in own if e.step is not None), default=None)
    last = own[-1:] if step is None else [e for e in own if e.step == step]
    return sorted(folder / e.file for e in sorted(last, key=lambda e: -e.tensor_bytes)[:MAX_FILES])


# --- how values are spread ----------------------------------------------------------------------


def _histograms(
    names: Sequence[str], files: Sequence[Path], where: Sequence[Path]
) -> Iterator[TensorHistogram]:
    """Count values of the tensors that were asked for.

    Raises:
        ConfigError: no tensor has such a name.
    """
    wanted, n = [pattern for p in names for pattern in (p, f"model.{p}")], 0  # as a Checkpointer calls it
    for path in dict.fromkeys(files) if names else ():
        with contextlib.closing(open_input(path, where)) as file:
            chosen = [name for name in file.tensors if any(fnmatchcase(name, p) for p in wanted)]
            n += len(chosen)
            for name in chosen[:MAX_HISTOGRAMS]:
                yield from _spread(file.name, name, file.tensors[name])
    if names and not n:
        raise ConfigError(f"no tensor is named {' or '.join(names)}; ckptz inspect --tensors lists the names")


def _spread(file: str, name: str, source: TensorSource) -> Iterator[TensorHistogram]:
    """Count the values of a tensor, chunk by chunk; nothing of one that has no numbers."""
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
    """Read the searches of documents.

    Raises:
        FormatError: one is no such document, or has no search in it.
    """
    for path in documents:
        searched: list[SearchedFile] = []
        if path.stat().st_size <= MAX_DOCUMENT_BYTES:
            with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                printed = msgspec.json.decode(path.read_bytes(), type=_Document)
                searched = [file for file in printed.files if file.search is not None]
        if not searched:
            raise FormatError(f"{path}: no search in it; give what ckptz compress --eval ... --json printed")
        yield from searched
