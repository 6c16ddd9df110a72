"""Start-up: small work runs without compiled kernels, and kernels are cached in any writable folder."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptz.codec.registry import METHODS
from ckptz.format.frequency import encoding_tables
from ckptz.kernels import cache, plain
from ckptz.kernels.cache import NOTICE
from ckptz.verbs.warm_up import warm_up
from tests.support.cli_support import ckptz

ROOT = Path(__file__).parents[2]
NOTICE_AT_ONCE = "from ckptz.kernels import cache; cache.PATIENCE = 0; "  # print the notice at once
ONE_KERNEL = (
    f"{NOTICE_AT_ONCE}import numpy as np; from ckptz.kernels import compiled; "
    "compiled().histogram(np.zeros(4, np.uint8))"
)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the time spent in numpy kernels, as in a new process."""
    monkeypatch.setattr(plain, "_spent", [0.0])


@pytest.mark.usefixtures("nothing_compiled")
def test_little_work_is_done_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain.suffices()
    plain.rans_encode(*one_stream(9, 1))
    assert plain.suffices()
    monkeypatch.setattr(plain, "PATIENCE", plain._spent[0])
    assert not plain.suffices()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("call", ["long stream", "kernel without a numpy twin"])
def test_long_streams_and_kernels_without_a_numpy_twin_are_compiled(call: str) -> None:
    n = plain.MOST_SYMBOLS + 1
    if call == "long stream":
        plain.rans_encode(*one_stream(n, 32))
    else:
        plain.magnitudes(np.zeros(3, np.uint16))
    assert not plain.suffices()


WITHOUT_UNIX = """
import os, random, shutil, signal, subprocess, sys, tempfile, threading  # first: they support Windows
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for module, names in (
    (os, "preadv pread pwrite getuid geteuid posix_fadvise register_at_fork sched_getaffinity"),
    (os, "O_NOFOLLOW O_NONBLOCK O_CLOEXEC"),
    (signal, "SIGHUP SIGUSR1 SIGUSR2 SIGKILL"),
):
    for name in names.split():
        vars(module).pop(name, None)
import ckptz, ckptz.numpy, ckptz_cli.main
loaded = ckptz.numpy.load_file(sys.argv[1])
assert loaded["w"].tolist() == list(range(9)), loaded
with ckptz.safe_open(sys.argv[1], "numpy") as file:
    assert file.get_slice("w")[3:5].tolist() == [3, 4]
ckptz_cli.main.main(["restore", sys.argv[1], "-o", sys.argv[2]])
"""


def test_files_are_restored_without_unix_functions(tmp_path: Path) -> None:
    """Remove the modules and functions that Windows lacks."""
    save_file({"w": np.arange(9)}, tmp_path / "w.safetensors")
    ckptz("compress", tmp_path / "w.safetensors")
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", WITHOUT_UNIX, str(tmp_path / "w.ckptz"), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert load_file(out)["w"].tolist() == list(range(9))


def one_stream(n: int, n_lanes: int) -> tuple[np.ndarray[tuple[int, ...], Any], ...]:
    table = np.zeros((1, 256), np.uint16)
    table[0, :2] = 2048
    zero, end = np.zeros(1, np.int64), np.array([n])
    return (
        *(np.zeros(n, np.uint8), zero, np.array([1]), end, zero),
        *(encoding_tables(table), np.array([n_lanes]), np.zeros(0, np.uint8), zero),
    )


@pytest.fixture
def unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make the usual cache folders unwritable, and use `tmp_path` for temporary files."""
    (tmp_path / "a file").touch()
    monkeypatch.setattr(cache, "_usual", lambda: [tmp_path / "a file" / "kernels"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache.writable_folder.cache_clear()
    yield
    cache.writable_folder.cache_clear()


@pytest.mark.usefixtures("unwritable_cache")
def test_kernels_are_cached_in_a_private_temporary_folder(tmp_path: Path) -> None:
    folder = tmp_path / f"ckptz-kernels-{os.getuid()}"
    assert cache.writable_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert str(folder) in cache.note()


@pytest.mark.usefixtures("unwritable_cache")
@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_folder_that_others_may_fill_is_not_used(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / f"ckptz-kernels-{os.getuid()}"
    if kind == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    assert cache.writable_folder() is None
    assert "NUMBA_CACHE_DIR" in cache.note()


def copy_package(package: Path) -> dict[str, str]:
    """Copy the package with fixed file times; return the environment of processes that use the copy."""
    shutil.copytree(ROOT / "ckptz", package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.rglob("*.py"):
        os.utime(path, (1, 1))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NUMBA_", "XDG_"))}
    return environment | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}


def stderr_of(environment: dict[str, str], code: str = ONE_KERNEL) -> str:
    """Run code that uses a kernel in a new process; return its standard error."""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert not process.returncode, process.stderr
    return process.stderr


@pytest.mark.apps
@pytest.mark.parametrize("where", ["beside the package", "NUMBA_CACHE_DIR"])
def test_a_copy_of_the_package_uses_cached_kernels_until_it_changes(where: str, tmp_path: Path) -> None:
    first, again = copy_package(tmp_path / "first" / "ckptz"), copy_package(tmp_path / "again" / "ckptz")
    if where == "NUMBA_CACHE_DIR":
        first["NUMBA_CACHE_DIR"] = again["NUMBA_CACHE_DIR"] = str(tmp_path / "kernels")
    assert NOTICE in stderr_of(first)
    if where == "beside the package":
        kernels = Path("ckptz", "kernels", "__pycache__")
        shutil.copytree(tmp_path / "first" / kernels, tmp_path / "again" / kernels)
    assert not stderr_of(again)
    with (tmp_path / "again" / "ckptz" / "kernels" / "floats.py").open("a") as changed:
        changed.write("# more\n")
    assert NOTICE in stderr_of(again)  # any file of the folder: kernels may inline it


@pytest.mark.apps
def test_kernels_of_a_folder_that_cannot_be_written_are_used(tmp_path: Path) -> None:
    environment = copy_package(tmp_path / "ckptz") | {"NUMBA_CACHE_DIR": str(tmp_path / "image")}
    assert NOTICE in stderr_of(environment)
    only_read = "from ckptz.kernels import cache; cache._is_writable = lambda folder: False; "
    assert not stderr_of(environment | {"TMPDIR": str(tmp_path)}, only_read + ONE_KERNEL)


@pytest.mark.apps
def test_a_full_disk_caches_no_kernel_and_causes_no_error(tmp_path: Path) -> None:
    environment = copy_package(tmp_path / "ckptz") | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    full = (
        "import errno; from ckptz.kernels import cache\n"
        "def full(self, key, data): raise OSError(errno.ENOSPC, 'no space')\n"
        "cache.caching.IndexDataCacheFile.save = full\n"
    )
    assert NOTICE in stderr_of(environment, full + ONE_KERNEL)
    assert list(Path(tmp_path, "kernels").rglob("*.nbc")) == []
    assert not stderr_of(environment)  # compiles again; the notice is printed once per folder
    assert list(Path(tmp_path, "kernels").rglob("*.nbc"))


@pytest.mark.apps
def test_the_notice_is_printed_only_after_seconds_of_compiling(tmp_path: Path) -> None:
    environment = copy_package(tmp_path / "ckptz") | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    assert not stderr_of(environment, ONE_KERNEL.removeprefix(NOTICE_AT_ONCE))
    late = NOTICE_AT_ONCE.replace("= 0", "= 2") + "from ckptz.kernels import clock; clock.exclude(2); "
    other = ONE_KERNEL.removeprefix(NOTICE_AT_ONCE).replace(
        "histogram(np.zeros(4, np.uint8))", "magnitudes(np.zeros(4, np.uint16))"
    )
    assert NOTICE in stderr_of(environment, late + other)


@pytest.mark.apps
def test_reported_speeds_exclude_the_time_of_compiling(tmp_path: Path) -> None:
    environment = copy_package(tmp_path / "ckptz") | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    code = (
        f"{NOTICE_AT_ONCE}import time; from ckptz.kernels.clock import working_seconds; "
        "import ckptz.kernels.codec_cpu as k, numpy as np; from ckptz.kernels import compiled; compiled(); "
        "real, worked = time.perf_counter(), working_seconds(); k.histogram(np.zeros(4, np.uint8)); "
        "assert working_seconds() - worked < (time.perf_counter() - real) / 2"
    )
    assert NOTICE in stderr_of(environment, code)


def copy_unwritable(folder: Path) -> dict[str, str]:
    """Copy the package to where not even root can write kernels beside it; return the environment."""
    environment = copy_package(folder / "ckptz")
    (folder / "ckptz" / "kernels" / "__pycache__").touch()
    (folder / "tmp").mkdir()
    return environment | {"HOME": "/dev/null", "TMPDIR": str(folder / "tmp")}


@pytest.mark.apps
def test_without_a_writable_home_or_package_the_notice_names_the_folder(
    tmp_path: Path,
) -> None:
    environment = copy_unwritable(tmp_path)
    first, second = stderr_of(environment), stderr_of(environment)
    assert first.count("\n") == 1
    assert str(tmp_path / "tmp") in first
    assert not second  # uses the kernels of the first process


def test_a_warm_up_uses_kernels_of_every_method_and_names_their_folder() -> None:
    ready = warm_up(jobs=1)
    assert set(METHODS) <= set(ready.methods)
    assert Path(ready.folder).is_dir()
    line = ckptz("warm-up", "--jobs", 1).stdout
    assert line.startswith("kernels of lossless, kmeans, grid, sparse compiled, cached in ")


@pytest.mark.slow
def test_nothing_is_compiled_after_a_warm_up(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    rng = np.random.default_rng(0)
    for step in range(2):
        weights = {"w": rng.standard_normal((1200, 1000)).astype(np.float32)}
        save_file(weights, tmp_path / f"step-{step}.safetensors")
    files = [str(tmp_path / f"step-{step}.safetensors") for step in range(2)]
    lines = ""
    for words in (
        ("warm-up",),
        ("compress", *files, "--chain", "-o", str(tmp_path / "lossless")),
        ("restore", str(tmp_path / "lossless" / "step-1.ckptz"), "--force"),
        ("compress", *files, "--chain", "-o", str(tmp_path / "kmeans"), "--method", "kmeans"),
        ("restore", str(tmp_path / "kmeans" / "step-1.ckptz"), "--force"),
    ):
        line = [sys.executable, "-m", "ckptz", *words]
        process = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
        lines += "" if words == ("warm-up",) else process.stderr
    assert NOTICE not in lines


@pytest.mark.apps
def test_a_processor_without_shuffles_codes_the_same_rans_streams(tmp_path: Path) -> None:
    test = [str(ROOT / "tests" / "kernels" / "test_kernels.py"), "-k", "rans_streams and kept"]
    environment = {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *test],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in run.stdout, run.stdout + run.stderr


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "garbage": lambda data: bytes(range(256)),
    "wrong type": lambda data: pickle.dumps(7),
    # pickle does not detect most flipped bits of machine code and of the index
    **{f"bit {seed}": lambda data, seed=seed: flipped(data, seed) for seed in range(5)},
    "unreadable": None,
}


def flipped(data: bytes, seed: int) -> bytes:
    at = int(np.random.default_rng(seed).integers(0, len(data)))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_cache_file_is_compiled_again_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes] | None, suffix: str
) -> None:
    with kernels_in(tmp_path, monkeypatch):
        values = np.arange(3)
        assert new_kernel().py_func(values[0]) == new_kernel()(values[0]) == 1
        (file,) = tmp_path.rglob(f"*.{suffix}")
        if damage is None:
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(damage(file.read_bytes()))
        for n_hits in (0, damage is not None):  # the file has been replaced
            again = new_kernel()
            assert again(values[0]) == 1
            assert sum(again.stats.cache_hits.values()) == n_hits


@pytest.mark.parametrize("unreadable", ["index", "kernel", "folder", "folder and index"])
def test_inaccessible_cache_files_cause_no_error(monkeypatch: pytest.MonkeyPatch, unreadable: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name, "kernels")
        folder.mkdir()
        with kernels_in(folder, monkeypatch):
            assert new_kernel()(0) == 1
            for path in folder.iterdir():
                is_shut = {".nbi": "index" in unreadable, ".nbc": unreadable == "kernel"}
                path.chmod(0 if is_shut[path.suffix] else 0o644)
            folder.chmod(0o555 if "folder" in unreadable else 0o777)
            is_root = os.geteuid() == 0
            if is_root:
                os.seteuid(65534)
            try:
                again = new_kernel()
                assert again(0) == 1
                assert bool(sum(again.stats.cache_hits.values())) == (unreadable == "folder")
                last = new_kernel()
                assert last(0) == 1
                assert bool(sum(last.stats.cache_hits.values())) == (unreadable != "folder and index")
            finally:
                if is_root:
                    os.seteuid(0)
                folder.chmod(0o777)


@contextmanager
def kernels_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cache kernels in this folder only."""
    with monkeypatch.context() as patched:
        patched.setattr(cache, "_usual", lambda: [folder])
        cache.writable_folder.cache_clear()
        yield
    cache.writable_folder.cache_clear()


def new_kernel() -> Any:
    """Return a kernel with an empty in-memory cache, as in a new process."""

    def plus_one(x: int) -> int:
        return x + 1

    kernel = numba.njit(plus_one)
    kernel._cache = cache.CachedKernels(plus_one)
    return kernel
