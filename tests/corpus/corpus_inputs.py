"""The inputs of the corpus, computed from integers and single float operations: equal on every machine."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ckptz.hooks import Calibration, SensitivityTracker

Array = np.ndarray[Any, Any]
Row = tuple[str, Array]  # dtype name of the format, and an array of the dtype or of its bit patterns
CODES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
N_STEPS = 4


def bell(seed: int, *shape: int) -> Array:
    """Return bell-shaped integers within +-131070: sums of four 16-bit numbers minus their mean."""
    raw = (
        np.random.PCG64(seed).random_raw(int(np.prod(shape))).astype("<u8")
    )  # numpy guarantees its random stream
    return raw.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64).reshape(shape) - 131070


def floats(seed: int, *shape: int, step: int = 0) -> Array:
    """Return float32 weights with rows of different magnitudes, which change slightly with `step`."""
    scales = np.ldexp(0.03 / 131070, bell(seed + 1, *shape[:1]) // 65536)
    moved = (
        4096 * bell(seed, *shape) + 7 * step * bell(seed + 2, *shape) + step * bell(seed + 2 + step, *shape)
    )
    return (moved / 4096 * scales.reshape(-1, *[1] * (len(shape) - 1))).astype(np.float32)


class Net(nn.Module):
    """Network with every type of layer and the weights of a step; its output only serves calibration."""

    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.token = nn.Embedding(128, 64)
        self.attn, self.up, self.head = nn.Linear(64, 96), nn.Linear(64, 128), nn.Linear(64, 80, bias=False)
        self.conv, self.ln = nn.Conv2d(16, 32, 3), nn.LayerNorm(64)
        for i, parameter in enumerate(self.parameters()):
            values = floats(100 * i, *parameter.shape, step=step)
            parameter.data, parameter.grad = torch.from_numpy(values), torch.from_numpy(np.sign(values) / 64)

    def forward(self, x: torch.Tensor) -> None:
        for layer in (self.attn, self.up, self.head):
            layer(x)


def adam(net: nn.Module, step: int = 0) -> torch.optim.AdamW:
    """Return an AdamW optimizer of a network, with moments."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for i, parameter in enumerate(net.parameters()):
        seed, shape = 5000 + 100 * i, parameter.shape
        first = floats(seed, *shape, step=step) * np.float32(0.01)
        second = np.square(floats(seed + 50, *shape, step=step) * np.float32(0.01)) + np.float32(1e-12)
        moments = {"exp_avg": torch.from_numpy(first), "exp_avg_sq": torch.from_numpy(second)}
        optimizer.state[parameter] = {"step": torch.tensor(1.0 + step), **moments}
    return optimizer


def arrays(step: int = 0) -> dict[str, Array]:
    """Return the weights of a step by name."""
    return {name: tensor.numpy() for name, tensor in Net(step).state_dict().items()}


def state_of(step: int, words: Iterable[str]) -> dict[str, Array]:
    """Return weights, and optimizer state under the given keys of optimizers."""
    net = Net(step)
    optimizer, state = adam(net, step), arrays(step)
    for name, parameter in net.named_parameters():
        values = {word: tensor.numpy() for word, tensor in optimizer.state[parameter].items()}
        values["momentum_buffer"], values["square_avg"] = values["exp_avg"], values["exp_avg_sq"]
        if parameter.ndim == 2:
            values["exp_avg_sq_row"] = np.ascontiguousarray(values["exp_avg_sq"][:, 0])
            values["exp_avg_sq_col"] = np.ascontiguousarray(values["exp_avg_sq"][0])
        state |= {f"optimizer.{name}.{word}": values[word] for word in words if word in values}
    return state


def kinds(step: int = 0) -> dict[str, Row]:
    """Return tensors of every dtype, and empty, scalar, constant, sparse and NaN tensors."""
    n, weights = 3000, floats(7, 3000, step=step)
    small = bell(9, n)
    rows: dict[str, Row] = {"F32": ("F32", weights), "F64": ("F64", weights.astype("<f8") / 3)}
    rows["BF16"] = ("BF16", (weights.view("<u4") >> 16).astype("<u2"))
    rows |= {"F16": ("F16", weights.astype("<f2")), "BOOL": ("BOOL", small > step)}
    for code in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"):
        rows[code] = (code, (small // 2048 + step).astype("u1"))
    rows["F4"], rows["C64"] = ("F4", small[:1000].astype("u1")), ("C64", weights.view("<c8"))
    for word, code in (("i", "I"), ("u", "U")):
        rows |= {
            f"{code}{8 * b}": (f"{code}{8 * b}", (small // 500 + step).astype(f"<{word}{b}"))
            for b in (1, 2, 4, 8)
        }
    rows["sparse"] = ("U8", np.where(small % 97 == 0, small % 251, 0).astype("u1"))
    rows["scalar"], rows["empty"] = (
        ("F16", np.float16(1.5)[None].reshape(())),
        ("F32", np.zeros((0, 7), "f4")),
    )
    rows["odd"] = ("F32", np.array([0x7FC00001, 0xFF800123, 0x80000000, 0x7F800000], "<u4"))
    rows |= {"zeros": ("I32", np.zeros(n, "<i4")), "random": ("U64", np.random.PCG64(3).random_raw(500))}
    rows["long"] = ("BF16", (floats(8, 300, 4000).view("<u4") >> 16).astype("<u2"))  # more than a chunk
    return rows


def write_plain(
    path: Path, rows: Mapping[str, Row | Array], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a safetensors file by its specification."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts: list[bytes] = []
    for name, row in rows.items():
        code, array = row if isinstance(row, tuple) else (CODES[row.dtype.name], row)
        shape = [2 * array.size] if code == "F4" else list(array.shape)
        begin = sum(map(len, parts))
        parts.append(array.tobytes())
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, begin + len(parts[-1])]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    return path


EVALUATION = """
import math
import torch
from safetensors.torch import load_file
from pathlib import Path

EXACT = load_file(Path(__file__).parent / "weights-0.safetensors")

def loss(state):  # sums that are rounded once do not depend on the machine
    errors = math.fsum(square(t.double() - EXACT[n].double()) for n, t in state.items() if n in EXACT)
    return 2 + round(errors / math.fsum(map(square, EXACT.values())), 9)

def square(tensor):
    return math.fsum(tensor.double().square().flatten().tolist())

def logits(state):
    return state["head.weight"][:20, :8].float().clone()

def resume(state, n_steps):
    return loss(state)
"""


def write_guides(folder: Path) -> None:
    """Write files of the hooks: gradients of two steps, and sums over two batches of small integers."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with SensitivityTracker(net, beta=0.5) as tracker:
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad = torch.from_numpy(bell(1, *parameter.shape).astype(np.float32) / 4096)
        optimizer.step()
    tracker.save(folder / "gradients.safetensors")
    calibration = Calibration(net)
    with calibration:
        for seed in (1, 2):
            net(torch.from_numpy((bell(seed, 200, 64) // 16384).astype(np.float32)))
    calibration.save(folder / "calibration.safetensors")


def write_shards(folder: Path, suffix: str, step: int) -> None:
    """Write a Hugging Face folder of two shards (safetensors or torch files) and another file."""
    stem, shard_of = ("model" if suffix == ".safetensors" else "pytorch_model"), {}
    for i, part in enumerate((("token", "attn"), ("up", "head", "conv", "ln"))):
        name = f"{stem}-{i + 1:05d}-of-00002{suffix}"
        rows = {n: a for n, a in arrays(step).items() if n.split(".")[0] in part}
        shard_of |= dict.fromkeys(rows, name)
        folder.mkdir(parents=True, exist_ok=True)
        if suffix == ".safetensors":
            write_plain(folder / name, rows, {"format": "pt"})
        else:
            torch.save({n: torch.from_numpy(a) for n, a in rows.items()}, folder / name)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": shard_of}, indent=1))
    (folder / "config.json").write_text('{"model_type": "none"}\n')


def nested(step: int = 0) -> dict[str, Any]:
    """Return a state for a torch file: two states, a shared tensor, a view, and values of every kind."""
    net = Net(step)
    long = torch.from_numpy(floats(4, 50, 40, step=step))
    extra = {"long": long, "twice": long, "view": long[3:7, ::2], "t": long.T, "half": long.bfloat16()}
    plain = {"tuple": (1, 2.5, None, "x"), 7: [True, float("inf")], "step": step}
    return {
        "model": net.state_dict(),
        "optimizer": adam(net, step).state_dict(),
        "extra": extra,
        "plain": plain,
    }


def write_inputs(folder: Path) -> None:
    """Write all inputs of the corpus."""
    for step in range(N_STEPS):
        write_plain(folder / f"weights-{step}.safetensors", arrays(step), {"step": str(step)})
        write_plain(folder / f"adam-{step}.safetensors", state_of(step, ("step", "exp_avg", "exp_avg_sq")))
        write_plain(folder / f"kinds-{step}.safetensors", kinds(step), {"format": "pt"})
        torch.save(nested(step), folder / f"nested-{step}.pt")
    for name, words in {
        "sgd": ("momentum_buffer",),
        "rmsprop": ("square_avg", "momentum_buffer"),
        "adafactor": ("exp_avg_sq_row", "exp_avg_sq_col"),
        "lion": ("exp_avg",),
    }.items():
        write_plain(folder / f"{name}.safetensors", state_of(0, words))
    torch.save(Net().state_dict(), folder / "model.pt")
    torch.save(adam(Net()).state_dict(), folder / "optimizer.pt")
    write_guides(folder)
    for suffix in (".safetensors", ".bin"):
        write_shards(folder / f"folder{suffix}", suffix, step=0)
    dcp.save(nested(), storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)
    (folder / "evaluate.py").write_text(EVALUATION)
    (folder / "roles.toml").write_text('[[rule]]\nname = "attn.*"\nlayer_type = "embedding"\n')
