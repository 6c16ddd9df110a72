"""The cases of the corpus: every kind of file that ckptz writes, through its public doors only.

A case writes into its own folder `here`, from the inputs in the folder `given`. What it leaves there, but for
other software's files, is listed.
"""

import os
import random
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from click.testing import CliRunner
from corpus_inputs import N_STEPS, Net, adam, arrays, bell, floats, nested, state_of, write_inputs
from safetensors.numpy import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckptz.numpy
import ckptz.torch
from ckptz import Budget, Checkpointer, Grid, KeepPolicy, KMeans, Lossless
from ckptz.integrations.dcp import ChainOptions, CkptzStorageWriter
from ckptz.sync import Publisher
from ckptz.training.state import random_state
from ckptz_cli.main import main

JOBS = int(os.environ.get("CORPUS_JOBS", "1"))


CASES: dict[str, Callable[[Path, Path], None]] = {}


def case(write: Callable[[Path, Path], None]) -> None:
    """Register a case under its function's name."""
    CASES[write.__name__.replace("_", "-")] = write


def run(line: str, here: Path, given: Path, exit_code: int = 0) -> str:
    """Run a command line of words, in which {here} and {given} stand for folders; gives its output."""
    words = [word.format(here=here, given=given) for word in line.split()]
    result = CliRunner().invoke(main, [*words, *([] if words[0] == "prune" else ["--jobs", str(JOBS)])])
    assert result.exit_code == exit_code, f"{line}: {result.exit_code} {result.output} {result.exception!r}"
    return result.stdout


def compress(here: Path, given: Path, rows: Mapping[str, str]) -> None:
    """Compress for each row: the name of what is written, and the inputs with the options."""
    for name, options in rows.items():
        run(f"compress {options} -o {{here}}/{name}.ckptz", here, given)


# --- the command line -----------------------------------------------------------------------------------


@case
def tools(here: Path, given: Path) -> None:
    """Other software that bytes depend on: where these differ, others will."""
    text = (given / "evaluate.py").read_bytes()
    (here / "zlib").write_bytes(zlib.compress(text, 9))
    (here / "zstd").write_bytes(zstandard.ZstdCompressor(9).compress(text))
    (here / "torch").write_text(".".join(torch.__version__.split(".")[:2]))


@case
def inputs(here: Path, given: Path) -> None:
    for path in sorted(given.iterdir()):
        if path.suffix == ".safetensors" and path.is_file():
            shutil.copyfile(path, here / path.name)


@case
def lossless(here: Path, given: Path) -> None:
    compress(here, given, {f"kinds-{step}": f"{{given}}/kinds-{step}.safetensors" for step in range(2)})
    compress(
        here,
        given,
        {"adam": "{given}/adam-0.safetensors --set input.step=7 --set input.tensor_roles={given}/roles.toml"},
    )


@case
def lossless_deltas(here: Path, given: Path) -> None:
    for kind in ("kinds", "adam"):
        steps = " ".join(f"{{given}}/{kind}-{step}.safetensors" for step in range(N_STEPS))
        run(f"compress {steps} --chain -o {{here}}", here, given)
    compress(
        here, given, {"far": "{given}/kinds-3.safetensors --base {here}/kinds-0.ckptz --set input.step=3"}
    )
    compress(here, given, {"plain-base": "{given}/kinds-1.safetensors --base {given}/kinds-0.safetensors"})


GRADIENTS = "--set guide.sensitivity={given}/gradients.safetensors"
MOMENTS = "--set guide.moments_from={given}/adam-0.safetensors"
KMEANS = {
    **{f"levels-{n}": f"--set levels={n}" for n in (2, 4, 16, 32, 255)},
    "prune": "--set prune=0.3 --set layer_prune=[['head',0],['attention',0.5]]",
    "protect-0": "--set protect=0",
    "protect-bf16": "--set levels=8 --set protect=0.02 --set protect_as=bf16",
    "embedding": "--set levels=8 --set embedding_levels=64 --set input.tensor_roles={given}/roles.toml",
    "gradients": f"--set prune=0.2 --set prune_by=sensitivity --set protect_by=sensitivity {GRADIENTS}",
    "either": f"--set protect_by=either {GRADIENTS}",
    "optimizer": f"--set prune=0.2 --set prune_by=sensitivity {MOMENTS}",
}


@case
def kmeans(here: Path, given: Path) -> None:
    source = "{given}/weights-0.safetensors --method kmeans"
    compress(here, given, {name: f"{source} {options}" for name, options in KMEANS.items()})
    compress(here, given, {"kinds": "{given}/kinds-0.safetensors --method kmeans --set levels=8"})
    compress(
        here,
        given,
        {"adam": "{given}/adam-0.safetensors --method kmeans --set prune=0.1 --set prune_by=sensitivity"},
    )


@case
def kmeans_deltas(here: Path, given: Path) -> None:
    steps = " ".join(f"{{given}}/weights-{step}.safetensors" for step in range(N_STEPS))
    run(f"compress {steps} --chain --method kmeans --set levels=16 --set prune=0.1 -o {{here}}", here, given)
    more = f"--method kmeans --set levels=4 {GRADIENTS} --set protect_by=sensitivity"
    compress(
        here, given, {"other": f"{{given}}/weights-1.safetensors --base {{here}}/weights-0.ckptz {more}"}
    )
    compress(here, given, {"exact": "{given}/weights-1.safetensors --base {here}/weights-0.ckptz"})


GRID = {
    "reference": "adam-0.safetensors",
    "coarse": "adam-0.safetensors --set step=4 --set dead_zone=0.5",
    "fine": "adam-0.safetensors --set step=0.05 --set dead_zone=0",
    "weights": "weights-0.safetensors",
    **{name: f"{name}.safetensors" for name in ("sgd", "rmsprop", "adafactor", "lion")},
    "kinds": "kinds-0.safetensors",
    "moments-from": "weights-0.safetensors --set guide.moments_from={given}/adam-0.safetensors",
    "gradients": "weights-0.safetensors --set guide.sensitivity={given}/gradients.safetensors",
}


@case
def grid(here: Path, given: Path) -> None:
    compress(here, given, {name: f"--method grid {{given}}/{row}" for name, row in GRID.items()})


@case
def grid_deltas(here: Path, given: Path) -> None:
    for kind, options in {
        "adam": "",
        "weights": "--set guide.sensitivity={given}/gradients.safetensors",
    }.items():
        steps = " ".join(f"{{given}}/{kind}-{step}.safetensors" for step in range(N_STEPS))
        run(f"compress {steps} --chain --method grid {options} -o {{here}}", here, given)
    base = "--method grid --base {here}/adam-0.ckptz"
    compress(here, given, {"finer": f"{{given}}/adam-2.safetensors --set step=0.5 {base}"})


@case
def grid_calibrated(here: Path, given: Path) -> None:
    """Rounding by Cholesky factors: products of matrices."""
    calibrated = "--method grid --set guide.calibration={given}/calibration.safetensors"
    compress(here, given, {"step-0": f"{{given}}/adam-0.safetensors {calibrated}"})
    compress(
        here, given, {"step-1": f"{{given}}/adam-1.safetensors --base {{here}}/step-0.ckptz {calibrated}"}
    )
    seed()
    options: dict[str, Any] = {"config": Grid(moments=None), "background": False, "jobs": JOBS}
    path = given / "calibration.safetensors"
    with Checkpointer(here / "run", Net(), calibration=path, **options) as checkpointer:
        checkpointer.save(1)


SEARCHES = {  # a search, by the name of its file
    "kmeans-guided": "--method kmeans --budget 0.01 --set search.max_evaluations=12",
    "kmeans-gradients": f"--method kmeans --budget 0.5% --set search.max_evaluations=6 {GRADIENTS}",
    "grid": "--budget 0.01",
    "grid-logits": "--eval {given}/evaluate.py:logits --budget kl<=1e-4 --budget loss<=0.01",
}


@case
def searches(here: Path, given: Path) -> None:
    for name, row in SEARCHES.items():
        line = f"compress {{given}}/weights-0.safetensors --eval {{given}}/evaluate.py:loss {row}"
        report = run(f"{line} --json -o {{here}}/{name}.ckptz", here, given)
        with tempfile.TemporaryDirectory() as folder:  # times stand in it
            found = Path(folder) / "found.json"
            found.write_text(report)
            compress(here, given, {f"{name}-replayed": f"{{given}}/weights-1.safetensors --config {found}"})
    resume = (
        "--method grid --eval {given}/evaluate.py:resume --budget resume<=0.5% --set search.resume_steps=2"
    )
    compress(here, given, {"grid-resume": f"{{given}}/adam-0.safetensors {resume}"})
    unmet = "--method kmeans --eval {given}/evaluate.py:loss --budget 0 --set search.max_evaluations=2"
    line = f"compress {{given}}/weights-0.safetensors {unmet} -o {{here}}/unmet.ckptz"
    run(line, here, given, exit_code=6)


@case
def later_searches(here: Path, given: Path) -> None:
    for method in ("kmeans", "grid"):
        compress(here, given, {f"{method}-0": f"{{given}}/weights-0.safetensors --method {method}"})
        line = f"{{given}}/weights-1.safetensors --base {{here}}/{method}-0.ckptz --method {method}"
        search = "--eval {given}/evaluate.py:loss --budget 0.5% --set search.max_evaluations=6"
        taken = "--eval {given}/evaluate.py:loss --set search.max_evaluations=0"
        compress(here, given, {f"{method}-1": f"{line} {search}"})
        compress(here, given, {f"{method}-taken": f"{line} {taken}"})


@case
def torch_files(here: Path, given: Path) -> None:
    steps = " ".join(f"{{given}}/nested-{step}.pt" for step in range(N_STEPS))
    run(f"compress {steps} --chain -o {{here}}", here, given)
    for method in ("kmeans", "grid"):
        compress(here, given, {method: f"{{given}}/nested-0.pt --method {method}"})
    compress(here, given, {"grid-delta": "{given}/nested-1.pt --method grid --base {here}/grid.ckptz"})
    run("restore {here}/nested-1.ckptz -o {here}/restored.pt", here, given)
    run("restore {here}/nested-1.ckptz --to safetensors -o {here}/restored.safetensors", here, given)
    run("restore {here}/nested-1.ckptz --to dcp -o {here}/restored", here, given)
    (here / "restored" / ".metadata").unlink()  # torch's own file: its path and a random number stand in it


@case
def joined(here: Path, given: Path) -> None:
    pair = "{given}/model.pt --optimizer {given}/optimizer.pt"
    compress(
        here, given, {"lossless": pair, "grid": f"{pair} --method grid", "kmeans": f"{pair} --method kmeans"}
    )
    compress(here, given, {"delta": f"{pair} --base {{here}}/lossless.ckptz"})
    run("restore {here}/lossless.ckptz -o {here}/restored", here, given)


@case
def folders(here: Path, given: Path) -> None:
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        for method in ("lossless", "kmeans", "grid"):
            out = f"{{here}}/{method}{suffix}"
            run(f"compress {{given}}/folder{suffix} --method {method} -o {out}", here, given)
        run(f"restore {{here}}/lossless{suffix}/{stem}.ckptz -o {{here}}/restored{suffix}", here, given)
    for method in ("lossless", "grid"):
        run(f"compress {{given}}/dcp --method {method} -o {{here}}/dcp-{method}.ckptz", here, given)


@case
def verbs(here: Path, given: Path) -> None:
    for method in ("lossless", "kmeans", "grid"):
        folder = f"{{here}}/{method}"
        (here / method).mkdir()
        steps = [
            f"compress {{given}}/adam-{s}.safetensors --set input.step={s} -o {folder}/{s}.ckptz"
            for s in range(4)
        ]
        for step, line in enumerate(steps):
            base = f"--base {folder}/{step - 1}.ckptz" if step else ""
            run(f"{line} {base} --method {method}", here, given)
        shutil.copyfile(here / method / "2.ckptz", here / method / "2-again.ckptz")
        run(f"rebase {folder}/3.ckptz -o {folder}/3-alone.ckptz", here, given)
        run(f"rebase {folder}/2-again.ckptz", here, given)
        run(f"restore {folder}@3 -o {folder}/3.safetensors", here, given)
        run(f"restore {folder}/2.ckptz -o {folder}/2.safetensors", here, given)
        run(f"restore {folder}/0.ckptz -o {folder}/0.safetensors", here, given)


# --- Python ---------------------------------------------------------------------------------------------

CONFIGS = {
    "lossless": Lossless(),
    "sparse": Lossless(sparse=True),
    "kmeans": KMeans(levels=8, prune=0.1),
    "grid": Grid(step=2.0),
}


@case
def saved_files(here: Path, given: Path) -> None:
    for name, config in CONFIGS.items():
        for step in range(3):
            base = here / f"{name}-{step - 1}.ckptz" if step else None
            state = state_of(step, ("exp_avg", "exp_avg_sq"))
            state["token.weight"] = np.where(
                bell(3, 128, 64) < 10**5, arrays()["token.weight"], state["token.weight"]
            )
            path = here / f"{name}-{step}.ckptz"
            ckptz.numpy.save_file(state, path, {"step": str(step)}, config=config, base=base, jobs=JOBS)
    strided = {
        "f": np.asfortranarray(floats(1, 70, 80)),
        "s": floats(2, 90, 90)[::2, ::3],
        "b": bell(1, 40).astype(">i4"),
    }
    (here / "strided.ckptz").write_bytes(ckptz.numpy.save(strided, jobs=JOBS))
    values = torch.from_numpy(floats(5, 60, 70))
    types = ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool", "complex64")
    tensors = {name: values.to(getattr(torch, name)) for name in types}
    ckptz.torch.save_file(tensors, here / "torch.ckptz", jobs=JOBS)
    net = Net()
    net.attn.weight = torch.nn.Parameter(net.up.weight[:96].T.contiguous().T)
    net.head.bias = net.up.bias
    ckptz.torch.save_model(net, here / "model.ckptz", jobs=JOBS)


@case
def eight_bit(here: Path, given: Path) -> None:
    row, column = np.arange(192)[:, None], np.arange(160)
    for step in range(2):
        wave = sum(
            np.int64(np.rint(40 * np.sin(0.7 * (k + step + 1) * row) * np.cos(1.3 * k * column)))
            for k in range(3)
        )
        codes = {f"w.state{n}": np.uint8((128 + wave + bell(n, 192, 160) // 10**4) % 256) for n in (1, 2)}
        codes |= {f"w.absmax{n}": floats(n, 120) for n in (1, 2)}
        for effort in ("fast", "default", "small"):
            base = here / f"{effort}-0.ckptz" if step else None
            ckptz.numpy.save_file(codes, here / f"{effort}-{step}.ckptz", base=base, effort=effort, jobs=JOBS)


@case
def published(here: Path, given: Path) -> None:
    for is_smallest in (False, True):
        folder = here / ("smallest" if is_smallest else "quick")
        publisher = Publisher(folder, full_every=3, keep_full=None, smallest=is_smallest, jobs=JOBS)
        for step in range(1, 6):
            moved = {name: np.where(bell(step, *a.shape) > 99000, a + a, a) for name, a in arrays().items()}
            publisher.publish({name: torch.from_numpy(a) for name, a in moved.items()}, step)


def seed() -> None:
    """Set the random states, which checkpoints keep."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def train(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give a net and its optimizer the values of a step."""
    later = Net(step)
    with torch.no_grad():
        for mine, its in zip(net.parameters(), later.parameters(), strict=True):
            mine.copy_(its)
    for state, its in zip(optimizer.state.values(), adam(later, step).state.values(), strict=True):
        state.update(its)


@case
def checkpointers(here: Path, given: Path) -> None:
    configs = {**CONFIGS, "plain-grid": Grid(moments=None)}
    del configs["sparse"]
    for name, config in configs.items():
        seed()
        net = Net()
        optimizer, numbers = adam(net), torch.Generator().manual_seed(3)
        options: dict[str, Any] = {
            "config": config,
            "extra": {"numbers": numbers, "seen": {"n": 5}},
            "jobs": JOBS,
        }
        options |= {"full_every": 4, "keep": KeepPolicy(last=None), "background": name == "lossless"}
        with Checkpointer(here / name, net, optimizer, **options) as checkpointer:
            for step in range(1, 7):
                train(net, optimizer, step)
                checkpointer.save(step, metric=1 / step)
    run("prune {here}/plain-grid --keep-last 2", here, given)


@case
def checkpointer_budget(here: Path, given: Path) -> None:
    seed()
    net = Net()
    exact = load_file(given / "weights-0.safetensors")["head.weight"]

    def share_kept(state: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.abs(state["head.weight"].numpy() - exact) < 0.002))}

    for name, config in {"grid": Grid(moments=None), "kmeans": KMeans()}.items():
        budget = Budget(share_kept, 0.05, lower_is_better=False)
        options: dict[str, Any] = {"config": config, "budget": budget, "background": False, "jobs": JOBS}
        with Checkpointer(here / name, net, **options) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step)


# --- frameworks -----------------------------------------------------------------------------------------

CHAIN = ChainOptions(full_every=3, jobs=JOBS)
CHAINS = {name: replace(CHAIN, config=CONFIGS[name]) for name in ("lossless", "kmeans", "grid")}


@case
def dcp_folders(here: Path, given: Path) -> None:
    for name, options in CHAINS.items():
        for step in range(N_STEPS):
            base = here / f"{name}-{step - 1}" if step else None
            writer = CkptzStorageWriter(here / f"{name}-{step}", options=options, base=base)
            dcp.save(nested(step), storage_writer=writer, no_dist=True)


@case
def sharded(here: Path, given: Path) -> None:
    seed()
    net = Net()
    optimizer = adam(net)
    writer = CkptzStorageWriter(options=CHAIN, keep_last=3)
    for step in (1, 2):
        train(net, optimizer, step)
        model, states = get_state_dict(net, optimizer)
        state = {"model": model, "optimizer": states, "extra": {}, "rng-0-of-1": random_state()}
        dcp.save(state, checkpoint_id=here / f"step-{step:08d}", storage_writer=writer, no_dist=True)


@case
def lightning(here: Path, given: Path) -> None:
    from ckptz.integrations.lightning import CkptzIO

    for name, config in CONFIGS.items():
        plugin = CkptzIO(config=config, full_every=3, jobs=JOBS)
        for step in range(N_STEPS):
            state = nested(step)
            checkpoint = {"state_dict": state["model"], "optimizer_states": [state["optimizer"]]}
            plugin.save_checkpoint(
                checkpoint | {"global_step": step, "extra": state["extra"]}, here / name / f"{step}.ckpt"
            )


@case
def accelerate(here: Path, given: Path) -> None:
    from accelerate import Accelerator

    from ckptz.integrations.accelerate import register

    accelerator = Accelerator(cpu=True)
    net, other = (accelerator.prepare(Net()) for _ in range(2))
    for name, options in CHAINS.items():
        registration = register(accelerator, options)
        for step in range(3):
            for model in (net, other):
                train(model, adam(model), step)
            accelerator.save_state(str(here / name / str(step)))
        registration.remove()


@case
def trainer(here: Path, given: Path) -> None:
    from transformers import BertConfig, BertModel, Trainer, TrainingArguments
    from transformers.utils import logging

    from ckptz.integrations.trainer import CkptzTrainerMixin

    logging.set_verbosity_error()

    class Saving(CkptzTrainerMixin, Trainer):
        """What users write."""

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 80}
    for name, options in CHAINS.items():
        seed()
        model = BertModel(BertConfig(vocab_size=96, max_position_embeddings=16, **sizes))
        args = TrainingArguments(str(here / name), use_cpu=True, report_to=[])
        saving: Any = Saving(model=model, args=args, ckptz=options)
        saving.create_optimizer_and_scheduler(10)
        for step in range(3):
            for i, parameter in enumerate(model.parameters()):
                parameter.data = torch.from_numpy(floats(100 * i, *parameter.shape, step=step))
            saving.optimizer.state = adam(model, step).state
            saving.state.global_step = step
            folder = str(here / name / f"checkpoint-{step}")
            saving.save_model(folder, _internal_call=True)
            saving._save_optimizer_and_scheduler(folder)
            seed()
            saving._save_rng_state(folder)
            (Path(folder) / "config.json").unlink()  # of transformers, with its version


def write_all(names: list[str], folder: Path) -> None:
    """Run cases, each in a folder of its name."""
    given = folder / "given"
    given.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_inputs(given)
        for name in names:
            (folder / name).mkdir()
            CASES[name](folder / name, given)
