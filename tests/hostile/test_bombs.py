"""Decompression bombs in 2 GiB of address space: a result or an error of ckptz, within seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bombs import BOMBS

MAX_SECONDS = 20  # of CPU, on a slow shared core
MAX_PEAK_MB = 1280  # of the process (SECURITY.md), in addition to the values that `load_file` returns
TRIES = 3  # a shared core is slower at times

COMPILED = "kernels were compiled"
RUN = """
import atexit, resource, sys, time
from pathlib import Path
from ckptz.kernels.clock import compiled_seconds
atexit.register(lambda: compiled_seconds() and sys.stderr.write("kernels were compiled"))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from ckptz.verbs.log import inspect
from ckptz.verbs.restore import restore
from ckptz.verbs.verify import verify
from ckptz.errors import CkptzError
from ckptz.numpy import load_file

verbs = {
    "inspect": inspect,
    "verify": lambda path: verify(path, jobs=2),
    "load_file": lambda path: load_file(path, jobs=2),
    "restore": lambda path: restore(path, f"{path}.out", jobs=2, max_decoded_bytes=1 << 30, force=True),
}
for path, verb in zip(sys.argv[1::2], sys.argv[2::2]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this one alone
    begin, outcome = time.process_time(), "result"
    try:
        verbs[verb](Path(path))
    except CkptzError as error:
        outcome = type(error).__name__
    assert "torch" not in sys.modules
    seconds = time.process_time() - begin
    # Not ru_maxrss: that begins with what the process that started this one had.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM"))
    print(outcome, seconds, int(peak.split()[1]) >> 10)
"""
VERBS = ("inspect", "verify", "load_file", "restore")
REFUSED = {
    **{("outer_vectors", verb): "LimitError" for verb in VERBS[1:]},
    **{("context tensors", verb): "CorruptionError" for verb in VERBS[1:]},
    ("constant_chunks", "load_file"): "LimitError",
    ("constant_chunks", "restore"): "LimitError",
}
QUICK = (
    *(("outer_vectors", "inspect"), ("outer_vectors", "verify"), ("term_codes", "load_file")),
    *(("expanded_maps", "load_file"), ("constant_chunks", "load_file"), ("base_codes", "verify")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bombs")


def run(*bombs: tuple[str, str], folder: Path) -> list[tuple[str, float, float]]:
    """Run verbs on bombs in another process; return outcome, CPU seconds and peak memory in MiB of each."""
    words = [word for name, verb in bombs for word in (str(written(folder, name)), verb)]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=600, check=False
    )
    if COMPILED in done.stderr:  # compiling kernels, once per machine, takes more than any file
        return run(*bombs, folder=folder)
    assert not done.returncode, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(outcome, float(seconds), float(peak_mb)) for outcome, seconds, peak_mb in rows]


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.ckptz"
    if not path.exists():
        path.write_bytes(BOMBS[name]())
    return path


@pytest.fixture(scope="module")
def quick(folder: Path) -> dict[tuple[str, str], tuple[str, float, float]]:
    """Return the results of the default suite's bombs, run in one process because starting takes longest."""
    return dict(zip(QUICK, run(*QUICK, folder=folder), strict=True))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param(name, verb, marks=() if (name, verb) in QUICK else pytest.mark.slow)
        for name in BOMBS
        for verb in VERBS
    ],
)
def test_a_bomb_ends_soon_and_in_little_memory(
    name: str, verb: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    for number in range(TRIES):
        if (name, verb) in QUICK and not number:
            outcome, seconds, peak_mb = request.getfixturevalue("quick")[name, verb]
        else:
            [(outcome, seconds, peak_mb)] = run((name, verb), folder=folder)
        assert outcome == REFUSED.get((name, verb), "result")
        assert peak_mb < MAX_PEAK_MB
        if seconds < MAX_SECONDS:
            return
    pytest.fail(f"{seconds:.1f} s of CPU, {TRIES} times")
