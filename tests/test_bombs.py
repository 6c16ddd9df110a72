"""Small files that stand for much, in 2 GiB of address space: a result or an error of ours, soon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bombs import BOMBS

MAX_SECONDS = 10
MAX_PEAK_MB = 1024  # of the process; what a file's values take comes on top in `load_file`

RUN = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from ckptz.commands.inspect import inspect
from ckptz.commands.verify import verify
from ckptz.errors import CkptzError
from ckptz.numpy import load_file

path, verb = Path(sys.argv[1]), sys.argv[2]
verbs = {
    "inspect": inspect,
    "verify": lambda path: verify(path, jobs=2),
    "load_file": lambda path: load_file(path, jobs=2),
}
begin = time.process_time()
try:
    verbs[verb](path)
    print("result")
except CkptzError as error:
    print(type(error).__name__)
assert "torch" not in sys.modules
print(time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
REFUSED = {("outer_vectors", "verify"), ("outer_vectors", "load_file"), ("constant_chunks", "load_file")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bombs")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param(name, verb, marks=pytest.mark.slow)
        for name in BOMBS
        for verb in ("inspect", "verify", "load_file")
    ],
)
def test_a_bomb_ends_soon_and_in_little_memory(name: str, verb: str, folder: Path) -> None:
    path = folder / f"{name}.ckptz"
    if not path.exists():
        path.write_bytes(BOMBS[name]())
    command = [sys.executable, "-c", RUN, str(path), verb]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert not done.returncode, done.stderr
    outcome, figures = done.stdout.splitlines()
    seconds, peak_mb = map(float, figures.split())
    assert outcome == ("LimitError" if (name, verb) in REFUSED else "result")
    assert seconds < MAX_SECONDS  # of CPU: other programs may run beside this
    assert peak_mb < MAX_PEAK_MB
