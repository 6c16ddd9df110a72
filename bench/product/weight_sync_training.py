"""Weight sync during training: a small GPT, fine-tuned with a policy gradient, published at every step.

Part of `weight_sync.py`. The peers work in memory on the whole model at once.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain

from bench.core.codecs_ckptz import xor_encode
from bench.core.measure import Row, save_rows, timed, verdict
from bench.core.peers import Peers
from bench.core.sources import RUN, run_pairs
from bench.core.tiny_gpt import TinyGPT, batches, read_corpus
from ckptz.sync import Follower, Publisher

RATES: Final = (1e-6, 3e-6, 1e-5)
N_STEPS: Final = 50
PEER_EVERY: Final = 10  # z4ai takes seconds a step
BATCH, CONTEXT = 4, 64

State = dict[str, torch.Tensor]
Units = NDArray[np.uint16]


def units_of(tensor: torch.Tensor) -> Units:
    """The bit patterns of a bf16 tensor, shared."""
    return tensor.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1)


def concatenated(state: State) -> Units:
    """All bit patterns one after another."""
    return np.concatenate([units_of(tensor) for tensor in state.values()])


def n_bytes(state: State) -> int:
    """Raw bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def cloned(state: State) -> State:
    """A copy."""
    return {name: tensor.clone() for name, tensor in state.items()}


# --- XOR, byte planes, zstd -3 ------------------------------------------------------------------


def xor_apply(blobs: list[bytes], live: Units) -> None:
    """Bring `live` up to date in place; no checks."""
    difference = np.empty((len(live), 2), np.uint8)
    for i, blob in enumerate(blobs):
        difference[:, i] = np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8)
    live ^= difference.view(np.uint16).reshape(-1)


# --- training -----------------------------------------------------------------------------------


def policy_gradient_loss(model: TinyGPT, tokens: torch.Tensor) -> torch.Tensor:
    """One action a position, sampled from the model; a letter is worth 1, anything else nothing."""
    logits = model(tokens[:, :-1])
    policy = torch.distributions.Categorical(logits=logits)
    actions = policy.sample()
    is_letter = ((actions >= 97) & (actions <= 122)).float()
    loss: torch.Tensor = -(policy.log_prob(actions) * (is_letter - is_letter.mean())).mean()
    return loss


def trained_states(rate: float) -> Iterator[State]:
    """The bf16 copies of the masters before the first and after every step."""
    torch.manual_seed(0)
    model = TinyGPT()
    start = {name: tensor.float() for name, tensor in load_plain(RUN / "step-0420.safetensors").items()}
    model.load_state_dict(start)
    source = batches(read_corpus()[0], batch=BATCH, context=CONTEXT, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for step in range(N_STEPS + 1):
        if step:
            optimizer.zero_grad()
            policy_gradient_loss(model, next(source)).backward()
            optimizer.step()
        yield {name: p.detach().bfloat16() for name, p in model.named_parameters()}


@dataclass
class Run:
    """What was measured in one training: a number a step for each column."""

    raw: int = 0
    columns: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        """One step's numbers."""
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)

    def of(self, name: str) -> float:
        """The median step."""
        return statistics.median(self.columns[name])


def measured_run(rate: float, folder: Path, peers: Peers) -> Run:
    """Train, and publish and apply every step in every way."""
    run, states = Run(), trained_states(rate)
    before = next(states)
    run.raw = n_bytes(before)
    live = cloned(before)
    publisher = Publisher(folder / "sparse", anchor_every=10)
    smallest = Publisher(folder / "smallest", anchor_every=64, smallest=True)
    follower = Follower(folder / "sparse")
    for one in (publisher, smallest):
        one.publish(before, 0)
    follower.apply_to(live)
    for step, state in enumerate(states, 1):
        done = publisher.publish(state, step)
        update = follower.apply_to(live)
        require_equal(live, state)
        name = next(name for name in done.files if "from" in name)
        small = smallest.publish(state, step)
        run.add(
            changed=float(np.mean(concatenated(state) != concatenated(before))),
            ckptz=(folder / "sparse" / name).stat().st_size,
            smallest=min(small.n_bytes, run.raw),
            apply_s=update.seconds,
            smallest_publish_s=small.seconds,
        )
        run.add(**{"publish_anchor_s" if len(done.files) > 1 else "publish_s": done.seconds})
        _measure_xor(run, state, before)
        _measure_full(run, state, folder)
        if step % PEER_EVERY == 1:
            _measure_z4ai(run, state, before, peers)
        before = state
    return run


def require_equal(a: State, b: State) -> None:
    """Stop where a follower is wrong."""
    if any(not np.array_equal(units_of(a[name]), units_of(b[name])) for name in b):
        raise AssertionError("a follower holds other bits than were published")


def _measure_xor(run: Run, state: State, before: State) -> None:
    live, whole = concatenated(before), concatenated(state)
    base = live.copy()
    blobs: list[bytes] = []
    encode = timed(lambda: blobs.extend(xor_encode(whole, base)))
    apply = timed(lambda: xor_apply(blobs, live))
    if not np.array_equal(live, whole):
        raise AssertionError("XOR and zstd do not restore the weights")
    run.add(xor=sum(map(len, blobs)), xor_publish_s=encode, xor_apply_s=apply)


def _measure_full(run: Run, state: State, folder: Path) -> None:
    path, live = folder / "full.safetensors", cloned(state)
    save = timed(lambda: save_plain(state, path))

    def load() -> None:
        for name, tensor in load_plain(path).items():
            live[name].copy_(tensor)

    run.add(full_publish_s=save, full_apply_s=timed(load))


def _measure_z4ai(run: Run, state: State, before: State, peers: Peers) -> None:
    whole = concatenated(state)
    peers.load("base", concatenated(before))
    peers.load("state", whole)
    seconds, size = peers.compress("z4ai", "state", base="base", ends=[len(whole)])
    run.add(z4ai=size, z4ai_publish_s=seconds, z4ai_apply_s=peers.decompress("z4ai", "state"))


def size_row(rate: float, run: Run) -> Row:
    """Sizes of the median step, as shares of raw."""
    changed, own = run.of("changed"), run.of("ckptz") / run.raw
    return {
        "learning rate": f"{rate:.0e}",
        "elements changed": f"{changed:.4f}",
        "ckptz": f"{own:.5f}",
        "ckptz, smallest": f"{run.of('smallest') / run.raw:.5f}",
        "xor+planes+zstd -3": f"{run.of('xor') / run.raw:.5f}",
        "z4ai": f"{run.of('z4ai') / run.raw:.5f}",
        "full copy": "1.00000",
        "ckptz, largest step": f"{max(run.columns['ckptz']) / run.raw:.5f}",
        "target": "< xor",
        "verdict": verdict(all(a < b for a, b in zip(run.columns["ckptz"], run.columns["xor"], strict=True))),
    }


STEP_COLUMNS: Final = {
    "ckptz": ("publish_s", "apply_s"),
    "ckptz, with an anchor": ("publish_anchor_s", "apply_s"),
    "ckptz, smallest": ("smallest_publish_s", None),
    "xor+planes+zstd -3": ("xor_publish_s", "xor_apply_s"),
    "z4ai": ("z4ai_publish_s", "z4ai_apply_s"),
    "full copy": ("full_publish_s", "full_apply_s"),
}


def step_rows(rate: float, run: Run) -> list[Row]:
    """Milliseconds of the median step."""
    return [
        {
            "learning rate": f"{rate:.0e}",
            "way": way,
            "publish ms": f"{1e3 * run.of(publish):.1f}",
            "apply ms": None if apply is None else f"{1e3 * run.of(apply):.1f}",
        }
        for way, (publish, apply) in STEP_COLUMNS.items()
    ]


def training(folder: Path, peers: Peers) -> list[Row]:
    """Both tables of the training runs."""
    run_pairs()  # trains the model that is fine-tuned here, if it is not cached
    sizes: list[Row] = []
    steps: list[Row] = []
    for rate in RATES:
        run = measured_run(rate, folder / f"{rate:.0e}", peers)
        sizes.append(size_row(rate, run))
        steps += step_rows(rate, run)
        print(f"learning rate {rate:.0e}: done", file=sys.stderr, flush=True)
    save_rows("weight_sync_sizes", sizes)
    save_rows("weight_sync_steps", steps)
    return sizes
