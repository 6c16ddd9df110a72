"""`ckptz compress`: checkpoints of any kind to `.ckptz` files, alone, against a base, or as a chain."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ckptz.codec.units import UnitSource
from ckptz.config import LOSSLESS, Config, Lossless
from ckptz.container.contents import Contents
from ckptz.container.index import BaseRef
from ckptz.container.publish import publish
from ckptz.container.writer import Written, write_container
from ckptz.convert.dcp import dcp_files
from ckptz.convert.guides import GuideFiles, guides_of
from ckptz.convert.inputs import Input, open_input
from ckptz.convert.optimizer import Joined, join, known_roles
from ckptz.convert.progress import SILENT, Progress
from ckptz.convert.searching import SearchOptions, SearchReport, SearchRun, search_and_write
from ckptz.convert.sharding import check_sharding, copy_carried, torch_names
from ckptz.convert.targets import check_carried, check_target, naming_output, places_for
from ckptz.convert.tree import parse_tree
from ckptz.errors import ConfigError, CorruptionError, UnsupportedError, named
from ckptz.parallel import Workers
from ckptz.roles import Rule
from ckptz.store.resolve import SUFFIX, base_file_name, base_ref, open_checkpoint

MAX_WRITTEN_DEPTH: Final = 16  # a restore decodes every member; the next file is an anchor again


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressOptions:
    """How to compress.

    Attributes:
        base: store every input against this `.ckptz` or `.safetensors` file.
        chain: store every input against the one before it, the first against `base` if there is one.
        step: training step to record.
        jobs: threads, all cores by default.
        force: replace existing outputs.
        search_path: folders to look for the base's own bases in.
        config: lossless, or how weights become lossy.
        role_rules: the user's rows of the table of roles.
        optimizer: a file of optimizer state that goes into the same output as the one input.
        read_optimizer: a checkpoint whose second moments guide lossy methods; it is read, not stored.
        calibration: what `ckptz.hooks.Calibration` saved, for the rounding of grids.
        sensitivity: what `ckptz.hooks.SensitivityTracker` saved.
        search: find the configuration for a budget; `config` stays lossless then.
    """

    base: Path | None = None
    chain: bool = False
    step: int | None = None
    jobs: int | None = None
    force: bool = False
    search_path: Sequence[Path] = ()
    config: Config = LOSSLESS
    role_rules: Sequence[Rule] = ()
    optimizer: Path | None = None
    read_optimizer: Path | None = None
    calibration: Path | None = None
    sensitivity: Path | None = None
    search: SearchOptions | None = None

    def __post_init__(self) -> None:
        if self.base is not None and self.base.is_dir():
            raise ConfigError(f"{self.base}: a base is a file; compress the folder and name its .ckptz file")
        if self.search is not None and not isinstance(self.config, Lossless):
            raise ConfigError("a configuration is either given or searched for")
        if self.chain and self.is_dry_run:
            raise ConfigError("a dry run writes no file that the next input could be stored against")
        self.guide_files.check(self.search.template if self.search else self.config)

    @property
    def is_dry_run(self) -> bool:
        """Whether nothing is written."""
        return self.search is not None and self.search.is_dry_run

    @property
    def guide_files(self) -> GuideFiles:
        """The files that guide lossy methods."""
        return GuideFiles(
            read_optimizer=self.read_optimizer, calibration=self.calibration, sensitivity=self.sensitivity
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressReport:
    """What one input became.

    Attributes:
        input: what was read.
        output: what was written.
        n_tensors: tensors in it.
        n_deltas: those that are stored against the base.
        n_lossy: those that do not come back bit for bit.
        tensor_bytes: bytes of all tensors, which ratio is counted from.
        stored_bytes: size of the output.
        ratio: tensor bytes by stored bytes.
        content_id: identity of the values.
        base: file name of the base, or None.
        depth: deltas between the output and its anchor.
        step: training step, if it was given.
        seconds: time taken.
        notes: what the user should know.
        search: how the configuration was found, if it was searched for.
    """

    input: str
    output: str
    n_tensors: int
    n_deltas: int
    n_lossy: int
    tensor_bytes: int
    stored_bytes: int
    ratio: float
    content_id: str
    base: str | None
    depth: int
    step: int | None
    seconds: float
    notes: tuple[str, ...] = ()
    search: SearchReport | None = None


Stamp = tuple[int, int]  # of a file: time of change, size


@dataclass(frozen=True, slots=True)
class _Base:
    """What the next output is stored against: how it is named, and open tensors of the same values."""

    ref: BaseRef
    folder: Path
    tensors: Mapping[str, UnitSource]
    files: Mapping[Path, Stamp]
    close: Callable[[], None]


def compress_files(
    inputs: Sequence[Path],
    output: Path | None = None,
    options: CompressOptions = CompressOptions(),
    progress: Progress = SILENT,
) -> Iterator[CompressReport]:
    """Compress inputs one after another; yields the report of each when its file is published.

    Args:
        inputs: `.safetensors`, torch or `.ckptz` files, or folders of shards.
        output: for one input a file or an existing folder, for several a folder; by default outputs
            stand beside their files and in their folders. A folder's other files are copied along.
        options: everything else.
        progress: is told of each file and of the bytes done.

    Raises:
        FileNotFoundError: an input is missing.
        ConfigError: an output exists or would replace a file that is read.
        FormatError: an input is damaged.
    """
    if len(inputs) > 1 and options.step is not None:
        raise ConfigError("a step belongs to one input; compress them one by one")
    if len(inputs) > 1 and options.optimizer is not None:
        raise ConfigError(f"{options.optimizer}: belongs to one input; compress them one by one")
    places = places_for(inputs, output, SUFFIX)
    if output is not None and len(inputs) > 1:
        output.mkdir(exist_ok=True)
    with Workers(options.jobs) as workers:
        base = None if options.base is None else _open_base(options.base, options.search_path)
        try:
            for source, place in zip(inputs, places, strict=True):
                report, base = _compress(source, place, base, _Run(options, workers, progress))
                yield report
                if report.search is not None and report.search.is_interrupted and source != inputs[-1]:
                    raise KeyboardInterrupt
        finally:
            if base is not None:
                base.close()


@dataclass(frozen=True, slots=True)
class _Run:
    """What all inputs share."""

    options: CompressOptions
    workers: Workers
    progress: Progress


def _stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    """What changes when one of the files is written to."""
    return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}


def _open_base(path: Path, search_path: Sequence[Path]) -> _Base:
    checkpoint = open_checkpoint(path, search_path)
    try:
        stamps = _stamps(Path(file.name) for file in checkpoint.files)
        return _Base(base_ref(checkpoint), path.parent, checkpoint.tensors, stamps, checkpoint.close)
    except BaseException:
        checkpoint.close()
        raise


def _compress(
    source: Path, place: Path, base: _Base | None, run: _Run
) -> tuple[CompressReport, _Base | None]:
    """Write one output; returns its report and the base of the next one."""
    with contextlib.ExitStack() as held:
        opened = held.enter_context(contextlib.closing(open_input(source, run.options.search_path)))
        sources = _files_of(opened, source)
        if run.options.optimizer is not None:
            optimizer = held.enter_context(contextlib.closing(open_input(run.options.optimizer)))
            sources += _files_of(optimizer, run.options.optimizer)
            opened = join(opened, optimizer)
        _check_restorable(opened)
        own = _stamps(sources)
        read = {**own, **(base.files if base else {})}
        target, notes = _prepare(opened, source, place, read, run.options)
        report = _write(opened, target, base, read, notes, sources, run)
        if not run.options.chain:
            return report, base
        if base is not None:
            base.close()
        if report.n_lossy:
            return report, _open_base(target, run.options.search_path)
        return report, _as_base(report, opened, own, held.pop_all().close)


def _check_restorable(opened: Input) -> None:
    """Require of folder and tree, before anything is written, what a restore will require of them."""
    try:
        names: Collection[str] = opened.tensors
        if opened.sharding is not None:
            check_sharding(opened.sharding, opened.tensors)
            names = torch_names(opened.tree, opened.sharding)
        if opened.tree is not None:
            parse_tree(opened.tree).check_names(names)
    except CorruptionError as error:
        if opened.kind == "ckptz":
            raise named(error, opened.name) from None
        raise ConfigError(f"{opened.name}: cannot be kept in one file: {error}") from None


def _files_of(opened: Input, source: Path) -> list[Path]:
    """The files that hold the tensors of an input."""
    if opened.checkpoint is not None:
        return [Path(file.name) for file in opened.checkpoint.files]
    if opened.kind == "dcp":
        return dcp_files(source)
    shards = opened.sharding.shards if opened.sharding else ()
    return [source / shard.file for shard in shards] or [source]


def _as_base(
    report: CompressReport, opened: Input, files: Mapping[Path, Stamp], close: Callable[[], None]
) -> _Base:
    # The input holds the same values as the file just written, and need not be decoded.
    target = Path(report.output)
    ref = BaseRef(content_id=report.content_id, file=base_file_name(target), depth=report.depth + 1)
    return _Base(ref, target.parent, opened.tensors, files, close)


def _prepare(
    opened: Input, source: Path, place: Path, read: Iterable[Path], options: CompressOptions
) -> tuple[Path, list[str]]:
    """The file to write, and what the user should know of files that go with the tensors."""
    notes, force = [], options.force or options.is_dry_run
    if opened.left_out:
        notes.append(f"not carried over: {', '.join(opened.left_out)}")
    if source.is_dir() and place.suffix != SUFFIX:
        place.mkdir(exist_ok=True)
        target = place / f"{opened.stem}{SUFFIX}"
        check_target(target, read, force=force)
        check_carried(opened.carried, place, force=force)
        if not options.is_dry_run:
            copy_carried(opened.carried, place)
        return target, notes
    check_target(place, read, force=force)
    if opened.carried:
        notes.append(f"{len(opened.carried)} other files are not copied to {place.parent}; -o FOLDER does")
    return place, notes


def _write(
    opened: Input,
    target: Path,
    base: _Base | None,
    read: Mapping[Path, Stamp],
    notes: list[str],
    like: Sequence[Path],
    run: _Run,
) -> CompressReport:
    start = time.perf_counter()
    base = _usable(base, target, notes)
    known = Joined()
    if run.options.search is not None or not isinstance(run.options.config, Lossless):
        known = known_roles(opened.tensors, opened.tree, run.options.role_rules, opened.optimizer_names)
    contents = Contents(
        metadata=opened.metadata,
        base=base.ref if base else None,
        bases=base.tensors if base else {},
        step=run.options.step,
        sharding=opened.sharding,
        tree=opened.tree,
        config=run.options.search.template if run.options.search else run.options.config,
        role_rules=run.options.role_rules,
        roles=known.roles,
    )
    run.progress.start(opened.name, sum(t.dtype.n_bytes(t.shape) for t in opened.tensors.values()))
    with contextlib.ExitStack() as held, naming_output(target):
        guided = guides_of(opened.tensors, contents, run.options.guide_files, held)
        contents = replace(contents, guides=guided.guides)
        written, search = _store(opened, target, contents, _Read(base, read, like), run)
    if base is not None and not written.n_deltas:
        base = None
        notes.append("no tensor gains from the base; the file stands alone")
    notes.extend(_tensor_notes(written.notes))
    notes.extend(_search_notes(search) if search else ())
    notes.extend([*known.notes, *guided.notes])
    notes.extend(_base_differences(opened, base))
    return CompressReport(
        input=opened.name,
        output=str(target),
        n_tensors=written.n_tensors,
        n_deltas=written.n_deltas,
        n_lossy=written.n_lossy,
        tensor_bytes=written.original_bytes,
        stored_bytes=written.stored_bytes,
        ratio=written.original_bytes / written.stored_bytes,
        content_id=written.content_id,
        base=base.ref.file if base else None,
        depth=base.ref.depth if base else 0,
        step=run.options.step,
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
        search=search,
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """What an output is made from beside its input's tensors."""

    base: _Base | None
    files: Mapping[Path, Stamp]
    like: Sequence[Path]


def _store(
    opened: Input, target: Path, contents: Contents, read: _Read, run: _Run
) -> tuple[Written, SearchReport | None]:
    """Publish the output: as configured, or as a search finds."""
    try:
        if run.options.search is not None:
            found = SearchRun(
                workers=run.workers,
                base_paths=(read.base.folder / read.base.ref.file,) if read.base is not None else (),
                search_path=tuple(run.options.search_path),
                like=read.like,
                check=lambda: _check_unchanged(read.files),
            )
            return search_and_write(target, opened.tensors, contents, run.options.search, found)
        with publish(target, read.like) as sink:
            written = write_container(sink, opened.tensors, contents, run.workers, run.progress.advance)
            _check_unchanged(read.files)
            return written, None
    except (ConfigError, UnsupportedError) as error:
        raise named(error, opened.name) from error.__cause__


def _tensor_notes(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One note for all tensors that it is about."""
    names: dict[str, list[str]] = {}
    for name, note in notes:
        names.setdefault(note, []).append(name)
    for note, found in names.items():
        who = f"tensor {found[0]!r}" if len(found) == 1 else f"{len(found)} tensors, first {found[0]!r}"
        yield f"{who}: {note}"


def _search_notes(search: SearchReport) -> Iterator[str]:
    n = len(search.trials)
    if search.is_interrupted:
        yield f"interrupted after {n} evaluations; this is the best of them"
    yield from search.unmeasurable
    if search.is_met is None:
        yield "nothing was measured: the settings of the checkpoint before were used as they are"
    if search.is_met is False and not search.unmeasurable:
        yield f"none of the {n} configurations that were tried keeps the budget; without loss"
    if search.is_dry_run:
        yield "a dry run: nothing was written"


def _base_differences(opened: Input, base: _Base | None) -> list[str]:
    """What the base and the input do not share."""
    if base is None:
        return []
    new = [name for name in opened.tensors if name not in base.tensors]
    gone = [name for name in base.tensors if name not in opened.tensors]
    notes = [f"{len(new)} tensors are new and stand alone, first {new[0]!r}"] if new else []
    return notes + ([f"{len(gone)} tensors of the base are gone, first {gone[0]!r}"] if gone else [])


def _usable(base: _Base | None, target: Path, notes: list[str]) -> _Base | None:
    """The base, unless its chain is at its longest; adds to `notes` what follows for the user."""
    if base is None:
        return None
    if base.ref.depth > MAX_WRITTEN_DEPTH:
        notes.append(f"{base.ref.file} is {MAX_WRITTEN_DEPTH} deltas from its anchor; this is a new anchor")
        return None
    if base.folder.resolve() != target.parent.resolve():
        where = f"its base {base.ref.file} is in {base.folder}"
        notes.append(f"{where}; restoring needs both in one folder, or --search-path")
    return base


def _check_unchanged(files: Mapping[Path, Stamp]) -> None:
    found = _stamps(files)
    for path, stamp in files.items():
        if found[path] != stamp:
            raise OSError(f"{path}: was changed while it was read; compress it again")
