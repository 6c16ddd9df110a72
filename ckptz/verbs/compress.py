"""`ckptz compress`: write checkpoints of any format as full `.ckptz` files, deltas or chains."""

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
from ckptz.foreign.inputs import Input, check_not_torch, join, open_input, stem_of
from ckptz.format.byte_source import is_url, path_of
from ckptz.format.index import BaseRef
from ckptz.format.publish import abandoned, is_same, make_folder, publish
from ckptz.format.sources import TensorSource, tensor_bytes
from ckptz.format.suffixes import FOREIGN_SUFFIXES, SUFFIX
from ckptz.format.written import Written
from ckptz.guidance.momentum import Momentum, UpdateTracker
from ckptz.guidance.parameter_names import ParameterNames
from ckptz.guidance.side_information import UNCALIBRATED, SideInformationFiles, check_files
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
    base_file_name,
    base_metadata,
    base_ref,
    folders_beside,
    open_checkpoint,
    open_file,
)
from ckptz.verbs.paths import (
    FORCE,
    PathLike,
    check_carried,
    check_target,
    output_context,
    output_paths,
    to_paths,
)
from ckptz.words import Report
from ckptz.write.job import WriteJob
from ckptz.write.writer import write

UNITS: Final = {
    "B": 1,
    **{f"{letter}B": 1000**i for i, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", 1)},
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(x|[kKMGT]?i?B)\s*")
RESUME: Final = f"{FORCE}, or --resume (resume=True) to keep it"
_IN_SERIES: Final = re.compile(r"(.*[^\d])(\d{1,18})", re.DOTALL)
MAX_WRITTEN_DEPTH: Final = 16  # bounds the time of a restore, which decodes the whole chain
CHAIN_RULE: Final = ChainRule(MAX_WRITTEN_DEPTH + 1, is_forked=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressReport(Report):
    """Sizes, identity and notes of one file that `compress` wrote."""

    input: str
    output: str
    n_tensors: int
    n_deltas: int  # tensors stored as a delta to the base
    n_lossy: int  # lossy tensors
    tensor_bytes: int  # decoded size
    stored_bytes: int  # size of the output
    ratio: float  # tensor_bytes / stored_bytes
    content_id: str  # identity of the values
    base: str | None  # file name of the base
    depth: int  # deltas between the output and its full file
    step: int | None  # training step, from the argument, the metadata or the name
    method: str  # name of the method
    seconds: float  # time taken, without compiling kernels
    is_dry_run: bool = False  # nothing was written; sizes, delta counts and seconds are predicted
    notes: tuple[str, ...] = ()  # warnings for the user
    search: SearchReport | None = None  # trials and result of the search, if there was one


Stamp = tuple[int, int]  # modification time in nanoseconds and size of a file


@dataclass(frozen=True, slots=True)
class _Base:
    """The base of the next output: its reference, and a source of tensors with the same values."""

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
    """Compress checkpoints, losslessly unless a lossy method, a search, a budget or a target size is passed.

    Args:
        inputs: one or several `.safetensors`, torch or `.ckptz` files, or folders of shards.
        output: a file or an existing folder for one input; a folder for several inputs or a chain, and for
            any name that ends with a separator. By default each output is beside its input file, or in its
            input folder. Other files of an input folder are copied.
        config: the method and its settings, lossless by default.
        search: search for the method's settings that keep budgets; `config` must be lossless.
        budget: short for a `search` with these budgets and its other options at their defaults.
        base: store every output as a delta to this `.ckptz` or `.safetensors` file.
        chain: store every output as a delta to the one before, and the first as a delta to `base` if there is
            one. If all names have steps, inputs are sorted by step.
        resume: keep outputs that exist and are newer than their inputs, and copied files that are equal.
        dry_run: write nothing; predict sizes and times from a sample of each input, within seconds. A lossy
            chain cannot be predicted, because each file depends on the one before.
        target_size: a size such as "500MB" or a ratio such as "20x". Each output is lossless if that is small
            enough, else written with the finest settings of `config` (by default `Grid()`) that are. Quality
            is not measured.
        step: training step to record, by default from the input's metadata or its name.
        optimizer: a file of optimizer state for each input, in the same order, stored in the same output. The
            optimizer state in an input folder is always stored.
        param_names: a text file with one parameter name on each line, in the order of the optimizer's
            parameter numbers; by default the order is derived from config.json and from shapes.
        moments_from: a checkpoint whose second moments guide lossy methods; it is not stored.
        calibration: a file of `ckptz.hooks.Calibration`, for the rounding of grids.
        sensitivity: a file of `ckptz.hooks.SensitivityTracker`.
        role_rules: rules that come before the built-in ones, for the role of each tensor.
        effort: "fast", "default" or "small": time to spend on a smaller file.
        jobs: number of threads, by default one for each core.
        force: replace existing outputs.
        search_path: more folders to search for bases.
        progress: receives the name of each file and the number of bytes done.
        on_report: called with each report as soon as its file is published.

    Returns:
        One report for each output that was written.

    Raises:
        FileNotFoundError: an input is missing.
        ConfigError: an output exists or would replace an input, or options contradict each other.
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
        raise ConfigError("step is for a single input; compress the inputs one by one")
    if optimizers and len(optimizers) != len(sources):
        counts = f"{len(sources)} inputs, but {len(optimizers)} files of optimizer state"
        raise ConfigError(f"{counts}; name one file for each input, in the same order")
    is_dry, steps = dry_run or (search is not None and search.is_dry_run), _steps_of(sources)
    optimizer_of = dict(zip(sources, optimizers, strict=False))
    if chain and _has_steps(sources, steps):  # otherwise in the order of the arguments
        sources.sort(key=lambda source: steps[source])
    if target_size is not None:
        _parse_size(target_size, 0)
        if search is not None or dry_run or chain:
            raise ConfigError("target_size excludes a search, a dry run and a chain; leave these out")
        config = config if config.is_lossy else DEFAULT_METHOD()
    needs_written = chain and (search is not None or config.is_lossy)
    _check_together(base, needs_written=needs_written, is_dry=is_dry, resume=resume, force=force)
    check_files(search.template if search else config, guides)
    reports = []
    with contextlib.ExitStack() as stack:
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
            workers=stack.enter_context(Workers(jobs)),
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
    """Refuse options that contradict each other, before any input is read."""
    if base is not None and base.is_dir():
        raise ConfigError(
            f"{base}: a base must be a file; compress the folder first, and name its .ckptz file"
        )
    if base is not None:
        check_not_torch(base)
    if needs_written and is_dry:
        raise ConfigError("a dry run cannot predict a lossy chain; leave out one of the two")
    if resume and (force or is_dry):
        raise ConfigError("resume keeps existing outputs; leave out force and dry_run, or resume")


def _steps_of(sources: Sequence[Path]) -> dict[Path, int]:
    """Return the steps in input names; in a series such as name-0010, name-0020 the numbers are the steps."""
    by_name = {source: step for source in sources if (step := step_of(source)) is not None}
    numbered = [match for source in sources if (match := _IN_SERIES.fullmatch(stem_of(source)))]
    numbers = {int(match[2]) for match in numbered}
    if by_name or len({match[1] for match in numbered}) != 1 or not 1 < len(numbers) == len(sources):
        return by_name
    return {source: int(match[2]) for source, match in zip(sources, numbered, strict=True)}


def _has_steps(sources: Sequence[Path], steps: Mapping[Path, int]) -> bool:
    """Return whether all inputs have different steps."""
    return len(set(steps.values())) == len(sources)


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else path_of(path)


def _paths(one_or_several: PathLike | Sequence[PathLike]) -> list[Path]:
    if isinstance(one_or_several, str | os.PathLike):
        return [path_of(one_or_several)]
    return to_paths(one_or_several)


def _search_of(
    search: SearchOptions | None, budget: Budget | Sequence[Budget], config: Method
) -> SearchOptions | None:
    budgets = tuple(budget) if isinstance(budget, Sequence) else (budget,)
    if not isinstance(search, SearchOptions | None):
        raise ConfigError(f"search must be ckptz.SearchOptions or None, got {search!r}")
    if not budgets:
        if search is not None and config.is_lossy:
            raise ConfigError("config and search exclude each other; leave out one")
        return search
    if search is not None:
        raise ConfigError("budget and search exclude each other; put the budgets into SearchOptions")
    options = SearchOptions(budgets=budgets)
    return replace(options, template=config) if config.is_lossy else options


def _stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}


def _open_base(path: Path, search_path: Sequence[Path]) -> _Base:
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(contextlib.closing(open_checkpoint(path, search_path)))
        stamps, metadata = _stamps(opened.paths), base_metadata(opened)
        base = _Base(base_ref(opened), path.parent, opened.tensors, stamps, opened.close, metadata)
        stack.pop_all()
        return base


def _check_restorable(opened: Input) -> None:
    """Check that shards and tree can be restored, before anything is written."""
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
    """Return the files that contain the tensors of an input."""
    if opened.checkpoint is not None:
        return opened.checkpoint.paths
    if opened.kind == "dcp":
        return dcp_files(source)
    shards = opened.sharding.shards if opened.sharding else ()
    return [source / shard.file for shard in shards] or [source]


def _check_made_from(opened: Input, target: Path, sources: Mapping[Path, Stamp]) -> None:
    """Check by index and modification times that an existing output was made from this input."""
    # Stores behind URLs count whole seconds.
    modified = target.stat().st_mtime_ns + (999_999_999 if is_url(target) else 0)
    with contextlib.closing(open_file(target)) as existing:
        stored = {name: (source.dtype, source.shape) for name, source in existing.tensors.items()}
    expected = {name: (source.dtype, source.shape) for name, source in opened.tensors.items()}
    if stored != expected or any(time > modified for time, _ in sources.values()):
        what = f"was not made from {opened.name}, or is older than it"
        raise ConfigError(f"{target}: {what}; remove it, or use --force (force=True)")


def _parse_size(text: str, n_bytes: int) -> int:
    """Return the size in bytes of a text such as "500MB" or "1.5GiB", or `n_bytes` / 20 for "20x".

    Raises:
        ConfigError: the text is neither a size nor a ratio.
    """
    match = _SIZE.fullmatch(text)
    if match is None or not (match[2] == "x" or match[2] in UNITS) or not float(match[1]):
        raise ConfigError(f"target_size must be a size such as 500MB or a ratio such as 20x, got {text!r}")
    number = float(match[1])
    return int(n_bytes / number if match[2] == "x" else number * UNITS[match[2]])


def _check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Raise if an input changed while it was read."""
    for path, stamp in _stamps(stamps).items():
        if stamp != stamps[path]:
            raise OSError(f"{path}: changed while it was read; compress it again")


def _is_copied(carried: Carried, output: Path) -> bool:
    """Return whether `output` already has an equal copy of a file."""
    name, source = carried
    copy = output / name
    if is_url(copy):
        return copy.is_file() and copy.read_bytes() == source.read_bytes()
    return copy.is_file() and not copy.is_symlink() and filecmp.cmp(source, copy, shallow=False)


def _search_notes(search: SearchReport) -> Iterator[str]:
    n = len(search.trials)
    yield from search.notes
    if search.strategy == "replay":
        yield "quality not measured: the settings of the base were used"
    if search.is_met is False and not search.unmeasurable:
        yield f"none of {n} configurations keeps the budget; written without loss"
    if search.is_dry_run:
        yield "dry run: nothing was written"


def _base_differences(opened: Input, base: _Base | None) -> list[str]:
    """Return notes on tensors that only the input or only the base has."""
    if base is None:
        return []
    new = [name for name in opened.tensors if name not in base.tensors]
    gone = [name for name in base.tensors if name not in opened.tensors]
    notes = [f"{len(new)} tensors are not in the base, first {new[0]!r}"] if new else []
    notes += [f"{len(gone)} tensors of the base are not in the input, first {gone[0]!r}"] if gone else []
    return notes


def _usable(base: _Base | None, target: Path, notes: list[str], *, is_folder: bool) -> _Base | None:
    """Return the base, or None with a note if its chain has the maximum length."""
    if base is None:
        return None
    if CHAIN_RULE.base_of(base.ref.depth) is None:
        notes.append(
            f"full file: the chain of {base.ref.file} has the maximum length of {MAX_WRITTEN_DEPTH} deltas"
        )
        return None
    # For a link: its folder and the folder of its target.
    folders = folders_beside(base.folder / base.ref.file)
    if target.parent.resolve() not in [folder.resolve() for folder in folders]:
        # Link the whole chain into the folder, so that it can be restored by itself.
        if is_folder and not is_url(target):
            with contextlib.closing(open_checkpoint(base.folder / base.ref.file)) as opened:
                names = link_chain(opened, target.parent) if opened.container is not None else ()
            if names:
                return replace(base, ref=BaseRef(base.ref.content_id, names[0], base.ref.depth))
        where = f"its base {base.ref.file} is in {base.folder}"
        notes.append(f"{where}; to restore, put both into one folder or use --search-path")
    return base


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compression:
    """The validated arguments of `compress`.

    Attributes:
        job: settings that all outputs share.
    """

    sources: list[Path]
    steps: Mapping[Path, int]  # training steps in the names of inputs
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
        """True if sizes are predicted: a dry run without a search."""
        return self.is_dry and self.search is None

    def all(self, output: PathLike | None, base_path: Path | None) -> Iterator[CompressReport]:
        """Compress the inputs in turn; yield each report when its file is published."""
        sources = self.sources
        # `output_paths` creates a folder for several outputs, which a prediction must not.
        outputs = output_paths(sources, None if self.is_prediction else output, SUFFIX, is_chain=self.chain)
        pairs = list(zip(sources, outputs, strict=True))
        for source, path in pairs:
            if path.suffix in FOREIGN_SUFFIXES and not (source.is_dir() or path.is_dir()):
                right = path.with_suffix(SUFFIX)
                raise ConfigError(f"{path}: compressed files end with {SUFFIX}; write to {right}")
            # Of several, an existing output is refused before the first write.
            if len(pairs) > 1 and not (self.resume or source.is_dir()):
                check_target(path, [source], force=self.force or self.is_dry, remedy=RESUME)
        base = None if base_path is None else _open_base(base_path, self.search_path)
        try:
            for source, path in pairs:
                report, base = self._compress_one(source, path, base)
                if report is None:
                    continue
                yield report
                if report.search is not None and report.search.is_interrupted and source != sources[-1]:
                    raise KeyboardInterrupt
        finally:
            if base is not None:
                base.close()

    def _compress_one(
        self, source: Path, output: Path, base: _Base | None
    ) -> tuple[CompressReport | None, _Base | None]:
        """Write one output.

        Returns:
            (the report, or None if the output was kept; the base of the next output).
        """
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(contextlib.closing(open_input(source, self.search_path)))
            sources = _files_of(opened, source)
            optimizer = self.optimizer_of.get(source)
            if optimizer is not None and not any(is_same(optimizer, file) for file in sources):
                state = stack.enter_context(contextlib.closing(open_input(optimizer)))
                sources += _files_of(state, optimizer)
                opened = join(opened, state)
            _check_restorable(opened)
            input_stamps = _stamps(sources)
            is_inside = source.is_dir() and output.suffix != SUFFIX  # a folder is compressed to a folder
            target = output / f"{opened.stem}{SUFFIX}" if is_inside else output
            self._remove_abandoned(target, output, opened)
            if self.resume and target.exists():
                _check_made_from(opened, target, input_stamps)
                if base is not None and self.chain:
                    base.close()
                return None, _open_base(target, self.search_path) if self.chain else base
            notes = self._prepare(opened, target, output, [*input_stamps, *(base.files if base else ())])
            usable = _usable(base, target, notes, is_folder=target != output)
            report = self._write(opened, target, usable, notes, input_stamps)
            if not self.chain:
                return report, base
            if base is not None:
                base.close()
            if report.n_lossy and not self.is_dry:
                return report, _open_base(target, self.search_path)
            # The input has the same values as the file just written, and they need no decoding.
            file, depth = base_file_name(target), report.depth + 1
            ref = BaseRef(content_id=report.content_id, file=file, depth=depth)
            return report, _Base(ref, target.parent, opened.tensors, input_stamps, stack.pop_all().close)

    def _remove_abandoned(self, target: Path, output: Path, opened: Input) -> None:
        """Delete temporary files of a killed process."""
        copies = {(output / name).parent for name, _ in opened.carried} if target != output else set()
        for folder in (target.parent, *(copies - {target.parent})) if self.resume else ():
            for file in abandoned(folder):
                file.unlink(missing_ok=True)

    def _prepare(self, opened: Input, target: Path, output: Path, read: Iterable[Path]) -> list[str]:
        """Check the target, copy the files beside a folder's shards, and return notes for the user."""
        notes, force = list(opened.notes), self.force or self.is_dry
        sources = self.sources
        is_first = opened.name == str(sources[0])
        if self.chain and is_first and len(sources) > 1 and not _has_steps(sources, self.steps):
            names = ", ".join(source.name for source in sources)
            notes.append(f"chained in the order of the arguments, as not all names have a step: {names}")
        if opened.left_out:
            notes.append(f"not copied: {', '.join(opened.left_out)}")
        if target != output:
            make_folder(output, parents=False)
            check_target(target, read, force=force, remedy=RESUME)
            carried, remedy = opened.carried, RESUME
            if self.resume:  # side files are copied before the target is written
                carried = tuple(file for file in carried if not _is_copied(file, output))
                remedy = "remove it"
            check_carried(carried, output, force=force, remedy=remedy)
            if not self.is_dry:
                copy_carried(carried, output)
            return notes
        check_target(output, read, force=force, remedy=RESUME)
        if opened.carried:
            notes.append(
                f"{len(opened.carried)} other files were not copied to {output.parent}; -o FOLDER copies them"
            )
        return notes

    def _write(
        self,
        opened: Input,
        target: Path,
        base: _Base | None,
        notes: list[str],
        input_stamps: Mapping[Path, Stamp],
    ) -> CompressReport:
        """Write one file; `input_stamps` are those of the input's files."""
        start, job = working_seconds(), self._job(opened, base)
        search, seconds = None, None
        self.progress.start(opened.name, tensor_bytes(opened.tensors))
        try:
            with output_context(target):
                if self.is_prediction:
                    written, seconds = predict(job, self.workers)
                else:
                    written, search = self._written(target, job, base, input_stamps)
        except (ConfigError, UnsupportedError) as error:
            raise with_context(error, opened.name) from error.__cause__
        if base is not None and not written.n_deltas:
            base = None
            notes.append("full file: no tensor is smaller as a delta to the base")
        notes.extend(_search_notes(search) if search else ())
        # The side information of a search does not matter to a file without loss.
        is_exact = search is not None and search.is_met is False
        notes.extend(note for note in written.notes if not (is_exact and note == UNCALIBRATED))
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
        """Return the job that writes the output of an input."""
        container = None if opened.checkpoint is None else opened.checkpoint.container
        recorded = self.job.step
        if recorded is None and container is not None:
            recorded = container.index.step
        source, momentum = path_of(opened.name), self.job.momentum
        step = step_of(source, recorded, opened.metadata)
        step = self.steps.get(source) if step is None else step
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
        self, target: Path, job: WriteJob, base: _Base | None, input_stamps: Mapping[Path, Stamp]
    ) -> tuple[Written, SearchReport | None]:
        """Write a file with fixed settings or by a search; raise if an input changed meanwhile."""
        stamps, like = {**input_stamps, **(base.files if base else {})}, list(input_stamps)
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
