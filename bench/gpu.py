"""What the kernels for GPUs reach on one, beside their references; one arm a run, under eight minutes each.

    python -m bench.gpu tests|rans|path|delta|links|load|save|train [--gb N] [--parameters N] [--rounds N]
                        [--how coded|device|grid] [--any-device]

*tests*: the parity tests of all kernels and paths, and every test that needs a GPU. *rans*: exponents of
normal bf16 weights through the coder alone. *path*: lossless bf16, tensors in device memory to coded bytes
in pinned memory and back, beside a copy within the device. *delta*: weights of which one in five hundred
values has moved, to a file against the one before, back, and over live tensors, beside safetensors.
*links*: fp32 tensors to messages of fixed size and back. *load*: `load_file(device="cuda")` of files in the
page cache, lossless and on the grid, beside safetensors'. *save*: how long saves of fp32 weights with Adam's
state stop training, the device memory they take, and when they are written, beside DCP's async_save: lossless
as coded bytes, or as a copy within the device, or from such a copy on the grid (`--how`); the state is that
of bench.product.whole_state. *train*: 124 M parameters trained, saved and killed; the resumed losses beside
those of a run that nobody killed.

Raw bytes a second, the best round after one that warms up. `--any-device` tries an arm without a GPU, in
Triton's interpreter (TRITON_INTERPRET=1) and with tiny sizes: its figures say nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import ckptz.torch
from bench.core.measure import BENCH, Row, interleave, machine, parser_of, save_rows, timed, verdict, version
from bench.core.report import finish
from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, loss_of, read_corpus
from bench.product.whole_state import MOVED, SPREAD
from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy
from ckptz.codec.decode import Run
from ckptz.codec.frame import FrameHeader
from ckptz.codec.on_device import decode_runs
from ckptz.codec.plan import exact_plan
from ckptz.codec.units import CHUNK_UNITS
from ckptz.dtypes import dtype_of
from ckptz.encoding.draft import Draft
from ckptz.encoding.near import Resident
from ckptz.encoding.there import DEVICE_BYTES, There
from ckptz.entropy.frequency import normalise
from ckptz.entropy.streams import single
from ckptz.kernels import planes_on_gpu, rans_on_gpu
from ckptz.kernels.floats import ROTATED
from ckptz.methods.method import Method
from ckptz.parallel import Workers
from ckptz.training.checkpointer import SaveReport
from ckptz.wire import LinkPolicy, TensorLink, Tiled, TopK, Uniform, cap
from ckptz.wire.codecs import Codec
from ckptz.wire.header import Direction
from ckptz.wire.state import Place

GPT2_SMALL: Final = GPTConfig(n_layers=12, width=768, n_heads=12, context=512, vocabulary=25_600)  # 124 M
TRAIN_BATCH, KILLED_AT, N_STEPS, SHOWN = 16, 150, 200, (160, 180, 200)
GB: Final = 1e9
WIDTH: Final = 1024  # of made-up weights


def _synchronized(call: Callable[[], object], device: str) -> Callable[[], float]:
    """Time a call and all that it started on the device."""

    def run() -> float:
        _wait(device)
        return timed(lambda: (call(), _wait(device)))

    return run


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _speed(what: str, n_bytes: int, seconds: float, least: float | None, **more: object) -> Row:
    speed = n_bytes / seconds / GB
    target = "" if least is None else f"{least:g}"
    judged = "" if least is None else verdict(speed >= least)
    return {"what": what, "GB/s": f"{speed:.3g}", "target": target, "verdict": judged, **more}


def _weights(n: int, device: str) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.cat(
        [torch.randn(part, device=device).mul_(SPREAD).bfloat16() for part in _split(n, 1 << 28)]
    )


def _split(n: int, most: int) -> list[int]:
    return [min(most, n - begin) for begin in range(0, n, most)]


# --- arms ---------------------------------------------------------------------------------------


def rans(options: argparse.Namespace) -> list[Row]:
    """Code whole chunks of exponents, one table each, and decode them."""
    n = _multiple(options.gb * GB, options.chunk)
    weights = _weights(n, options.device).view(torch.uint16)
    plane = planes_on_gpu().split_planes(weights, weights, ROTATED)[1].contiguous()
    counts = planes_on_gpu().histograms(plane[None], options.chunk)[0].cpu().numpy()
    tables = np.stack([normalise(row.astype(np.int64)) for row in counts])
    n_streams = len(tables)
    n_codes = np.full(n_streams, options.chunk)
    ways = [single(table, options.chunk) for table in tables]
    streams = rans_on_gpu().joined(n_codes.cumsum() - n_codes, np.full(n_streams, 32), ways)
    words, states, n_words = rans_on_gpu().rans_encode(plane, streams, n_codes)
    lengths = n_words.cpu().numpy()
    decoded = torch.zeros_like(plane)

    def decode() -> torch.Tensor:
        given = words, n_codes.cumsum() - lengths, lengths, states
        whole: torch.Tensor = rans_on_gpu().rans_decode(*given, streams, decoded)
        return whole

    assert bool(decode().all())
    assert torch.equal(decoded, plane)
    cases = {
        "encode": _synchronized(lambda: rans_on_gpu().rans_encode(plane, streams, n_codes), options.device),
        "decode": _synchronized(decode, options.device),
        "copy": _synchronized(lambda: decoded.copy_(plane), options.device),
    }
    times = interleave(cases, options.rounds)
    ratio = f"{2 * lengths.sum() / n:.3f}"
    least = {"encode": 100.0, "decode": 200.0, "copy": None}
    return [_speed(name, n, times[name].best, least[name], **{"of raw": ratio}) for name in cases]


def path(options: argparse.Namespace) -> list[Row]:
    """Encode bf16 weights into pinned memory and decode them from there, within the default cap."""
    n = int(options.gb * GB / 2)
    weights, dtype = _weights(n, options.device), dtype_of("BF16")
    out = torch.empty_like(weights).view(torch.uint16)
    before = _allocated(options)
    with Workers() as workers:
        there = There(Resident.of(dtype, (n,), weights), None, {}, workers)
        encode = functools.partial(there.encoded, Draft(exact_plan(dtype)))
        source = encode()
        assert source is not None
        extra = _peak(options) - before
        header = FrameHeader(dtype, (n,), source.plan, tuple(chunk.record for chunk in source.chunks))
        payloads = [np.frombuffer(chunk.payload, np.uint8) for chunk in source.chunks]
        step = max(int(DEVICE_BYTES / (4 * options.chunk)), 1)

        def decode() -> None:
            for first in range(0, len(payloads), step):
                units = out[first * options.chunk : (first + step) * options.chunk]
                decode_runs([Run(header, first, payloads[first : first + step], units, _not_asked)])

        cases = {
            "compress": _synchronized(encode, options.device),
            "decompress": _synchronized(decode, options.device),
            "copy within the device": _synchronized(lambda: out.clone(), options.device),
        }
        times = interleave(cases, options.rounds)
    assert torch.equal(out, weights.view(torch.uint16))
    ratio = f"{sum(p.nbytes for p in payloads) / (2 * n):.3f}"
    least = {"compress": 60.0, "decompress": 120.0}
    copy = times["copy within the device"].best
    return [
        _speed(
            name,
            2 * n,
            times[name].best,
            least.get(name),
            **{
                "share of a copy": f"{copy / times[name].best:.2f}",
                "of raw": ratio,
                "extra MiB": extra >> 20,
            },
        )
        for name in cases
    ]


def _not_asked(index: int, units: object) -> None:
    raise AssertionError(f"chunk {index} is wrong")


def delta(options: argparse.Namespace) -> list[Row]:
    """Write, load and apply a delta; and load a plain file of the same."""
    n = int(options.gb * GB / 2)
    first = {f"layer.{i}": part for i, part in enumerate(_weights(n, options.device).chunk(24))}
    second = {name: torch.where(torch.rand_like(t) < 0.002, t * 1.01, t) for name, t in first.items()}
    with tempfile.TemporaryDirectory() as folder:
        base, made, plain = (Path(folder, name) for name in ("1.ckptz", "2.ckptz", "2.safetensors"))
        ckptz.torch.save_file(first, base)
        safetensors.torch.save_file(second, plain)

        def encode() -> None:
            ckptz.torch.save_file(second, made, base=base)

        def apply() -> None:
            for name, tensor in first.items():
                live[name].copy_(tensor)
            ckptz.torch.apply_(live, made)

        encode()
        live = {name: tensor.clone() for name, tensor in first.items()}
        apply()
        loaded = ckptz.torch.load_file(made, options.device)
        assert all(torch.equal(second[name], tensors[name]) for tensors in (live, loaded) for name in second)
        loaded.clear()
        calls: dict[str, Callable[[], object]] = {
            "save_file": encode,
            "load_file": lambda: ckptz.torch.load_file(made, options.device),
            "apply_": apply,
            "safetensors' load_file": lambda: safetensors.torch.load_file(plain, options.device),
        }
        cases = {name: _synchronized(call, options.device) for name, call in calls.items()}
        times = interleave(cases, options.rounds)
        ratio = f"{made.stat().st_size / (2 * n):.3f}"
    return [_speed(name, 2 * n, times[name].best, None, **{"of raw": ratio}) for name in cases]


def links(options: argparse.Namespace) -> list[Row]:
    """Encode tensors to whole messages, headers and checksums included; and encode and decode them."""
    x = torch.randn(max(int(options.gb * GB / 4096 / 4), 8), 4096, device=options.device)
    codecs: dict[str, Codec] = {f"{bits} bits": Uniform(bits) for bits in (8, 4, 2)}
    codecs |= {"Top 10 %": TopK(0.1), "tiles of 4 bits": Tiled(3.9375)}
    cases: dict[str, Callable[[], float]] = {}
    sizes = {}

    def trip(codec: Codec, is_received: bool) -> Callable[[], object]:
        fixed: Any = {"device": options.device, "fixed": True, "verify": "step", "use_torch": True}
        first, second = (TensorLink(0, 1, LinkPolicy(forward=codec), **fixed) for _ in range(2))
        steps = itertools.count()

        def run() -> object:
            place = Place(next(steps))
            message, _ = first.send(Direction.FORWARD, x, place)
            if is_received:
                message = second.receive(Direction.FORWARD, message, x.dtype, tuple(x.shape), place)
                second.link.check()
            return message

        return run

    for name, codec in codecs.items():
        sizes[name] = f"{cap(LinkPolicy(forward=codec), tuple(x.shape), 'F32') / x.nbytes:.3f}"
        cases[f"{name}: there"] = _synchronized(trip(codec, False), options.device)
        cases[f"{name}: there and back"] = _synchronized(trip(codec, True), options.device)
    times = interleave(cases, options.rounds)
    return [
        _speed(name, x.nbytes, times[name].best, None, **{"of raw": sizes[name.split(":")[0]]})
        for name in cases
    ]


def load(options: argparse.Namespace) -> list[Row]:
    """Load a plain file, a lossless one, one on the grid and a delta of it, all in the page cache."""
    n = _multiple(options.gb * GB / 2, 24 * WIDTH)
    parts = _weights(n, options.device).reshape(24, -1, WIDTH)
    tensors = {f"layer.{i}.weight": part.cpu() for i, part in enumerate(parts)}
    moved = {name: tensor * 1.05 for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{name}.ckptz") for name in ("lossless", "grid", "grid, a delta")}
        plain = Path(folder, "model.safetensors")
        safetensors.torch.save_file(tensors, plain)
        ckptz.torch.save_file(tensors, files["lossless"])
        ckptz.torch.save_file(tensors, files["grid"], config=Grid())
        ckptz.torch.save_file(moved, files["grid, a delta"], base=files["grid"], config=Grid())
        calls = {"safetensors": lambda: safetensors.torch.load_file(plain, options.device)}
        for what, file in files.items():
            calls[what] = functools.partial(ckptz.torch.load_file, file, options.device)
            loaded, host = calls[what](), ckptz.torch.load_file(file)
            assert all(torch.equal(loaded[name].cpu(), host[name]) for name in tensors)
            loaded.clear()
        cases = {what: _synchronized(call, options.device) for what, call in calls.items()}
        times = interleave(cases, options.rounds)
    plain_speed = 2 * n / times["safetensors"].best / GB
    least = {"lossless": float(f"{plain_speed:.3g}")}
    return [_speed(name, 2 * n, times[name].best, least.get(name)) for name in cases]


def save(options: argparse.Namespace) -> list[Row]:
    """Stop a loop for saves of a whole state; the second counts, which of the grid is a delta."""
    width = max(int((options.parameters / 16) ** 0.5), 64)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=options.device) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    raw, rows = 12 * sum(p.numel() for p in model.parameters()), list[Row]()
    with tempfile.TemporaryDirectory() as name:
        _age(model, optimizer, is_first=True)
        theirs, extra = _stalls_of_dcp(options, Path(name), model, optimizer)
        rows.append(_save_row("dcp.async_save", theirs, extra, raw))
        _age(model, optimizer, is_first=True)
        config = Grid() if options.how == "grid" else LOSSLESS
        stall, extra, report = _stalls_of_ckptz(options, Path(name), model, optimizer, config)
        # A copy within the device is what was asked for, and not extra.
        extra -= raw if options.how != "coded" else 0
        is_met = stall < min(0.3, theirs) and extra < 1 << 30
        if options.how == "grid":
            is_met &= raw / report.write_seconds >= 60 * GB
        rows.append(_save_row(f"ckptz, {options.how}", stall, extra, raw, report, verdict(is_met)))
    return rows


def _save_row(
    what: str, stall: float, extra: int, raw: int, report: SaveReport | None = None, judged: str = ""
) -> Row:
    return {
        "what": what,
        "raw GB": f"{raw / GB:.2f}",
        "stall ms": f"{1000 * stall:.0f}",
        "extra device MiB": extra >> 20,
        "smaller": "" if report is None else f"{raw / report.stored_bytes:.2f}x",
        "written after s": "" if report is None else f"{report.write_seconds:.1f}",
        "GB/s": "" if report is None else f"{raw / report.write_seconds / GB:.3g}",
        "verdict": judged,
    }


@torch.no_grad()
def _age(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
    """Give a model the state that bench.product.whole_state makes up, or that of a while later."""
    for parameter in model.parameters():
        own, normal = optimizer.state[parameter], functools.partial(torch.randn_like, parameter)
        if is_first:
            rows = torch.randn(len(parameter), 2, 1, device=parameter.device)
            parameter.copy_(SPREAD * torch.exp2(0.5 * rows[:, 0]) * normal())
            level = -24 + 2 * rows[:, 1] + normal()[:1] + 1.2 * normal()
            own["exp_avg_sq"].copy_(torch.exp2(level))
        else:
            parameter.add_(normal(), alpha=MOVED * SPREAD)
            own["exp_avg_sq"].mul_(torch.exp2(0.33 * normal()))
        own["exp_avg"].copy_(0.25 * own["exp_avg_sq"].sqrt() * normal())


def _stalls_of_ckptz(
    options: argparse.Namespace,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Method,
) -> tuple[float, int, SaveReport]:
    is_lossy = config.is_lossy
    settings: dict[str, Any] = {"keep": KeepPolicy(last=2 if is_lossy else 1, exact=0)}
    settings |= {"config": config, "anchor_every": 2 if is_lossy else 1, "jobs": os.cpu_count()}
    settings["snapshot"] = "coded" if options.how == "coded" else "device"
    with Checkpointer(folder / f"lossy-{is_lossy}", model, optimizer, **settings) as checkpointer:
        for step in (1, 2):
            before = _allocated(options)
            _wait(options.device)
            stall = timed(lambda at=step: checkpointer.save(at))
            extra = _peak(options) - before
            report = checkpointer.wait()
            assert report is not None
            print(f"step {step}: stall {stall:.3f} s, {report}", flush=True)
            if step == 1:
                _age(model, optimizer, is_first=False)
    return stall, extra, report


def _stalls_of_dcp(
    options: argparse.Namespace, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, int]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for _ in range(2):
        before = _allocated(options)
        _wait(options.device)
        begin = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=folder / "dcp")
        stall = time.perf_counter() - begin
        extra = _peak(options) - before
        future.result()
    return stall, extra


def train(options: argparse.Namespace) -> list[Row]:
    """Train in a process that is killed behind a save, resume in another, and in a third without a stop."""
    with tempfile.TemporaryDirectory() as folder:
        losses = {}
        for name, last, where in (
            ("killed", KILLED_AT, "run"),
            ("resumed", N_STEPS, "run"),
            ("never killed", N_STEPS, "whole"),
        ):
            out = Path(folder, f"{name}.txt")
            command = [sys.executable, "-m", "bench.gpu", "train", "--child", str(Path(folder, where))]
            command += ["--steps", str(last), "--losses", str(out)] + ["--any-device"] * options.any_device
            done = subprocess.run(command + ["--kill"] * (name == "killed"), check=False)
            assert done.returncode == (-signal.SIGKILL if name == "killed" else 0)
            if out.exists():
                losses[name] = dict(line.split() for line in out.read_text().splitlines())
    rows = []
    for step in SHOWN if not options.any_device else (KILLED_AT + 1,):
        resumed, whole = (float(losses[name][str(step)]) for name in ("resumed", "never killed"))
        is_close = abs(resumed - whole) <= 0.01 * whole  # sums on a GPU are not always taken in one order
        rows.append({"step": step, "resumed": resumed, "never killed": whole, "verdict": verdict(is_close)})
    return rows


def _child(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = GPTConfig(n_layers=1, width=32, n_heads=2) if options.any_device else GPT2_SMALL
    model = TinyGPT(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with Checkpointer(options.child, model, optimizer, anchor_every=1) as checkpointer:
        start = checkpointer.restore_latest() or 0
        data = batches(read_corpus()[0], batch=TRAIN_BATCH, context=config.context, seed=1, start=start)
        lines = []
        for step in range(start + 1, options.steps + 1):
            loss = loss_of(model, next(data).to(options.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lines.append(f"{step} {loss.item():.6f}")
        if options.kill:
            checkpointer.save(options.steps)
            print(checkpointer.wait(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        options.losses.write_text("\n".join(lines))


def tests(options: argparse.Namespace) -> list[Row]:
    """Run the parity tests of the kernels on this device, then all tests that need one."""
    rows = []
    for what, arguments in {
        "kernels": ["-m", "apps", "tests/test_triton.py"],
        "files": ["-m", "apps", *map(str, BENCH.parent.glob("tests/test_on_device_*.py"))],
        "gpu": ["-m", "gpu"],
    }.items():
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        if options.any_device:
            command += ["-k", "xxh64 or room"]
        done = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, check=False)
        print(done.stdout[-6000:], flush=True)
        last = done.stdout.strip().splitlines()[-1]
        rows.append({"tests": what, "result": last, "verdict": verdict(done.returncode == 0)})
    return rows


# --- the device ---------------------------------------------------------------------------------


def _multiple(n: float, size: int) -> int:
    return max(int(n) // size, 1) * size


def _allocated(options: argparse.Namespace) -> int:
    if options.device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(options: argparse.Namespace) -> int:
    return torch.cuda.max_memory_allocated() if options.device == "cuda" else 0


ARMS: Final = {arm.__name__: arm for arm in (tests, rans, path, delta, links, load, save, train)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--gb", type=float, default=1.0, help="raw bytes, in units of 10^9")
    parser.add_argument("--parameters", type=float, default=1.5e9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--how", choices=("coded", "device", "grid"), default="coded", help="of save")
    parser.add_argument("--any-device", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=N_STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = "cpu" if options.any_device else "cuda"
    options.chunk = 640 if options.any_device and options.arm == "rans" else CHUNK_UNITS
    if not options.any_device and not torch.cuda.is_available():
        sys.exit("bench.gpu: no CUDA device; --any-device tries the arms without one")
    if options.child:
        _child(options)
        return
    rows = ARMS[options.arm](options)
    if options.any_device:
        print(*rows, sep="\n")
        return
    name = f"gpu_{options.arm}" + f"_{options.how}" * (options.arm == "save")
    save_rows(name, rows)
    gpu = torch.cuda.get_device_name()
    finish(name, machine(triton=version("triton")) | {"gpu": gpu}, rows)


if __name__ == "__main__":
    main()
