"""The cases of the corpus: every kind of file that ckptz writes, through public interfaces only.

A case reads inputs from the folder `data` and writes to its own folder `out`. The table lists all files in
`out` except those of other software.
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


def run(line: str, out: Path, data: Path, exit_code: int = 0) -> str:
    """Run a command line with the folders {out} and {data} filled in; return its standard output."""
    words = [word.format(out=out, data=data) for word in line.split()]
    result = CliRunner().invoke(main, [*words, *([] if words[0] == "prune" else ["--jobs", str(JOBS)])])
    assert result.exit_code == exit_code, f"{line}: {result.exit_code} {result.output} {result.exception!r}"
    return result.stdout


def compress(out: Path, data: Path, rows: Mapping[str, str]) -> None:
    """Compress once for each row of an output name and its inputs and options."""
    for name, options in rows.items():
        run(f"compress {options} -o {{out}}/{name}.ckptz", out, data)


# --- the command line -----------------------------------------------------------------------------------


@case
def tools(out: Path, data: Path) -> None:
    """Output of other software that the bytes of files depend on; if it differs, other cases will."""
    text = (data / "evaluate.py").read_bytes()
    (out / "zlib").write_bytes(zlib.compress(text, 9))
    (out / "zstd").write_bytes(zstandard.ZstdCompressor(9).compress(text))
    (out / "torch").write_text(".".join(torch.__version__.split(".")[:2]))


@case
def inputs(out: Path, data: Path) -> None:
    for path in sorted(data.iterdir()):
        if path.suffix == ".safetensors" and path.is_file():
            shutil.copyfile(path, out / path.name)


@case
def lossless(out: Path, data: Path) -> None:
    compress(out, data, {f"kinds-{step}": f"{{data}}/kinds-{step}.safetensors" for step in range(2)})
    compress(
        out,
        data,
        {"adam": "{data}/adam-0.safetensors --set input.step=7 --set input.tensor_roles={data}/roles.toml"},
    )


@case
def lossless_deltas(out: Path, data: Path) -> None:
    for kind in ("kinds", "adam"):
        steps = " ".join(f"{{data}}/{kind}-{step}.safetensors" for step in range(N_STEPS))
        run(f"compress {steps} --chain -o {{out}}", out, data)
    compress(out, data, {"far": "{data}/kinds-3.safetensors --base {out}/kinds-0.ckptz --set input.step=3"})
    compress(out, data, {"plain-base": "{data}/kinds-1.safetensors --base {data}/kinds-0.safetensors"})


GRADIENTS = "--set guide.sensitivity={data}/gradients.safetensors"
MOMENTS = "--set guide.moments_from={data}/adam-0.safetensors"
KMEANS = {
    **{f"levels-{n}": f"--set levels={n}" for n in (2, 4, 16, 32, 255)},
    "prune": "--set prune=0.3 --set layer_prune=[['head',0],['attention',0.5]]",
    "protect-0": "--set protect=0",
    "protect-bf16": "--set levels=8 --set protect=0.02 --set protect_as=bf16",
    "embedding": "--set levels=8 --set embedding_levels=64 --set input.tensor_roles={data}/roles.toml",
    "gradients": f"--set prune=0.2 --set prune_by=sensitivity --set protect_by=sensitivity {GRADIENTS}",
    "either": f"--set protect_by=either {GRADIENTS}",
    "optimizer": f"--set prune=0.2 --set prune_by=sensitivity {MOMENTS}",
}


@case
def kmeans(out: Path, data: Path) -> None:
    source = "{data}/weights-0.safetensors --method kmeans"
    compress(out, data, {name: f"{source} {options}" for name, options in KMEANS.items()})
    compress(out, data, {"kinds": "{data}/kinds-0.safetensors --method kmeans --set levels=8"})
    compress(
        out,
        data,
        {"adam": "{data}/adam-0.safetensors --method kmeans --set prune=0.1 --set prune_by=sensitivity"},
    )


@case
def kmeans_deltas(out: Path, data: Path) -> None:
    steps = " ".join(f"{{data}}/weights-{step}.safetensors" for step in range(N_STEPS))
    run(f"compress {steps} --chain --method kmeans --set levels=16 --set prune=0.1 -o {{out}}", out, data)
    more = f"--method kmeans --set levels=4 {GRADIENTS} --set protect_by=sensitivity"
    compress(out, data, {"other": f"{{data}}/weights-1.safetensors --base {{out}}/weights-0.ckptz {more}"})
    compress(out, data, {"exact": "{data}/weights-1.safetensors --base {out}/weights-0.ckptz"})


GRID = {
    "reference": "adam-0.safetensors",
    "coarse": "adam-0.safetensors --set step=4 --set dead_zone=0.5",
    "fine": "adam-0.safetensors --set step=0.05 --set dead_zone=0",
    "weights": "weights-0.safetensors",
    **{name: f"{name}.safetensors" for name in ("sgd", "rmsprop", "adafactor", "lion")},
    "kinds": "kinds-0.safetensors",
    "moments-from": "weights-0.safetensors --set guide.moments_from={data}/adam-0.safetensors",
    "gradients": "weights-0.safetensors --set guide.sensitivity={data}/gradients.safetensors",
}


@case
def grid(out: Path, data: Path) -> None:
    compress(out, data, {name: f"--method grid {{data}}/{row}" for name, row in GRID.items()})


@case
def grid_deltas(out: Path, data: Path) -> None:
    for kind, options in {
        "adam": "",
        "weights": "--set guide.sensitivity={data}/gradients.safetensors",
    }.items():
        steps = " ".join(f"{{data}}/{kind}-{step}.safetensors" for step in range(N_STEPS))
        run(f"compress {steps} --chain --method grid {options} -o {{out}}", out, data)
    base = "--method grid --base {out}/adam-0.ckptz"
    compress(out, data, {"finer": f"{{data}}/adam-2.safetensors --set step=0.5 {base}"})


@case
def grid_calibrated(out: Path, data: Path) -> None:
    """Rounding with calibrations, which depends on BLAS through Cholesky factors and matrix products."""
    calibrated = "--method grid --set guide.calibration={data}/calibration.safetensors"
    compress(out, data, {"step-0": f"{{data}}/adam-0.safetensors {calibrated}"})
    compress(out, data, {"step-1": f"{{data}}/adam-1.safetensors --base {{out}}/step-0.ckptz {calibrated}"})
    seed()
    options: dict[str, Any] = {"config": Grid(moments=None), "background": False, "jobs": JOBS}
    path = data / "calibration.safetensors"
    with Checkpointer(out / "run", Net(), calibration=path, **options) as checkpointer:
        checkpointer.save(1)


SEARCHES = {  # options of each search, by output name
    "kmeans-guided": "--method kmeans --budget 0.01 --set search.max_evaluations=12",
    "kmeans-gradients": f"--method kmeans --budget 0.5% --set search.max_evaluations=6 {GRADIENTS}",
    "grid": "--budget 0.01",
    "grid-logits": "--eval {data}/evaluate.py:logits --budget kl<=1e-4 --budget loss<=0.01",
}


@case
def searches(out: Path, data: Path) -> None:
    for name, row in SEARCHES.items():
        line = f"compress {{data}}/weights-0.safetensors --eval {{data}}/evaluate.py:loss {row}"
        report = run(f"{line} --json -o {{out}}/{name}.ckptz", out, data)
        with tempfile.TemporaryDirectory() as folder:  # it contains times
            report_path = Path(folder) / "report.json"
            report_path.write_text(report)
            compress(
                out, data, {f"{name}-replayed": f"{{data}}/weights-1.safetensors --config {report_path}"}
            )
    resume = (
        "--method grid --eval {data}/evaluate.py:resume --budget resume<=0.5% --set search.resume_steps=2"
    )
    compress(out, data, {"grid-resume": f"{{data}}/adam-0.safetensors {resume}"})
    unmet = "--method kmeans --eval {data}/evaluate.py:loss --budget 0 --set search.max_evaluations=2"
    line = f"compress {{data}}/weights-0.safetensors {unmet} -o {{out}}/unmet.ckptz"
    run(line, out, data, exit_code=6)


@case
def later_searches(out: Path, data: Path) -> None:
    for method in ("kmeans", "grid"):
        compress(out, data, {f"{method}-0": f"{{data}}/weights-0.safetensors --method {method}"})
        line = f"{{data}}/weights-1.safetensors --base {{out}}/{method}-0.ckptz --method {method}"
        search = "--eval {data}/evaluate.py:loss --budget 0.5% --set search.max_evaluations=6"
        taken = "--eval {data}/evaluate.py:loss --set search.max_evaluations=0"
        compress(out, data, {f"{method}-1": f"{line} {search}"})
        compress(out, data, {f"{method}-taken": f"{line} {taken}"})


@case
def torch_files(out: Path, data: Path) -> None:
    steps = " ".join(f"{{data}}/nested-{step}.pt" for step in range(N_STEPS))
    run(f"compress {steps} --chain -o {{out}}", out, data)
    for method in ("kmeans", "grid"):
        compress(out, data, {method: f"{{data}}/nested-0.pt --method {method}"})
    compress(out, data, {"grid-delta": "{data}/nested-1.pt --method grid --base {out}/grid.ckptz"})
    run("restore {out}/nested-1.ckptz -o {out}/restored.pt", out, data)
    run("restore {out}/nested-1.ckptz --to safetensors -o {out}/restored.safetensors", out, data)
    run("restore {out}/nested-1.ckptz --to dcp -o {out}/restored", out, data)
    (out / "restored" / ".metadata").unlink()  # a file of torch with a path and a random token


@case
def joined(out: Path, data: Path) -> None:
    pair = "{data}/model.pt --optimizer {data}/optimizer.pt"
    compress(
        out, data, {"lossless": pair, "grid": f"{pair} --method grid", "kmeans": f"{pair} --method kmeans"}
    )
    compress(out, data, {"delta": f"{pair} --base {{out}}/lossless.ckptz"})
    run("restore {out}/lossless.ckptz -o {out}/restored", out, data)


@case
def folders(out: Path, data: Path) -> None:
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        for method in ("lossless", "kmeans", "grid"):
            target = f"{{out}}/{method}{suffix}"
            run(f"compress {{data}}/folder{suffix} --method {method} -o {target}", out, data)
        run(f"restore {{out}}/lossless{suffix}/{stem}.ckptz -o {{out}}/restored{suffix}", out, data)
    for method in ("lossless", "grid"):
        run(f"compress {{data}}/dcp --method {method} -o {{out}}/dcp-{method}.ckptz", out, data)


@case
def verbs(out: Path, data: Path) -> None:
    for method in ("lossless", "kmeans", "grid"):
        folder = f"{{out}}/{method}"
        (out / method).mkdir()
        steps = [
            f"compress {{data}}/adam-{s}.safetensors --set input.step={s} -o {folder}/{s}.ckptz"
            for s in range(4)
        ]
        for step, line in enumerate(steps):
            base = f"--base {folder}/{step - 1}.ckptz" if step else ""
            run(f"{line} {base} --method {method}", out, data)
        shutil.copyfile(out / method / "2.ckptz", out / method / "2-again.ckptz")
        run(f"rebase {folder}/3.ckptz -o {folder}/3-alone.ckptz", out, data)
        run(f"rebase {folder}/2-again.ckptz", out, data)
        run(f"restore {folder}@3 -o {folder}/3.safetensors", out, data)
        run(f"restore {folder}/2.ckptz -o {folder}/2.safetensors", out, data)
        run(f"restore {folder}/0.ckptz -o {folder}/0.safetensors", out, data)


# --- Python ---------------------------------------------------------------------------------------------

CONFIGS = {
    "lossless": Lossless(),
    "sparse": Lossless(sparse=True),
    "kmeans": KMeans(levels=8, prune=0.1),
    "grid": Grid(step=2.0),
}


@case
def saved_files(out: Path, data: Path) -> None:
    for name, config in CONFIGS.items():
        for step in range(3):
            base = out / f"{name}-{step - 1}.ckptz" if step else None
            state = state_of(step, ("exp_avg", "exp_avg_sq"))
            state["token.weight"] = np.where(
                bell(3, 128, 64) < 10**5, arrays()["token.weight"], state["token.weight"]
            )
            path = out / f"{name}-{step}.ckptz"
            ckptz.numpy.save_file(state, path, {"step": str(step)}, config=config, base=base, jobs=JOBS)
    strided = {
        "f": np.asfortranarray(floats(1, 70, 80)),
        "s": floats(2, 90, 90)[::2, ::3],
        "b": bell(1, 40).astype(">i4"),
    }
    (out / "strided.ckptz").write_bytes(ckptz.numpy.save(strided, jobs=JOBS))
    values = torch.from_numpy(floats(5, 60, 70))
    types = ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool", "complex64")
    tensors = {name: values.to(getattr(torch, name)) for name in types}
    ckptz.torch.save_file(tensors, out / "torch.ckptz", jobs=JOBS)
    net = Net()
    net.attn.weight = torch.nn.Parameter(net.up.weight[:96].T.contiguous().T)
    net.head.bias = net.up.bias
    ckptz.torch.save_model(net, out / "model.ckptz", jobs=JOBS)


@case
def eight_bit(out: Path, data: Path) -> None:
    row, column = np.arange(192)[:, None], np.arange(160)
    for step in range(2):
        wave = sum(
            np.int64(np.rint(40 * np.sin(0.7 * (k + step + 1) * row) * np.cos(1.3 * k * column)))
            for k in range(3)
        )
        codes = {f"w.state{n}": np.uint8((128 + wave + bell(n, 192, 160) // 10**4) % 256) for n in (1, 2)}
        codes |= {f"w.absmax{n}": floats(n, 120) for n in (1, 2)}
        for effort in ("fast", "default", "small"):
            base = out / f"{effort}-0.ckptz" if step else None
            ckptz.numpy.save_file(codes, out / f"{effort}-{step}.ckptz", base=base, effort=effort, jobs=JOBS)


@case
def published(out: Path, data: Path) -> None:
    for is_smallest in (False, True):
        folder = out / ("smallest" if is_smallest else "quick")
        publisher = Publisher(folder, full_every=3, keep_full=None, smallest=is_smallest, jobs=JOBS)
        for step in range(1, 6):
            moved = {name: np.where(bell(step, *a.shape) > 99000, a + a, a) for name, a in arrays().items()}
            publisher.publish({name: torch.from_numpy(a) for name, a in moved.items()}, step)


def seed() -> None:
    """Seed the random generators, whose states checkpoints store."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def train(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set a network and its optimizer to their values at a step."""
    later = Net(step)
    with torch.no_grad():
        for mine, its in zip(net.parameters(), later.parameters(), strict=True):
            mine.copy_(its)
    for state, its in zip(optimizer.state.values(), adam(later, step).state.values(), strict=True):
        state.update(its)


@case
def checkpointers(out: Path, data: Path) -> None:
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
        with Checkpointer(out / name, net, optimizer, **options) as checkpointer:
            for step in range(1, 7):
                train(net, optimizer, step)
                checkpointer.save(step, metric=1 / step)
    run("prune {out}/plain-grid --keep-last 2", out, data)


@case
def checkpointer_budget(out: Path, data: Path) -> None:
    seed()
    net = Net()
    exact = load_file(data / "weights-0.safetensors")["head.weight"]

    def share_kept(state: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.abs(state["head.weight"].numpy() - exact) < 0.002))}

    for name, config in {"grid": Grid(moments=None), "kmeans": KMeans()}.items():
        budget = Budget(share_kept, 0.05, lower_is_better=False)
        options: dict[str, Any] = {"config": config, "budget": budget, "background": False, "jobs": JOBS}
        with Checkpointer(out / name, net, **options) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step)


# --- frameworks -----------------------------------------------------------------------------------------

CHAIN = ChainOptions(full_every=3, jobs=JOBS)
CHAINS = {name: replace(CHAIN, config=CONFIGS[name]) for name in ("lossless", "kmeans", "grid")}


@case
def dcp_folders(out: Path, data: Path) -> None:
    for name, options in CHAINS.items():
        for step in range(N_STEPS):
            base = out / f"{name}-{step - 1}" if step else None
            writer = CkptzStorageWriter(out / f"{name}-{step}", options=options, base=base)
            dcp.save(nested(step), storage_writer=writer, no_dist=True)


@case
def sharded(out: Path, data: Path) -> None:
    seed()
    net = Net()
    optimizer = adam(net)
    writer = CkptzStorageWriter(options=CHAIN, keep_last=3)
    for step in (1, 2):
        train(net, optimizer, step)
        model, states = get_state_dict(net, optimizer)
        state = {"model": model, "optimizer": states, "extra": {}, "rng-0-of-1": random_state()}
        dcp.save(state, checkpoint_id=out / f"step-{step:08d}", storage_writer=writer, no_dist=True)


@case
def lightning(out: Path, data: Path) -> None:
    from ckptz.integrations.lightning import CkptzIO

    for name, config in CONFIGS.items():
        plugin = CkptzIO(config=config, full_every=3, jobs=JOBS)
        for step in range(N_STEPS):
            state = nested(step)
            checkpoint = {"state_dict": state["model"], "optimizer_states": [state["optimizer"]]}
            plugin.save_checkpoint(
                checkpoint | {"global_step": step, "extra": state["extra"]}, out / name / f"{step}.ckpt"
            )


@case
def accelerate(out: Path, data: Path) -> None:
    from accelerate import Accelerator

    from ckptz.integrations.accelerate import register

    accelerator = Accelerator(cpu=True)
    net, other = (accelerator.prepare(Net()) for _ in range(2))
    for name, options in CHAINS.items():
        registration = register(accelerator, options)
        for step in range(3):
            for model in (net, other):
                train(model, adam(model), step)
            accelerator.save_state(str(out / name / str(step)))
        registration.remove()


@case
def trainer(out: Path, data: Path) -> None:
    from transformers import BertConfig, BertModel, Trainer, TrainingArguments
    from transformers.utils import logging

    from ckptz.integrations.trainer import CkptzTrainerMixin

    logging.set_verbosity_error()

    class Saving(CkptzTrainerMixin, Trainer):
        """Trainer that saves checkpoints as `.ckptz` files, as users define it."""

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 80}
    for name, options in CHAINS.items():
        seed()
        model = BertModel(BertConfig(vocab_size=96, max_position_embeddings=16, **sizes))
        args = TrainingArguments(str(out / name), use_cpu=True, report_to=[])
        saving: Any = Saving(model=model, args=args, ckptz=options)
        saving.create_optimizer_and_scheduler(10)
        for step in range(3):
            for i, parameter in enumerate(model.parameters()):
                parameter.data = torch.from_numpy(floats(100 * i, *parameter.shape, step=step))
            saving.optimizer.state = adam(model, step).state
            saving.state.global_step = step
            folder = str(out / name / f"checkpoint-{step}")
            saving.save_model(folder, _internal_call=True)
            saving._save_optimizer_and_scheduler(folder)
            seed()
            saving._save_rng_state(folder)
            (Path(folder) / "config.json").unlink()  # of transformers, with its version


def write_all(names: list[str], folder: Path) -> None:
    """Run cases, each in the folder of its name below `folder`."""
    data = folder / "given"
    data.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_inputs(data)
        for name in names:
            (folder / name).mkdir()
            CASES[name](folder / name, data)
