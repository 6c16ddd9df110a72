"""Compiles every kernel for GPUs to machine code, for three generations of them; needs none.

Prints a line for each: kernel, architecture, bytes, and which of a warp's cheap instructions it uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckptz.kernels import triton_planes, triton_rans

ARCHITECTURES = (80, 90, 100)
SHOWN = ("redux.sync", "popc", "shfl", "bar.sync")

PLACES = "codes *u8, code_at *i64, n_codes *i32"
SEGMENTS = "n_lanes *i32, first_segment *i32, ends *i32, table_of *i32"
SIGNATURES = {
    "_decode": f"words *u16, word_at *i64, n_words *i32, states *u32, {SEGMENTS}, slots *u32, {PLACES}, "
    "is_whole *u8",
    "_encode": f"{PLACES}, {SEGMENTS}, entries *u64, words *u16, word_end *i64, states *u32, n_words *i32",
    "_split": "units *UNIT, base *UNIT, planes *u8, n i64, stride i64",
    "_merge": "planes *u8, base *UNIT, units *UNIT, n i64, stride i64",
    "_magnitudes": "units *UNIT, labels *u8, n i64",
    "_count": "codes *u8, counts *i32, n i64, chunk i64",
    "_count_classes": "classes *UNIT, codes *u8, counts *i32, n i64",
    "_xxh64": "words *u64, data *u8, n_bytes i64, chunk_bytes i64, checksums *u64, n_chunks i32",
}
BLOCKS = {"BLOCK": triton_planes.BLOCK}
CONSTANTS: dict[str, list[dict[str, int]]] = {
    **{name: [BLOCKS | {"MODE": mode, "N_PLANES": 0} for mode in range(5)] for name in ("_split", "_merge")},
    "_magnitudes": [BLOCKS | {"WIDTH": 0}],
    "_count": [BLOCKS | {"TILE": triton_planes.TILE}],
    "_count_classes": [BLOCKS],
}
ONE_WARP = ("_decode", "_encode", "_xxh64")


def variants(name: str) -> Iterator[tuple[dict[str, str], dict[str, int]]]:
    """List (types by argument, constants) of a kernel: all unit sizes, and all modes for one of them."""
    for n_bytes in (1, 2, 4, 8) if "UNIT" in SIGNATURES[name] else (0,):
        types = dict(pair.split() for pair in SIGNATURES[name].replace("UNIT", f"u{8 * n_bytes}").split(", "))
        for constants in CONSTANTS.get(name, [{}])[0 if n_bytes in (0, 2) else -1 :]:
            sizes = {"N_PLANES": n_bytes, "WIDTH": 8 * n_bytes}
            found = {key: sizes.get(key, value) for key, value in constants.items()}
            yield types | dict.fromkeys(found, "constexpr"), found


def compiled(kernel: Any, name: str, architecture: int) -> str:
    n_bytes, seen = 0, set[str]()
    for types, constants in variants(name):
        source = ASTSource(kernel, types, constants)
        target = GPUTarget("cuda", architecture, 32)
        options = {"num_warps": 1} if name in ONE_WARP else {}
        made = triton.compile(source, target=target, options=options).asm
        n_bytes += len(made["cubin"])
        seen |= {word for word in SHOWN if word in made["ptx"]}
    return f"{name} sm_{architecture} {n_bytes} {' '.join(sorted(seen))}"


if __name__ == "__main__":
    for module in (triton_planes, triton_rans):
        for name in SIGNATURES.keys() & vars(module).keys():
            for architecture in ARCHITECTURES:
                print(compiled(vars(module)[name], name, architecture))
