"""The codecs that benchmarks time restore what they were given."""

import numpy as np
import pytest

from bench.core import codecs_ckptz as codecs
from ckptz.format.dtypes import dtype_of
from ckptz.format.sources import ArraySource


def weights(seed: int) -> dict[str, ArraySource]:
    values = np.random.default_rng(seed).standard_normal(6000).astype(np.float32)
    shapes = {"large": (50, 100), "small": (1000,)}
    parts = {"large": values[:5000], "small": values[5000:]}
    return {
        name: ArraySource(dtype_of("F32"), shapes[name], part.view(np.uint32)) for name, part in parts.items()
    }


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_file_in_memory_restores_the_tensors(is_delta: bool) -> None:
    tensors, bases = weights(0), weights(1) if is_delta else None
    outputs = codecs.outputs_for(tensors)
    codecs.read_file(codecs.write_file(tensors, bases), outputs, bases)
    assert codecs.equal(tensors, outputs)


def test_frames_in_memory_restore_the_tensors() -> None:
    tensors = weights(0)
    outputs = codecs.outputs_for(tensors)
    codecs.decode_frames(codecs.as_read(codecs.encode_frames(tensors)), outputs)
    assert codecs.equal(tensors, outputs)
