"""Every command of the pages runs in a folder with the files that it names."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptz import Checkpointer, KeepPolicy
from ckptz_cli.main import main
from tests.support.cli_support import ckptz
from tests.support.spec_support import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("", "bash", "console")  # languages of fenced blocks
CELL = re.compile(r"^\| `(ckptz [a-z-]+ [^`]*)` \|", re.MULTILINE)
SPAN = re.compile(r"`(ckptz [a-z][a-z-]+[^`]*)`")
PROGRAMS = ("ckptz", "pip", "make", "python")
NETWORK = ("pip install",)  # commands that tests cannot run
PLACEHOLDER = re.compile(r"\b[A-Z_]{3,}\b|\b[AB]\b|NAME\*|\.\.\.")  # placeholders that readers replace

QUALITY = """
import torch

def loss(state):
    return 1 + float(state["w"].square().mean()) / 10

def logits(state):
    return state["w"][:32] * 100

def resume(state, n_steps):
    weight = next(value for name, value in state.items() if value.shape == (64, 96) and "exp" not in name)
    return float(weight.square().mean()) * (1 + 10 / n_steps)
"""


def commands_in(text: str) -> list[str]:
    """List the command lines without placeholders in a block, or in a cell of a table."""
    lines = (line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.split(" ")[0] in PROGRAMS and not PLACEHOLDER.search(line)]


def blocks() -> Iterator[Any]:
    """Yield the commands of each block of each page, which run one after another."""
    for page in PAGES:
        text = page.read_text("utf-8")
        code_blocks = [code for language, code in BLOCK.findall(text) if language in SHELLS]
        for commands in map(commands_in, [*code_blocks, *CELL.findall(text)]):
            if commands:
                yield pytest.param(page.name, commands, id=f"{page.name}: {commands[0]}")


def arguments(command: str) -> list[str]:
    """Split a command as a shell does, with quotes, comments and patterns; s3:// becomes memory://."""
    command = command.replace("s3://", "memory://")
    words: list[str] = []
    for word in shlex.split(command, comments=True):
        paths = sorted(str(path) for path in Path().glob(word)) if "*" in word and "'" not in word else []
        words += paths or [word]
    return words


# --- files that the commands need -----------------------------------------------------------------


def weights(step: int) -> dict[str, np.ndarray]:
    rng, changes = np.random.default_rng(7), np.random.default_rng(step)
    weight = rng.standard_normal((64, 96), np.float32) + changes.normal(0, 1e-4, (64, 96)).astype(np.float32)
    return {"w": weight}


def write_weights(name: str, step: int = 0) -> None:
    save_file(weights(step), f"{name}.safetensors")


def write_project() -> None:
    """Write checkpoints and evaluations."""
    for name in ("model", "step-1", "step-0200", "step-100"):
        write_weights(name)
    for name in ("step-2", "step-0240", "step-200"):
        write_weights(name, 1)
    Path("my_project").mkdir()
    for name in ("evaluate.py", "f.py", "my_project/quality.py"):
        Path(name).write_text(QUALITY)


def write_optimizer() -> None:
    torch = pytest.importorskip("torch")
    moments = {"step": torch.tensor(9.0)} | {f"exp_avg{end}": torch.rand(64, 96) for end in ("", "_sq")}
    torch.save({"state": {0: moments}, "param_groups": [{"params": [0]}]}, "adam.pt")


def write_report_files() -> None:
    write_project()
    for name, step in (("run", 0), ("run-a", 0), ("run-b", 1)):
        Path(name).mkdir()
        ckptz(
            "compress",
            f"step-{1 + step}.safetensors",
            "-o",
            f"{name}/step-{step}.ckptz",
            "--set",
            f"input.step={step}",
        )
    ckptz("compress", "step-1.safetensors", "-o", "a.ckptz")
    ckptz("compress", "step-2.safetensors", "-o", "b.ckptz", "--base", "a.ckptz")
    search = ckptz("compress", "model.safetensors", "--eval", "evaluate.py:loss", "--budget", "1%", "--json")
    Path("search.json").write_text(search.stdout)


def write_runs() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 96)
    for folder in ("run", "resumed"):
        with Checkpointer(folder, model, keep=KeepPolicy(last=None)) as checkpointer:
            for step in (1000, 2000, 5000, 6000):
                checkpointer.save(step)


def publish_weights() -> None:
    from ckptz.sync import Publisher

    torch = pytest.importorskip("torch")
    publisher = Publisher("run/weights", full_every=10)
    for step in range(10, 21):
        publisher.publish({name: torch.from_numpy(value) for name, value in weights(step).items()}, step=step)


def write_framework_folders() -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    from ckptz.integrations.dcp import CkptzStorageWriter

    for step in (100, 150):
        state = {name: torch.from_numpy(value) for name, value in weights(step).items()}
        dcp.save(state, storage_writer=CkptzStorageWriter(f"run/step-{step}"), no_dist=True)
    for step in (60, 120, 180, 240):
        folder = Path(f"checkpoint-{step}")
        folder.mkdir()
        write_weights(f"checkpoint-{step}/model", step)
        write_optimizer()
        Path("adam.pt").rename(folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text("{}")


def write_compressed_model() -> None:
    write_project()
    Path("packed").mkdir()
    ckptz("compress", "model.safetensors", "-o", "packed/model.ckptz")


PREPARED: dict[str, Callable[[], None]] = {
    "search.md": lambda: (write_project(), write_optimizer())[0],
    "report.md": write_report_files,
    "frameworks.md": write_framework_folders,
    "training.md": write_runs,
    "weight-sync.md": publish_weights,
    "transformers.md": write_compressed_model,
}


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "commands"), list(blocks()))
def test_the_commands_of_every_page_run(
    page: str, commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    PREPARED.get(page, write_project)()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        program, *words = arguments(command)
        if program == "ckptz":
            ckptz(*words)
        elif program == "make":
            assert words[0] in targets, command
        elif program == "python":
            assert (ROOT / words[0]).is_file(), command  # other tests run it
        else:
            assert command.startswith(NETWORK), command


def verbs() -> dict[str, set[str]]:
    context = click.Context(main)
    options = {}
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        params = command.get_params(context)
        options[name] = {option for param in params for option in (*param.opts, *param.secondary_opts)}

    return options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_options_that_pages_name_exist(page: Path) -> None:
    options_by_verb = verbs()
    for span in SPAN.findall(page.read_text("utf-8")):
        _, verb, *words = span.replace("...", "").split()
        assert verb in options_by_verb, span
        options = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert not options - options_by_verb[verb] - {"--help", "--json"}, span
