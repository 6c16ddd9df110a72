"""Every command that the pages show runs here, in a folder with the files that it names."""

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
NETWORK = ("pip install",)  # the only commands that no test runs
A_WORD = re.compile(r"\b[A-Z_]{3,}\b|\b[AB]\b|NAME\*|\.\.\.")  # what stands for something of the reader's

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
    """Command lines of the reader's own in a block, or in a cell of a table."""
    lines = (line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.split(" ")[0] in PROGRAMS and not A_WORD.search(line)]


def blocks() -> Iterator[Any]:
    """The commands of each block of each page, which are typed one after another."""
    for page in PAGES:
        text = page.read_text("utf-8")
        found = [code for language, code in BLOCK.findall(text) if language in SHELLS]
        for commands in map(commands_in, [*found, *CELL.findall(text)]):
            if commands:
                yield pytest.param(page.name, commands, id=f"{page.name}: {commands[0]}")


def arguments(command: str) -> list[str]:
    """Split a command as a shell does: quotes, comments, and patterns of file names; s3 is memory here."""
    command = command.replace("s3://", "memory://")
    words: list[str] = []
    for word in shlex.split(command, comments=True):
        found = sorted(str(path) for path in Path().glob(word)) if "*" in word and "'" not in word else []
        words += found or [word]
    return words


# --- what the commands find -----------------------------------------------------------------------


def weights(step: int) -> dict[str, np.ndarray]:
    rng, moves = np.random.default_rng(7), np.random.default_rng(step)
    moved = rng.standard_normal((64, 96), np.float32) + moves.normal(0, 1e-4, (64, 96)).astype(np.float32)
    return {"w": moved}


def plain(name: str, step: int = 0) -> None:
    save_file(weights(step), f"{name}.safetensors")


def a_project() -> None:
    """Checkpoints, a quality, and an optimizer's state."""
    for name in ("model", "step-1", "step-0200", "step-100"):
        plain(name)
    for name in ("step-2", "step-0240", "step-200"):
        plain(name, 1)
    Path("my_project").mkdir()
    for name in ("evaluate.py", "f.py", "my_project/quality.py"):
        Path(name).write_text(QUALITY)


def an_optimizer() -> None:
    torch = pytest.importorskip("torch")
    moments = {"step": torch.tensor(9.0)} | {f"exp_avg{end}": torch.rand(64, 96) for end in ("", "_sq")}
    torch.save({"state": {0: moments}, "param_groups": [{"params": [0]}]}, "adam.pt")


def of_reports() -> None:
    a_project()
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
    found = ckptz("compress", "model.safetensors", "--eval", "evaluate.py:loss", "--budget", "1%", "--json")
    Path("search.json").write_text(found.stdout)


def of_runs() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 96)
    for folder in ("run", "resumed"):
        with Checkpointer(folder, model, keep=KeepPolicy(last=None)) as checkpointer:
            for step in (1000, 2000, 5000, 6000):
                checkpointer.save(step)


def of_weights() -> None:
    from ckptz.sync import Publisher

    torch = pytest.importorskip("torch")
    publisher = Publisher("run/weights", full_every=10)
    for step in range(10, 21):
        publisher.publish({name: torch.from_numpy(value) for name, value in weights(step).items()}, step=step)


def of_frameworks() -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    from ckptz.integrations.dcp import CkptzStorageWriter

    for step in (100, 150):
        state = {name: torch.from_numpy(value) for name, value in weights(step).items()}
        dcp.save(state, storage_writer=CkptzStorageWriter(f"run/step-{step}"), no_dist=True)
    for step in (60, 120, 180, 240):
        folder = Path(f"checkpoint-{step}")
        folder.mkdir()
        plain(f"checkpoint-{step}/model", step)
        an_optimizer()
        Path("adam.pt").rename(folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text("{}")


def of_transformers() -> None:
    a_project()
    Path("packed").mkdir()
    ckptz("compress", "model.safetensors", "-o", "packed/model.ckptz")


PREPARED: dict[str, Callable[[], None]] = {
    "search.md": lambda: (a_project(), an_optimizer())[0],
    "report.md": of_reports,
    "frameworks.md": of_frameworks,
    "training.md": of_runs,
    "weight-sync.md": of_weights,
    "transformers.md": of_transformers,
}


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "commands"), list(blocks()))
def test_the_commands_of_every_page_run(
    page: str, commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    PREPARED.get(page, a_project)()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        program, *words = arguments(command)
        if program == "ckptz":
            ckptz(*words)
        elif program == "make":
            assert words[0] in targets, command
        elif program == "python":
            assert (ROOT / words[0]).is_file(), command  # its own test runs it
        else:
            assert command.startswith(NETWORK), command


def verbs() -> dict[str, set[str]]:
    context = click.Context(main)
    found = {}
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        params = command.get_params(context)
        found[name] = {one for param in params for one in (*param.opts, *param.secondary_opts)}

    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_options_that_pages_speak_of_are_there(page: Path) -> None:
    known = verbs()
    for span in SPAN.findall(page.read_text("utf-8")):
        _, verb, *words = span.replace("...", "").split()
        assert verb in known, span
        options = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert not options - known[verb] - {"--help", "--json"}, span
