"""`ckptz compress`: checkpoints of any kind to `.ckptz` files, alone, against a base, or as a chain."""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from ckptz.codec.effort import EffortName, effort_of
from ckptz.codec.lossless import LOSSLESS
from ckptz.codec.method import Method, checked
from ckptz.errors import ConfigError, CorruptionError, UnsupportedError, with_context
from ckptz.foreign.dcp import dcp_files
from ckptz.foreign.folders import Carried, check_sharding, copy_carried, torch_names
from ckptz.foreign.inputs import (
    FORCE,
    Input,
    PathLike,
    check_carried,
    check_not_torch,
    check_target,
    join,
    open_input,
    output_context,
    output_paths,
    stem_of,
    to_paths,
)
from ckptz.foreign.torch_files import TORCH_SUFFIXES
from ckptz.format.byte_source import is_url, open_bytes, path_of
from ckptz.format.index import BaseRef
from ckptz.format.publish import abandoned, is_same, make_folder, publish
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.format.written import Written
from ckptz.guidance.momentum import Momentum, UpdateTracker
from ckptz.guidance.optimizer_layout import ParameterNames
from ckptz.guidance.side_information import SideInformationFiles, check_files
from ckptz.kernels.clock import working_seconds
from ckptz.parallel import SILENT, Progress, Workers
from ckptz.run.links import link_chain
from ckptz.run.names import step_of
from ckptz.run.step_files import ChainRule, checked_step
from ckptz.search.budget import Budget, SearchOptions, SearchReport
from ckptz.search.sampled import predict
from ckptz.search.spaces import DEFAULT_METHOD
from ckptz.state.roles import Rule
from ckptz.state.skeleton import parse_tree
from ckptz.store.resolve import (
    PLAIN_SUFFIX,
    SUFFIX,
    base_file_name,
    base_metadata,
    base_ref,
    folders_beside,
    open_checkpoint,
    open_file,
)
from ckptz.words import Report
from ckptz.write.job import WriteJob
from ckptz.write.writer import write

OTHER_SUFFIXES: Final = (PLAIN_SUFFIX, *TORCH_SUFFIXES)
UNITS: Final = {
    "B": 1,
    **{f"{letter}B": 1000**i for i, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", 1)},
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(x|[kKMGT]?i?B)\s*")
RESUME: Final = f"{FORCE}, or --resume (resume=True) to leave it"
_IN_SERIES: Final = re.compile(r"(.*[^\d])(\d{1,18})", re.DOTALL)
MAX_WRITTEN_DEPTH: Final = 16  # a restore decodes the whole chain; the next file is a full one again
CHAIN_RULE: Final = ChainRule(MAX_WRITTEN_DEPTH + 1, is_forked=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressReport(Report):
    """Sizes, identity and notes of one file that `compress` wrote."""

    input: str  # what was read
    output: str  # what was written
    n_tensors: int  # tensors in it
    n_deltas: int  # those that are stored against the base
    n_lossy: int  # those that do not come back bit for bit
    tensor_bytes: int  # bytes of all tensors, which ratio is counted from
    stored_bytes: int  # size of the output
    ratio: float  # tensor bytes by stored bytes
    content_id: str  # identity of the values
    base: str | None  # file name of the base, or None
    depth: int  # deltas between the output and its full file
    step: int | None  # training step, as given, or as metadata or names have it
    method: str  # name of the method
    seconds: float  # time taken, without that of compiling kernels
    is_dry_run: bool = False  # nothing was written; sizes, counts of deltas and seconds are predicted
    notes: tuple[str, ...] = ()  # what the user should know
    search: SearchReport | None = None  # how the configuration was found, if it was searched for


Stamp = tuple[int, int]  # of a file: time of change, size


@dataclass(frozen=True, slots=True)
class _Base:
    """The base of the next output: its name, and open tensors of the same values."""

    ref: BaseRef
    folder: Path
    tensors: Mapping[str, TensorSource]
    files: Mapping[Path, Stamp]
    close: Callable[[], None]
    metadata: int | None = None  # see WriteJob.base_metadata


def compress(
    inputs: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    config: Method = LOSSLESS,
    search: SearchOptions | None = None,
    budget: Budget | Sequence[Budget] = (),
    base: PathLike | None = None,
    chain: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    target_size: str | None = None,
    step: int | None = None,
    optimizer: PathLike | Sequence[PathLike] | None = None,
    param_names: PathLike | None = None,
    moments_from: PathLike | None = None,
    calibration: PathLike | None = None,
    sensitivity: PathLike | None = None,
    role_rules: Sequence[Rule] = (),
    effort: EffortName = "default",
    jobs: int | None = None,
    force: bool = False,
    search_path: Sequence[PathLike] = (),
    progress: Progress = SILENT,
    on_report: Callable[[CompressReport], None] | None = None,
) -> tuple[CompressReport, ...]:
    """Compress checkpoints of any kind, without loss unless a configuration or a budget says otherwise.

    Args:
        inputs: `.safetensors`, torch or `.ckptz` files, or folders of shards; one or several.
        output: for one input a file or an existing folder, for several or a chain a folder, as is any name
            that ends with a separator; by default outputs stand beside their files and in their folders. A
            folder's other files are copied along.
        config: lossless, or how tensors become lossy.
        search: find the configuration for budgets; `config` stays lossless then.
        budget: the same with all else by default: what may be lost, measured on the decoded tensors.
        base: store every input against this `.ckptz` or `.safetensors` file.
        chain: store every input against the one before it, the first against `base` if there is one; where
            the names of all have steps, in the order of these.
        resume: leave outputs that are there and newer than their inputs as they are, and go on after them; a
            folder's other files stay where they are copied already.
        dry_run: write nothing, and predict sizes and times from a sample of each input, in a few seconds. Of
            a lossy chain nothing can be predicted, as what is stored depends on the file before.
        target_size: a size such as "500MB" or a ratio such as "20x": write the finest file of each input that
            fits, by `config`, by default `Grid()`, and a lossless one if that fits. Nothing is evaluated.
        step: training step to record; by default that of the input's metadata, or of its name.
        optimizer: a file of optimizer state for each input, in their order, which goes into the same output;
            what stands in a folder that is compressed goes along anyway.
        param_names: a text file with the name of one parameter on each line, in the order in which the
            optimizer numbers them; by default they are found by a model's config.json and by shapes.
        moments_from: a checkpoint whose second moments guide lossy methods; it is read, not stored.
        calibration: what `ckptz.hooks.Calibration` saved, for the rounding of grids.
        sensitivity: what `ckptz.hooks.SensitivityTracker` saved.
        role_rules: the user's rows of the table of roles.
        effort: "fast", "default" or "small": how much time to spend on a smaller file.
        jobs: threads, all cores by default.
        force: replace existing outputs.
        search_path: folders to look for the base's own bases in.
        progress: is told of each file and of the bytes done.
        on_report: is given each report as soon as its file is published.

    Returns:
        One report for each output that was written.

    Raises:
        FileNotFoundError: an input is missing.
        ConfigError: an output exists or would replace a file that is read, or options contradict each other.
        FormatError: an input is damaged.

    Example:
        >>> import ckptz
        >>> ckptz.compress("no-such-file.safetensors")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: 'no-such-file.safetensors'
    """
    sources, optimizers = _paths(inputs), [] if optimizer is None else _paths(optimizer)
    effort_of(effort)
    config, step = checked(config), None if step is None else checked_step(step)
    search = _search_of(search, budget, config)
    base = _path(base)
    guides = SideInformationFiles(
        moments_from=_path(moments_from), calibration=_path(calibration), sensitivity=_path(sensitivity)
    )
    if len(sources) > 1 and step is not None:
        raise ConfigError("there are several inputs for one step; compress them one by one")
    if optimizers and len(optimizers) != len(sources):
        counts = f"{len(sources)} inputs, and optimizer state of {len(optimizers)}"
        raise ConfigError(f"there are {counts}; name a file for each input, in the same order")
    is_dry, steps = dry_run or (search is not None and search.is_dry_run), _steps_of(sources)
    optimizer_of = dict(zip(sources, optimizers, strict=False))
    if chain and _has_steps(sources, steps):  # else they stay in the given order
        sources.sort(key=lambda source: steps[source])
    if target_size is not None:
        config = _sized(config, target_size, is_alone=search is None and not (dry_run or chain))
    needs_written = chain and (search is not None or config.is_lossy)
    _check_together(base, needs_written=needs_written, is_dry=is_dry, resume=resume, force=force)
    check_files(search.template if search else config, guides)
    reports = []
    with contextlib.ExitStack() as held:
        run = _Compression(
            sources=sources,
            steps=steps,
            job=WriteJob(
                tensors={},
                config=search.template if search else config,
                effort=effort,
                step=step,
                role_rules=role_rules,
                parameter_names=ParameterNames(_path(param_names)),
                guide_files=guides,
                momentum=Momentum(UpdateTracker(), step) if chain and config.loses_state else None,
            ),
            chain=chain,
            resume=resume,
            is_dry=is_dry,
            target_size=target_size,
            force=force,
            search_path=to_paths(search_path),
            optimizer_of=optimizer_of,
            search=search,
            workers=held.enter_context(Workers(jobs)),
            progress=progress,
        )
        for report in run.all(output, base):
            reports.append(report)
            if on_report is not None:
                on_report(report)
    return tuple(reports)


def _check_together(
    base: Path | None, *, needs_written: bool, is_dry: bool, resume: bool, force: bool
) -> None:
    """Refuse what cannot be done together, before anything is read."""
    if base is not None and base.is_dir():
        raise ConfigError(f"{base}: a base is a file; compress the folder and name its .ckptz file")
    if base is not None:
        check_not_torch(base)
    if needs_written and is_dry:
        raise ConfigError(
            "a lossy chain needs the file before, and a dry run writes none; leave one of the two out"
        )
    if resume and (force or is_dry):
        raise ConfigError("resume leaves outputs as they are; leave out force and dry_run, or resume")


def _steps_of(sources: Sequence[Path]) -> dict[Path, int]:
    """Find the steps in the names of inputs; of one series, name-0010 and name-0020, they are its numbers."""
    by_name = {source: step for source in sources if (step := step_of(source)) is not None}
    numbered = [match for source in sources if (match := _IN_SERIES.fullmatch(stem_of(source)))]
    numbers = {int(match[2]) for match in numbered}
    if by_name or len({match[1] for match in numbered}) != 1 or not 1 < len(numbers) == len(sources):
        return by_name
    return {source: int(match[2]) for source, match in zip(sources, numbered, strict=True)}


def _has_steps(sources: Sequence[Path], steps: Mapping[Path, int]) -> bool:
    """Return whether all inputs have different steps."""
    return len(set(steps.values())) == len(sources)


def _path(given: PathLike | None) -> Path | None:
    return None if given is None else path_of(given)


def _paths(given: PathLike | Sequence[PathLike]) -> list[Path]:
    return [path_of(given)] if isinstance(given, str | os.PathLike) else to_paths(given)


def _search_of(
    search: SearchOptions | None, budget: Budget | Sequence[Budget], config: Method
) -> SearchOptions | None:
    budgets = tuple(budget) if isinstance(budget, Sequence) else (budget,)
    if not isinstance(search, SearchOptions | None):
        raise ConfigError(f"search must be ckptz.SearchOptions or None, got {search!r}")
    if not budgets:
        if search is not None and config.is_lossy:
            raise ConfigError("give config or search, not both")
        return search
    if search is not None:
        raise ConfigError("give budget or search, not both; a search has budgets of its own")
    options = SearchOptions(budgets=budgets)
    return replace(options, template=config) if config.is_lossy else options


def _stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}


def _open_base(path: Path, search_path: Sequence[Path]) -> _Base:
    with contextlib.ExitStack() as held:
        opened = held.enter_context(contextlib.closing(open_checkpoint(path, search_path)))
        stamps, metadata = _stamps(opened.paths), base_metadata(opened)
        base = _Base(base_ref(opened), path.parent, opened.tensors, stamps, opened.close, metadata)
        held.pop_all()
        return base


def _check_restorable(opened: Input) -> None:
    """Check shards and tree as a restore will, before anything is written."""
    try:
        names: Collection[str] = opened.tensors
        if opened.sharding is not None:
            check_sharding(opened.sharding, opened.tensors)
            names = torch_names(opened.tree, opened.sharding)
        if opened.tree is not None:
            parse_tree(opened.tree).check_names(names)
    except CorruptionError as error:
        if opened.kind == "ckptz":
            raise with_context(error, opened.name) from None
        raise ConfigError(f"{opened.name}: cannot be kept in one file: {error}") from None


def _files_of(opened: Input, source: Path) -> list[Path]:
    """Name the files that hold the tensors of an input."""
    if opened.checkpoint is not None:
        return opened.checkpoint.paths
    if opened.kind == "dcp":
        return dcp_files(source)
    shards = opened.sharding.shards if opened.sharding else ()
    return [source / shard.file for shard in shards] or [source]


def _check_made_from(opened: Input, target: Path, sources: Mapping[Path, Stamp]) -> None:
    """Require, as far as index and times tell, that an existing output was made from this input."""
    # Stores behind URLs count whole seconds.
    modified = target.stat().st_mtime_ns + (999_999_999 if is_url(target) else 0)
    with contextlib.closing(open_file(open_bytes(target))) as there:
        stored = {name: (source.dtype, source.shape) for name, source in there.tensors.items()}
    wanted = {name: (source.dtype, source.shape) for name, source in opened.tensors.items()}
    if stored != wanted or any(time > modified for time, _ in sources.values()):
        raise ConfigError(
            f"{target}: is not what {opened.name} was compressed to, or older; remove it, or use force"
        )


def _sized(config: Method, target_size: str, *, is_alone: bool) -> Method:
    """Return the configuration for a target size: a lossy one; `is_alone` without other ways to find one."""
    _parse_size(target_size, 0)
    if not is_alone:
        raise ConfigError("target_size goes with no search, no dry run and no chain; leave these out")
    return config if config.is_lossy else DEFAULT_METHOD()


def _parse_size(text: str, n_bytes: int) -> int:
    """Return the bytes that a text such as 500MB, 1.5GiB or 20x allows, the last one of `n_bytes`.

    Raises:
        ConfigError: it is none of these.
    """
    match = _SIZE.fullmatch(text)
    if match is None or not (match[2] == "x" or match[2] in UNITS) or not float(match[1]):
        raise ConfigError(f"target_size must be a size such as 500MB or a ratio such as 20x, got {text!r}")
    number = float(match[1])
    return int(n_bytes / number if match[2] == "x" else number * UNITS[match[2]])


def _check_suffixes(places: Iterable[Path]) -> None:
    """Refuse names of other kinds of files for outputs, which programs would take them for."""
    for place in places:
        if place.suffix in OTHER_SUFFIXES and not place.is_dir():
            right = place.with_suffix(SUFFIX)
            raise ConfigError(f"{place}: a compressed file is called {SUFFIX}; write to {right}")


def _check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Refuse inputs that another process wrote to while they were read."""
    for path, stamp in _stamps(stamps).items():
        if stamp != stamps[path]:
            raise OSError(f"{path}: was changed while it was read; compress it again")


def _is_copied(carried: Carried, place: Path) -> bool:
    """Return whether a folder has a file with the same bytes under a relative path."""
    name, source = carried
    copy = place / name
    if is_url(copy):
        return copy.is_file() and copy.read_bytes() == source.read_bytes()
    return copy.is_file() and not copy.is_symlink() and filecmp.cmp(source, copy, shallow=False)


def _search_notes(search: SearchReport) -> Iterator[str]:
    n = len(search.trials)
    yield from search.notes
    if search.strategy == "replay":
        yield "nothing was measured: the settings of the checkpoint before were used as they are"
    if search.is_met is False and not search.unmeasurable:
        yield f"none of the {n} configurations that were tried keeps the budget; without loss"
    if search.is_dry_run:
        yield "a dry run: nothing was written"


def _base_differences(opened: Input, base: _Base | None) -> list[str]:
    """Name the tensors that only the input or only the base has."""
    if base is None:
        return []
    new = [name for name in opened.tensors if name not in base.tensors]
    gone = [name for name in base.tensors if name not in opened.tensors]
    notes = [f"{len(new)} tensors are new and stand alone, first {new[0]!r}"] if new else []
    return notes + ([f"{len(gone)} tensors of the base are gone, first {gone[0]!r}"] if gone else [])


def _usable(base: _Base | None, target: Path, notes: list[str], *, is_folder: bool) -> _Base | None:
    """Return the base, or None with a note if its chain has the maximum length."""
    if base is None:
        return None
    if CHAIN_RULE.base_of(base.ref.depth) is None:
        notes.append(
            f"{base.ref.file} is {MAX_WRITTEN_DEPTH} deltas from its full file; this is a new full file"
        )
        return None
    beside = folders_beside(base.folder / base.ref.file)  # of a link both its own and its target's
    if target.parent.resolve() not in [folder.resolve() for folder in beside]:
        # Links to the base and to its own bases make the folder complete.
        if is_folder and not is_url(target):
            with contextlib.closing(open_checkpoint(base.folder / base.ref.file)) as opened:
                names = link_chain(opened, target.parent) if opened.container is not None else ()
            if names:
                return replace(base, ref=BaseRef(base.ref.content_id, names[0], base.ref.depth))
        where = f"its base {base.ref.file} is in {base.folder}"
        notes.append(f"{where}; restoring needs both in one folder, or --search-path")
    return base


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compression:
    """One call of `compress`, with checked arguments.

    Attributes:
        job: what all outputs have in common.
    """

    sources: list[Path]
    steps: Mapping[Path, int]  # in their names
    job: WriteJob
    chain: bool
    resume: bool
    is_dry: bool  # nothing is written
    target_size: str | None
    force: bool
    search_path: list[Path]
    optimizer_of: Mapping[Path, Path]  # by input
    search: SearchOptions | None
    workers: Workers
    progress: Progress

    @property
    def is_prediction(self) -> bool:
        """True if sizes are predicted, as neither a file nor a search is asked for."""
        return self.is_dry and self.search is None

    def all(self, output: PathLike | None, base_path: Path | None) -> Iterator[CompressReport]:
        """Compress one input after another; yield the report of each when its file is published."""
        sources = self.sources
        # A folder for several outputs would be made.
        place = None if self.is_prediction else output
        places = output_paths(sources, place, SUFFIX, is_chain=self.chain)
        _check_suffixes(place for source, place in zip(sources, places, strict=True) if not source.is_dir())
        if len(sources) > 1 and not self.resume:  # outputs that are there are refused before the first write
            for source, place in zip(sources, places, strict=True):
                if not source.is_dir():
                    check_target(place, [source], force=self.force or self.is_dry, remedy=RESUME)
        base = None if base_path is None else _open_base(base_path, self.search_path)
        try:
            for source, place in zip(sources, places, strict=True):
                report, base = self._one(source, place, base)
                if report is None:
                    continue
                yield report
                if report.search is not None and report.search.is_interrupted and source != sources[-1]:
                    raise KeyboardInterrupt
        finally:
            if base is not None:
                base.close()

    def _one(
        self, source: Path, place: Path, base: _Base | None
    ) -> tuple[CompressReport | None, _Base | None]:
        """Write one output; give its report, None if it was there already, and the base of the next one."""
        with contextlib.ExitStack() as held:
            opened = held.enter_context(contextlib.closing(open_input(source, self.search_path)))
            sources = _files_of(opened, source)
            optimizer = self.optimizer_of.get(source)
            if optimizer is not None and not any(is_same(optimizer, file) for file in sources):
                beside = held.enter_context(contextlib.closing(open_input(optimizer)))
                sources += _files_of(beside, optimizer)
                opened = join(opened, beside)
            _check_restorable(opened)
            own = _stamps(sources)
            is_inside = source.is_dir() and place.suffix != SUFFIX  # the output is a folder, as the input is
            target = place / f"{opened.stem}{SUFFIX}" if is_inside else place
            self._remove_abandoned(target, place, opened)
            if self.resume and target.exists():
                _check_made_from(opened, target, own)
                if base is not None and self.chain:
                    base.close()
                return None, _open_base(target, self.search_path) if self.chain else base
            notes = self._prepare(opened, target, place, [*own, *(base.files if base else ())])
            usable = _usable(base, target, notes, is_folder=target != place)
            report = self._write(opened, target, usable, notes, own)
            if not self.chain:
                return report, base
            if base is not None:
                base.close()
            if report.n_lossy and not self.is_dry:
                return report, _open_base(target, self.search_path)
            # The input has the same values as the file just written, and they need no decoding.
            file, depth = base_file_name(target), report.depth + 1
            ref = BaseRef(content_id=report.content_id, file=file, depth=depth)
            return report, _Base(ref, target.parent, opened.tensors, own, held.pop_all().close)

    def _remove_abandoned(self, target: Path, place: Path, opened: Input) -> None:
        """Remove what a process that was killed left, to go on after it."""
        copies = {(place / name).parent for name, _ in opened.carried} if target != place else set()
        for folder in (target.parent, *(copies - {target.parent})) if self.resume else ():
            for left in abandoned(folder):
                left.unlink(missing_ok=True)

    def _prepare(self, opened: Input, target: Path, place: Path, read: Iterable[Path]) -> list[str]:
        """Check the target and copy the files beside a folder's shards; give notes on them for the user."""
        notes, force = list(opened.notes), self.force or self.is_dry
        sources = self.sources
        is_first = opened.name == str(sources[0])
        if self.chain and is_first and len(sources) > 1 and not _has_steps(sources, self.steps):
            names = ", ".join(source.name for source in sources)
            what = "the names do not all have a step of their own, so the chain goes in the given order"
            notes.append(f"{what}: {names}")
        if opened.left_out:
            notes.append(f"not carried over: {', '.join(opened.left_out)}")
        if target != place:
            make_folder(place, parents=False)
            check_target(target, read, force=force, remedy=RESUME)
            carried, remedy = opened.carried, RESUME
            if self.resume:  # side files are copied first, so that they may be there
                carried = tuple(one for one in carried if not _is_copied(one, place))
                remedy = "remove it"
            check_carried(carried, place, force=force, remedy=remedy)
            if not self.is_dry:
                copy_carried(carried, place)
            return notes
        check_target(place, read, force=force, remedy=RESUME)
        if opened.carried:
            notes.append(
                f"{len(opened.carried)} other files are not copied to {place.parent}; -o FOLDER does"
            )
        return notes

    def _write(
        self, opened: Input, target: Path, base: _Base | None, notes: list[str], own: Mapping[Path, Stamp]
    ) -> CompressReport:
        """Write one file; `own` has the stamps of the files of the input."""
        start, job = working_seconds(), self._job(opened, base)
        search, seconds = None, None
        self.progress.start(opened.name, tensor_bytes(opened.tensors))
        try:
            with output_context(target):
                if self.is_prediction:
                    written, seconds = predict(job, self.workers)
                else:
                    written, search = self._written(target, job, base, own)
        except (ConfigError, UnsupportedError) as error:
            raise with_context(error, opened.name) from error.__cause__
        if base is not None and not written.n_deltas:
            base = None
            notes.append("no tensor gains from the base; the file stands alone")
        notes.extend(_search_notes(search) if search else ())
        notes.extend(written.notes)
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
            step=job.step,
            method=job.config.name,
            seconds=working_seconds() - start if seconds is None else seconds,
            is_dry_run=self.is_dry,
            notes=tuple(notes),
            search=search,
        )

    def _job(self, opened: Input, base: _Base | None) -> WriteJob:
        """Describe the file that an input becomes."""
        container = opened.checkpoint.container if opened.checkpoint is not None else None
        given = self.job.step
        recorded = container.index.step if container is not None and given is None else given
        source = path_of(opened.name)
        step = step_of(source, recorded, opened.metadata)
        step = self.steps.get(source) if step is None else step
        momentum = self.job.momentum
        job = replace(
            self.job,
            tensors=opened.tensors,
            metadata=opened.metadata,
            step=step,
            sharding=opened.sharding,
            tree=opened.tree,
            optimizer_names=opened.optimizer_names,
            parameter_names=replace(self.job.parameter_names, beside=Path(opened.name)),
            momentum=None if momentum is None else replace(momentum, step=step),
        )
        if base is None:
            return job
        return replace(job, base=base.ref, bases=base.tensors, base_metadata=base.metadata)

    def _written(
        self, target: Path, job: WriteJob, base: _Base | None, own: Mapping[Path, Stamp]
    ) -> tuple[Written, SearchReport | None]:
        """Write a file by itself, or the best that a search finds; its inputs must not have changed since."""
        stamps, like = {**own, **(base.files if base else {})}, list(own)
        if self.search is None and self.target_size is None:
            with publish(target, like) as sink:
                written = write(sink, job, self.workers, self.progress.advance)
                _check_unchanged(stamps)
            return written, None
        from ckptz.search.run import SearchRun, search_and_write

        run = SearchRun(
            workers=self.workers,
            base_paths=(base.folder / base.ref.file,) if base is not None else (),
            search_path=tuple(self.search_path),
            like=like,
            check=partial(_check_unchanged, stamps),
        )
        if self.search is None:
            from ckptz.search.target_size import write_to_size

            limit = _parse_size(self.target_size or "", tensor_bytes(job.tensors))
            return write_to_size(target, job, limit, run)
        return search_and_write(target, job, self.search, run)
