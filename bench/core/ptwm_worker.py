"""Measure ptwm 1.1.0, which needs a separate environment with Python 3.12.

    python3.12 bench/core/ptwm_worker.py FILE

Compresses and decompresses each tensor of a safetensors file on one thread. Prints the CPU seconds of both
and the total bytes of all blobs, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch  # comes with ptwm
from ptwm import CompressionConfig, Compressor, DecompressionConfig, Decompressor, Format
from safetensors.torch import load_file


def main(path: str) -> None:
    """Compress, decompress and compare the tensors of one file, and print the measurements."""
    torch.set_num_threads(1)
    tensors = load_file(path)
    compressor = Compressor(CompressionConfig(input_format=Format.TORCH, threads=1))
    decompressor = Decompressor(DecompressionConfig(threads=1))
    begin = time.process_time()
    blobs = {name: compressor.compress(tensor) for name, tensor in tensors.items()}
    middle = time.process_time()
    restored = {name: decompressor.decompress(blob) for name, blob in blobs.items()}
    end = time.process_time()
    if not all(torch.equal(restored[name], tensor) for name, tensor in tensors.items()):
        raise AssertionError(f"ptwm does not restore {path}")
    print(json.dumps([middle - begin, end - middle, sum(map(len, blobs.values()))]))


if __name__ == "__main__":
    main(sys.argv[1])
