"""The chunks of other frames that one chunk is decoded from: each decoded once, those that it needs first.

A chain may be 64 files long, and classes may look at other tensors of each of them. Following that by calls
of calls would decode some frames again and again, and end where Python's stack does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptz.errors import LimitError

MAX_FRAMES: Final = 256  # that one chunk is decoded from; 65 files of three tensors are 195
MAX_HELD_BYTES: Final = 256 << 20  # of chunks that wait for those that need them


@dataclass(frozen=True, slots=True)
class Decoded:
    """A chunk: its units, or None if only the codes were wanted; its codes, or None if it has none."""

    units: NDArray[Any] | None
    codes: NDArray[np.uint8] | None

    @property
    def n_bytes(self) -> int:
        """Bytes of memory held."""
        return sum(part.nbytes for part in (self.units, self.codes) if part is not None)


class Frame(Protocol):
    """A frame whose chunks may need chunks of others."""

    def needs(self, only_codes: bool) -> list[Node]:
        """List what a chunk, or only its codes, is decoded from."""
        ...

    def decoded(self, index: int, only_codes: bool, held: Held) -> Decoded:
        """Decode a chunk from those that it needs."""
        ...


Node = tuple[Frame, bool]  # a frame, and whether only its codes are needed
Held = Mapping[Node, Decoded]


def gather(index: int, first: Iterable[Node]) -> Held:
    """Decode chunk `index` of some frames and of all that they need; returns the former.

    Raises:
        LimitError: it needs more frames, or holds more of them at once, than any writer's files do.
    """
    wanted = list(first)
    needs = _in_order(wanted)
    n_users = Counter(node for nodes in (wanted, *needs.values()) for node in nodes)
    held: dict[Node, Decoded] = {}
    for node, nodes in needs.items():
        frame, only_codes = node
        held[node] = frame.decoded(index, only_codes, held)
        n_users.subtract(nodes)
        for used in nodes:
            if not n_users[used]:
                held.pop(used, None)
        if sum(one.n_bytes for one in held.values()) > MAX_HELD_BYTES:
            raise LimitError(
                f"a chunk is decoded from more than {MAX_HELD_BYTES >> 20} MiB of others at once"
            )
    return held


def _in_order(wanted: list[Node]) -> dict[Node, list[Node]]:
    """What each frame needs, every frame after all that it needs itself."""
    found: dict[Node, list[Node]] = {}
    done: dict[Node, list[Node]] = {}
    waiting = list(wanted)
    while waiting:
        node = waiting[-1]
        if node in found:
            waiting.pop()
            done.setdefault(node, found[node])
            continue
        if len(found) >= MAX_FRAMES:
            raise LimitError(f"a chunk is decoded from more than {MAX_FRAMES} others")
        frame, only_codes = node
        found[node] = frame.needs(only_codes)
        waiting += [needed for needed in found[node] if needed not in found]
    return done
