"""Write the files of the current format version into a new folder; an existing folder is never changed.

python tests/old/make_old.py
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file as save_plain

from ckptz import LOSSLESS, Checkpointer, Grid, KeepPolicy, KMeans, compress, rebase
from ckptz.codec.moments import Moments
from ckptz.format.index import FORMAT_VERSION
from ckptz.numpy import load_file, save_file

FOLDER = Path(__file__).parent


def weights(step: int) -> dict[str, np.ndarray]:
    """Compute the weights of a small model from a formula, independently of random generators."""
    i = np.arange(64 * 64, dtype=np.float64).reshape(64, 64)
    values = np.sin(i * 12.9898) * 0.02 + step * 1e-4 * np.cos(i)
    return {
        "up.weight": values.astype(np.float32),
        "down.weight": values.T.astype(np.float16),
        "count": np.array([step], np.int64),
        "mask": (i[0] % 3 == 0),
        "µ": np.float32(values[0, :3]),
        "empty": np.zeros((0, 4), np.float32),
    }


def training(step: int) -> dict[str, np.ndarray]:
    """Compute a float32 weight [64, 64] and its Adam moments, the second one near an outer product."""
    i = np.arange(64 * 64, dtype=np.float64).reshape(64, 64)
    second = np.exp2(np.sin(i // 64) * 6 - 30 + np.cos(i % 64) * 3 + np.sin(i * 78.233 + step * 0.1) * 0.7)
    tensors = {
        "up.weight": np.sin(i * 12.9898) * 0.02 + step * 1e-4 * np.cos(i),
        "up.weight.exp_avg": np.sin(i * 37.719 + step * 0.1) * np.sqrt(second),
        "up.weight.exp_avg_sq": second,
    }
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def write(folder: Path) -> None:
    """Write one small file of each kind that version 1.0 defines."""
    lossy = KMeans(levels=8, prune=0.1, protect=0.01)
    save_file(weights(0), folder / "lossless.ckptz", {"format": "np"})
    save_file(weights(1), folder / "delta.ckptz", base=folder / "lossless.ckptz")
    save_file(weights(0), folder / "maps.ckptz", config=lossy)
    save_file(weights(1), folder / "maps-delta.ckptz", base=folder / "maps.ckptz", config=lossy)
    state = Grid(moments=Moments(second_step=1.0))
    save_file(training(0), folder / "moments.ckptz", config=state)
    save_file(training(1), folder / "moments-delta.ckptz", base=folder / "moments.ckptz", config=state)
    rebase(folder / "maps-delta.ckptz", folder / "inline.ckptz")
    with tempfile.TemporaryDirectory() as name:
        nested = Path(name) / "nested.pt"
        state = {"model": {"w": torch.arange(40.0).reshape(5, 8).T}, "step": 3, "rates": (0.5, None)}
        torch.save(state, nested)
        compress([nested], folder / "nested.ckptz")
        shards = Path(name) / "sharded"
        shards.mkdir()
        save_plain({"a": weights(0)["µ"]}, shards / "model-00001-of-00002.safetensors")
        save_plain({"b": weights(0)["count"]}, shards / "model-00002-of-00002.safetensors")
        weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        compress([shards], folder / "sharded.ckptz")


def write_low_rank(folder: Path) -> None:
    """Write files with first moments of low rank, new in 1.1: optimizer states of a run."""
    model = torch.nn.Linear(64, 96)
    optimizer = torch.optim.AdamW(model.parameters())
    i = torch.arange(64 * 96, dtype=torch.float32).reshape(96, 64)
    with Checkpointer(
        folder / "run", model, optimizer, config=Grid(), keep=KeepPolicy(exact=0), background=False
    ) as saver:
        for step in range(1, 31):
            model.weight.grad = torch.sin(i // 64) * torch.cos(i % 64) + torch.sin(i * 78.233 + step)
            model.bias.grad = torch.sin(i[:, 0])
            optimizer.step()
            if step % 15 == 0:
                saver.save(step)
    for path in (folder / "run").glob("*.state.ckptz"):
        path.rename(folder / path.name)
    shutil.rmtree(folder / "run")


def write_huffman(folder: Path) -> None:
    """Write files with Huffman streams, new in 1.2: full files and deltas, of weights and of maps."""
    for name, config in (("lossless", LOSSLESS), ("maps", KMeans(levels=8, prune=0.1))):
        first, second = folder / f"{name}.ckptz", folder / f"{name}-delta.ckptz"
        save_file(training(0), first, config=config, effort="fast")
        save_file(training(1), second, base=first, config=config, effort="fast")


def write_products(folder: Path) -> None:
    """Write files with product contexts, new in 1.3: codes of an 8-bit Adam, a full file and a delta."""
    i = np.arange(96 * 64).reshape(96, 64)
    for step, name in enumerate(("codes", "codes-delta")):
        wave = np.sin(i // 64 * (step + 1)) * np.cos(i % 64) + 0.1 * np.sin(i * 78.233 + step)
        codes = {f"w.state{n}": np.uint8(127.5 + 110 * sign * wave) for n, sign in ((1, 1), (2, -1))}
        scales = {f"w.absmax{n}": np.ones(24, np.float32) for n in (1, 2)}
        base = folder / "codes.ckptz" if step else None
        save_file({**codes, **scales}, folder / f"{name}.ckptz", base=base)


WRITERS = {"1.0": write, "1.1": write_low_rank, "1.2": write_huffman, "1.3": write_products}


def digests(folder: Path) -> dict[str, dict[str, str]]:
    """Compute the SHA-256 of every tensor of every file, as {file name: {tensor name: hex digest}}."""
    return {
        path.name: {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in load_file(path).items()}
        for path in sorted(folder.glob("*.ckptz"))
    }


def main() -> None:
    """Write the folder of the current format version, or exit if it exists."""
    folder = FOLDER / FORMAT_VERSION
    if folder.exists():
        sys.exit(f"{folder} exists; the files of a format version are written once")
    with tempfile.TemporaryDirectory() as name:
        new = Path(name) / FORMAT_VERSION
        new.mkdir()
        WRITERS[FORMAT_VERSION](new)
        (new / "digests.json").write_text(json.dumps(digests(new), indent=1) + "\n")
        shutil.copytree(new, folder, copy_function=shutil.copyfile)


if __name__ == "__main__":
    main()
