"""`ckptz report`: one page that shows checkpoints to people, of the very numbers that `--json` prints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptz.codec.units import TensorSource
from ckptz.commands.compress import CompressReport
from ckptz.commands.diff import NUMBERS, DiffReport, diff
from ckptz.commands.inspect import InspectReport, inspect
from ckptz.commands.log import LogReport, log
from ckptz.container.publish import publish
from ckptz.errors import CkptzError, ConfigError, FormatError
from ckptz.formats.inputs import open_input
from ckptz.formats.targets import PathLike, check_target, file_path, naming_output, paths
from ckptz.pages.charts import loaded
from ckptz.pages.html import el
from ckptz.pages.page import MARK, page
from ckptz.progress import SILENT, Progress
from ckptz.search_run.options import SearchReport
from ckptz.store.resolve import SUFFIX

Tell = Callable[[Exception], None]
MAX_DOCUMENT_BYTES: Final = 64 << 20  # of the JSON of a search
MAX_HISTOGRAMS: Final = 200  # of one report
N_BINS: Final = 60
NOTEBOOK_HEIGHT: Final = 720  # pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The spread of one tensor's values, or of their changes from A to B."""

    file: str  # that has the tensor; of changes B
    tensor: str  # its name
    what: str  # "values" or "changes"
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
    histograms: tuple[Histogram, ...]  # of the tensors that were asked for
    problems: tuple[str, ...]  # files that cannot be read, and bases that are missing

    @property
    def html(self) -> str:
        """The whole page as HTML text."""
        return page(msgspec.to_builtins(self))

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own."""
        frame = {"width": "100%", "height": NOTEBOOK_HEIGHT, "style": "border:0"}
        allowed = "allow-scripts allow-downloads"
        return el("iframe", srcdoc=self.html, title="ckptz report", sandbox=allowed, **frame)


def report(
    paths_: PathLike | Sequence[PathLike] = ".",
    output: PathLike | None = None,
    *,
    searches: Sequence[CompressReport] = (),
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
        searches: reports of `compress` with a budget, to show what was tried.
        histograms: names of tensors, with * and ?, whose values to decode and to count.
        search_path: folders to look for bases in, after each file's own.
        force: replace an output that is no such page. Pages are replaced anyway.
        jobs: threads, all cores by default.
        tell: is given the error of every file that cannot be read.
        progress: is told of the bytes that are compared.

    Raises:
        ConfigError: the library that draws is missing, or a path is nothing that can be shown.
        FileNotFoundError: no such path.
        FormatError: one file was named, and it is damaged.
    """
    loaded()
    given = [paths_] if isinstance(paths_, str | Path) or not isinstance(paths_, Sequence) else paths_
    folders, files, documents = _by_kind(paths(given))
    if output is not None:
        _check_output(file_path(output), files, force)
    made = _Maker(files, paths(search_path), tell or (lambda error: None))
    compared = made.compared(jobs, progress)
    searched = [SearchedFile(output=one.output, search=one.search) for one in searches if one.search]
    found = PageReport(
        output=None if output is None else str(output),
        paths=tuple(map(str, given)),
        runs=tuple(map(made.run, folders)),
        files=tuple(made.files(is_alone=len(files) == 1 and not folders)),
        diff=compared,
        searches=(*_searches(documents), *searched),
        histograms=tuple(made.histograms(histograms)),
        problems=tuple(made.problems),
    )
    if output is not None:
        with naming_output(Path(output)), publish(output) as file:
            file.write(found.html.encode())
    return found


def _check_output(output: Path, read: Sequence[Path], force: bool) -> None:
    """Refuse to replace anything but a page."""
    if not force and output.is_file():
        with output.open("rb") as file:
            force = file.read(len(MARK)) == MARK.encode()
    check_target(output, read, force=force)


def _by_kind(given: Sequence[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Folders, files of tensors, and documents."""
    folders = [path for path in given if path.is_dir()]
    others = [path for path in given if not path.is_dir()]
    documents = [path for path in others if path.suffix == ".json"]
    files = [path for path in others if path.suffix != ".json"]
    plain = [path for path in files if path.suffix != SUFFIX]
    if plain and len(files) != 2:
        plain[0].stat()  # says so where nothing is there
        raise ConfigError(f"{plain[0]}: is no .ckptz file; to compare it, give one other file with it")
    return folders, files, documents


# --- what was read ------------------------------------------------------------------------------


class _Maker:
    """Reads what was asked for, and keeps what went wrong."""

    def __init__(self, named: list[Path], search_path: Sequence[Path], tell: Tell) -> None:
        self._named, self._search_path, self._tell = named, search_path, tell
        self._inside: list[Path] = [path for path in named if path.suffix == SUFFIX]
        self.problems: list[str] = []

    def _note(self, error: Exception) -> None:
        self._tell(error)
        self.problems.append(str(error))

    def run(self, folder: Path) -> LogReport:
        """Describe a folder; its newest step is looked into later."""
        found = log(folder, search_path=self._search_path, tell=self._note)
        here = [e for e in found.entries if e.kind in ("anchor", "delta", "rebased")]
        own = [e for e in here if (folder / e.file).parent == folder]
        newest = max(((e.step is not None, e.step or 0) for e in own), default=None)
        last = [folder / e.file for e in own if (e.step is not None, e.step or 0) == newest]
        self._inside += sorted(last) if newest and newest[0] else sorted(last)[-1:]
        return found

    def files(self, *, is_alone: bool) -> Iterator[InspectReport]:
        """Look into files; a damaged one is told of, and raises only if it was asked for alone."""
        for path in dict.fromkeys(self._inside):
            try:
                yield inspect(path, search_path=self._search_path)
            except (CkptzError, OSError) as error:
                if is_alone:
                    raise
                self._note(error)

    def compared(self, jobs: int | None, progress: Progress) -> DiffReport | None:
        """Compare two files."""
        if len(self._named) != 2:
            return None
        try:
            return diff(*self._named, jobs=jobs, search_path=self._search_path, progress=progress)
        except CkptzError as error:
            self._note(error)
            return None

    def histograms(self, patterns: Sequence[str]) -> Iterator[Histogram]:
        """Count values of the tensors that were asked for, and of two files the changes.

        Raises:
            ConfigError: no tensor has such a name.
        """
        files = list(dict.fromkeys([*self._inside, *self._named])) if patterns else []
        n = 0
        with contextlib.ExitStack() as held:
            opened = [held.enter_context(contextlib.closing(open_input(f, self._search_path))) for f in files]
            first = opened[0].tensors if opened and len(self._named) == 2 else {}
            for file in opened:
                wanted = [name for name in file.tensors if any(fnmatchcase(name, p) for p in patterns)]
                for name in wanted[: MAX_HISTOGRAMS - n]:
                    n += 1
                    yield from _spread(file.name, name, file.tensors[name], None)
                    before = first.get(name)
                    if before is not None and before is not file.tensors[name]:
                        yield from _spread(file.name, name, file.tensors[name], before)
        if patterns and not n:
            raise ConfigError(
                f"no tensor is named {' or '.join(patterns)}; ckptz inspect --tensors lists the names"
            )


# --- how values are spread ----------------------------------------------------------------------


def _spread(file: str, name: str, source: TensorSource, before: TensorSource | None) -> Iterator[Histogram]:
    """Count the values of a tensor, or its changes; nothing of what has no numbers or has other shapes."""
    sources = [source] if before is None else [source, before]
    if any(s.dtype.name not in NUMBERS or tuple(s.shape) != tuple(source.shape) for s in sources):
        return
    low, high, n_finite = np.inf, -np.inf, 0
    for values in _finite_values(sources):
        n_finite += len(values)
        low, high = min(low, values.min(initial=np.inf)), max(high, values.max(initial=-np.inf))
    if not np.isfinite(high - low):
        return
    counts = np.zeros(N_BINS, np.int64)
    for values in _finite_values(sources):
        counts += np.histogram(values, N_BINS, (low, high))[0]
    yield Histogram(
        file=file,
        tensor=name,
        what="values" if before is None else "changes",
        low=float(low),
        high=float(high),
        counts=tuple(counts.tolist()),
        n_not_finite=source.n_units - n_finite,
    )


def _finite_values(sources: Sequence[TensorSource]) -> Iterator[NDArray[np.float64]]:
    """Decode chunk by chunk; of two sources the first less the second, in float64, only what is finite."""
    for begin, end in sources[0].chunk_bounds():
        decoded = [NUMBERS[s.dtype.name](s.units(begin, end)).astype(np.float64) for s in sources]
        with np.errstate(all="ignore"):
            values = decoded[0] - decoded[1] if len(decoded) > 1 else decoded[0]
        yield values[np.isfinite(values)]


# --- searches -----------------------------------------------------------------------------------


class _Document(msgspec.Struct):
    """What `ckptz compress --json` prints."""

    files: tuple[SearchedFile, ...] = ()


def _searches(documents: Sequence[Path]) -> Iterator[SearchedFile]:
    """Read the searches of documents.

    Raises:
        FormatError: one is no such document, or has no search in it.
    """
    for path in documents:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            most = f"{MAX_DOCUMENT_BYTES >> 20} MiB"
            raise FormatError(f"{path}: over {most}; give what ckptz compress --json printed")
        try:
            printed = msgspec.json.decode(path.read_bytes(), type=_Document)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise FormatError(f"{path}: not what ckptz compress --json prints: {error}") from None
        found = [file for file in printed.files if file.search is not None]
        if not found:
            raise FormatError(f"{path}: no search in it; give what ckptz compress --eval ... --json printed")
        yield from found
