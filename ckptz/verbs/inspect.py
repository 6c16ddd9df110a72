"""`ckptz inspect`: what a file says of itself, read from its index and frame headers only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ckptz.api.describe import InspectReport, described
from ckptz.errors import CkptzError, ConfigError
from ckptz.foreign.inputs import checked_kind
from ckptz.foreign.targets import PathLike, paths
from ckptz.format.byte_source import naming_urls, open_bytes, path_of
from ckptz.format.reader import Container
from ckptz.run.names import checkpoint_in
from ckptz.store.resolve import open_checkpoint, open_file


@naming_urls
def inspect(path: PathLike, *, search_path: Sequence[PathLike] = ()) -> InspectReport:
    """Describe a `.ckptz` file; no tensor is decoded, and bases may be missing.

    Args:
        path: the file, a folder for its newest checkpoint, or "DIR@STEP" for that of a step.
        search_path: folders to look for bases in, after the file's own.

    Raises:
        FileNotFoundError: no such file or step.
        FormatError: damaged.
        ConfigError: a file of another kind, or a folder without a `.ckptz` file.
    """
    path, checkpoint, broken = checked_kind(checkpoint_in(path_of(path))), None, None
    with contextlib.ExitStack() as held:
        try:
            checkpoint = held.enter_context(contextlib.closing(open_checkpoint(path, paths(search_path))))
            file = checkpoint.files[0]
        except CkptzError as error:  # its base is missing; a file that is damaged itself says so again
            file = held.enter_context(contextlib.closing(open_file(open_bytes(path))))
            broken = str(error)
        if not isinstance(file, Container):
            raise ConfigError(f"{path}: a plain safetensors file; inspect describes .ckptz files")
        return described(file, checkpoint, broken)
