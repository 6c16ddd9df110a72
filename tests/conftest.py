"""Fixtures that several test modules share."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_support import Chain, a_state, ckptz, write_plain

# Shells start what runs in the background with Ctrl-C ignored, and so would be what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test cuts the power, and a disk takes long for it: who tests the call sets one of its own.
os.fsync = lambda descriptor: None

# Long files that would come last by name: one process would wait for the other. The first one forks processes
# that train, which its own must not have done before.
LONG = ("test_front_doors.py", "test_interrupts.py", "test_search_files.py", "test_store_remote.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Load no framework for modules of which no test is wanted."""
    if "not apps" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return bool(re.search(r"^pytestmark = .*pytest\.mark\.apps", collection_path.read_text(), re.M)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="module")
def deltas_at_any_cost() -> Iterator[None]:
    """Files are stored as `full_every` says: for tests of chains that would not pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptz.run.chain.weighed", lambda rule, *_: rule)
        yield


@pytest.fixture(scope="module", params=["subnormals kept", "subnormals flushed"])
def flush_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module's tests twice: torch's switch changes the processor mode for numpy and numba too."""
    import torch  # which other tests do without

    flushing = request.param == "subnormals flushed"
    if flushing and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = Chain(tmp_path / "run")
    made.folder.mkdir()
    write_plain(made.first, a_state(), {"step": "1"})
    write_plain(made.second, a_state(drift=0.01), {"step": "2"})
    ckptz("compress", made.first, made.second, "--chain", "--jobs", 1)
    return made
