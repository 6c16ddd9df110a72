"""Installed packages: the built wheel and the editable tree, each in a separate environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptz._version import __version__

ROOT = Path(__file__).parents[2]
TREE = ("ckptz", "cli", "pyproject.toml", "README.md", "LICENSE")


INTERPRETERS = ("3.11", "3.12", "3.13")  # versions that the wheel supports


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the settings of this environment, require success, and return its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_", "NUMBA_"))}
    process = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout


@dataclass(frozen=True)
class Environment:
    """A new virtual environment with access to the installed dependencies, but not to ckptz."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        venv.create(folder, with_pip=False, symlinks=True)
        environment = cls(folder)
        # A folder that a .pth file names is searched last, and .pth files in it are not read. So the editable
        # install of the environment that runs this test stays out.
        environment.site_packages.joinpath("dependencies.pth").write_text(sysconfig.get_path("purelib"))
        return environment

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("[Ll]ib/**/site-packages"))

    def script(self, name: str) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / name

    def install(self, *arguments: str | Path) -> None:
        options = (
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--disable-pip-version-check",
        )
        pip = (sys.executable, "-m", "pip", "--python", self.script("python"), "install")
        run(*pip, *options, *arguments, cwd=self.folder)


def copy_tree(folder: Path) -> Path:
    """Copy the packages with their file times, so that compiled kernels stay valid."""
    folder.mkdir()
    for name in TREE:
        copy: Callable[..., object] = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    run(*build, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    folder = tmp_path_factory.mktemp(request.param)
    environment = Environment.create(folder / "environment")
    if request.param == "wheel":
        environment.install(wheel)
    else:
        environment.install("--editable", copy_tree(folder / "checkout"))
    return environment


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"ckptz-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ckptz", "ckptz_cli", info}
    assert {"ckptz/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


def test_the_first_page_has_no_links_that_lead_nowhere(wheel: Path) -> None:
    text = zipfile.ZipFile(wheel).read(f"ckptz-{__version__}.dist-info/METADATA").decode()
    page = text.partition("\n\n")[2]
    assert "# ckptz" in page
    assert "training" in page
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", page)
    for version in INTERPRETERS:
        assert f"Classifier: Programming Language :: Python :: {version}" in text


@pytest.mark.apps
def test_the_source_distribution_has_the_pages_and_the_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= names
    assert {"CONTRIBUTING.md", "README.md", "Makefile"} <= names
    assert {"tests/project/test_packaging.py", "cli/ckptz_cli/main.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build"))]


def test_an_installed_ckptz_does_not_use_the_source_tree(installed: Environment, tmp_path: Path) -> None:
    code = "import ckptz, ckptz_cli; print(ckptz.__file__, ckptz_cli.__file__, sep='\\n')"
    for line in run(installed.script("python"), "-c", code, cwd=tmp_path).split():
        assert not Path(line).resolve().is_relative_to(ROOT)
    assert f"{__version__}" in run(installed.script("ckptz"), "--version", cwd=tmp_path)
    assert "compress" in run(installed.script("ckptz"), "--help", cwd=tmp_path)


@pytest.mark.apps  # compiles all kernels
@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import ckptz.torch", "torch"),
        ("import ckptz.hooks", "torch"),
        ("import ckptz.sync", "torch"),
        ("from ckptz import Checkpointer", "torch"),
        ("import ckptz.integrations.lightning", "lightning"),
        ("import ckptz.integrations.trainer", "trainer"),
        ("import ckptz.integrations.accelerate", "accelerate"),
        ("import ckptz.integrations.transformers", "transformers"),
    ],
)
def test_a_missing_library_is_named_with_what_installs_it(code: str, extra: str) -> None:
    missing = ("torch", "lightning", "transformers", "accelerate", "huggingface_hub")
    setup = f"import sys; sys.modules.update(dict.fromkeys({missing}))"  # None: as if not installed
    process = subprocess.run([sys.executable, "-c", f"{setup}; {code}"], capture_output=True, text=True)
    assert process.stderr.rstrip().endswith(f"install it with: pip install 'ckptz[{extra}]'")


def test_an_installed_ckptz_round_trips_a_file(installed: Environment, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    save_file({"weights": weights}, tmp_path / "model.safetensors", metadata={"step": "7"})
    ckptz = installed.script("ckptz")
    run(ckptz, "compress", "model.safetensors", "-o", "model.ckptz", cwd=tmp_path)
    run(ckptz, "restore", "model.ckptz", "-o", "restored.safetensors", cwd=tmp_path)
    np.testing.assert_array_equal(load_file(tmp_path / "restored.safetensors")["weights"], weights)
    assert (tmp_path / "model.ckptz").stat().st_size < weights.nbytes


@pytest.mark.apps
@pytest.mark.parametrize("version", INTERPRETERS)
def test_the_wheel_works_with_every_version_that_it_names(version: str, wheel: Path, tmp_path: Path) -> None:
    """Install the wheel with the dependencies that pip selects for the version."""
    interpreter = shutil.which(f"python{version}")
    if (
        interpreter is None
        or subprocess.run([interpreter, "-V"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"there is no python{version} here")
    run(interpreter, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    environment = Environment(tmp_path / "environment")
    run(environment.script("python"), "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    test_an_installed_ckptz_round_trips_a_file(environment, tmp_path)
    assert run(environment.script("python"), "-m", "ckptz", "--version", cwd=tmp_path).startswith("ckptz ")
