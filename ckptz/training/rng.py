"""The random numbers of a run: the global generators of Python, NumPy and PyTorch, exactly.

Their states become plain values and tensors, so that they can be stored without running code from a file.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckptz.errors import CkptzError, ConfigError, CorruptionError

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """Give the state of all generators, of every CUDA device too where CUDA is in use."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: RandomState = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys, np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: RandomState) -> None:
    """Set the generators to what `random_state` gave.

    Raises:
        ConfigError: the state has generators that this machine lacks.
        CorruptionError: it is no state of generators.
    """
    try:
        _set_random_state(state)
    except CkptzError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        # Each generator checks its own state, in its own way.
        raise CorruptionError(f"the random state is damaged ({type(error).__name__})") from None


def _set_random_state(state: RandomState) -> None:
    cuda = state.get("cuda", [])
    if len(cuda) > torch.cuda.device_count():
        raise ConfigError(
            f"the checkpoint has random states of {len(cuda)} CUDA devices, and {torch.cuda.device_count()} "
            "are here; resume on as many, or restore with weights_only=True"
        )
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"])
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
