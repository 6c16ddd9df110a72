"""Fixtures that several test modules share."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_support import Chain, a_state, ckptz, write_plain

# A shell starts background jobs with SIGINT ignored, and the programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# fsync is slow, and no test cuts the power. Tests of the call itself replace this function.
os.fsync = lambda descriptor: None

# Slow files run first, or one worker would be busy with them after the others have ended. test_front_doors.py
# comes before all others: it forks processes that train, which a process that has already trained cannot do.
LONG = ("test_front_doors.py", "test_interrupts.py", "test_search_files.py", "test_store_remote.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules marked `apps` if these are deselected, so that no framework is imported."""
    if "not apps" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return bool(re.search(r"^pytestmark = .*pytest\.mark\.apps", collection_path.read_text(), re.M)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the slow files first."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="module")
def deltas_at_any_cost() -> Iterator[None]:
    """Store files strictly by `full_every`, even where a delta does not pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptz.run.chain.weighed", lambda rule, *_: rule)
        yield


@pytest.fixture(scope="module", params=["subnormals kept", "subnormals flushed"])
def flush_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module's tests twice: torch's switch changes the processor mode for numpy and numba too."""
    import torch  # here, because most tests do not need it

    flushing = request.param == "subnormals flushed"
    if flushing and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path / "run")
    chain.folder.mkdir()
    write_plain(chain.first, a_state(), {"step": "1"})
    write_plain(chain.second, a_state(drift=0.01), {"step": "2"})
    ckptz("compress", chain.first, chain.second, "--chain", "--jobs", 1)
    return chain
