"""Compiles every kernel for GPUs to machine code, for three generations of them; needs none.

Prints a line for each: kernel, architecture, bytes, and which of a warp's cheap instructions it uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckptz.kernels import triton_planes, triton_rans, triton_values

ARCHITECTURES = (80, 90, 100)
SHOWN = ("redux.sync", "popc", "shfl", "bar.sync", "fma.", ".ftz", "div.full", "div.rn")

PLACES = "codes *u8, code_at *i64, n_codes *i32"
SEGMENTS = "n_lanes *i32, first_segment *i32, ends *i32, table_of *i32"
SIGNATURES = {
    "_decode": f"words *u16, word_at *i64, n_words *i32, states *u32, {SEGMENTS}, slots *u32, {PLACES}, "
    "is_whole *u8",
    "_encode": f"{PLACES}, {SEGMENTS}, entries *u64, words *u16, word_end *i64, states *u32, n_words *i32",
    "_split": "units *UNIT, base *UNIT, planes *u8, n i32, stride i32",
    "_merge": "planes *u8, base *UNIT, units *UNIT, n i32, stride i32",
    "_magnitudes": "units *UNIT, labels *u8, n i32",
    "_count": "codes *u8, counts *i32, n i32, chunk i32",
    "_count_classes": "classes *u16, codes *u8, counts *i32, n i32",
    "_xxh64": "words *u64, data *u8, n_bytes i64, chunk_bytes i64, checksums *u64, n_chunks i32",
    "_restore": "codes *u8, rows *u16, table *TERM, base *UNIT, outer_rows *u32, outer_columns *u32, "
    "out *UNIT, n i32, n_codes i32, n_columns i32, begin i32",
    "_regions": "units *UNIT, boundaries *UNIT, codes *u8, out *u8, n i32, n_boundaries i32",
    "_grid": "values *fp32, base *fp32, steps *fp32, labels *u8, out *u8, n i32, row_units i32, "
    "widened fp32, key i64, begin i64",
    "_pack": "codes *u8, packed *u8, n i32, n_bytes i32",
    "_unpack": "packed *u8, codes *u8, n i32, n_bytes i32",
}
BLOCKS = {"BLOCK": triton_planes.BLOCK}
CONSTANTS: dict[str, list[dict[str, int]]] = {
    **{name: [BLOCKS | {"MODE": mode, "N_PLANES": 0} for mode in range(5)] for name in ("_split", "_merge")},
    "_magnitudes": [BLOCKS | {"WIDTH": 0}],
    "_count": [BLOCKS | {"TILE": triton_planes.TILE}],
    "_count_classes": [BLOCKS],
    "_restore": [
        BLOCKS | {"DOMAIN": domain, "PREDICTOR": predictor, "KIND": 0, "HAS_ROWS": 1, "WIDTH": 0}
        for domain in (1, 2)
        for predictor in range(3)
    ],
    "_regions": [BLOCKS | {"WIDTH": 0}],
    "_grid": [BLOCKS | {"HAS_BASE": nearest, "IS_NEAREST": nearest} for nearest in range(2)],
    **{name: [BLOCKS | {"N_BITS": n_bits} for n_bits in (3,)] for name in ("_pack", "_unpack")},
}
KINDS = {2: (1, 2), 4: (0,)}  # of floats, by the bytes of their units

ONE_WARP = ("_decode", "_encode", "_xxh64")
EXACT = ("_restore", "_grid")


def variants(name: str) -> Iterator[tuple[dict[str, str], dict[str, int]]]:
    """List (types by argument, constants) of a kernel: all unit sizes, and all modes for one of them."""
    for n_bytes in unit_sizes(name):
        for constants in CONSTANTS.get(name, [{}])[0 if n_bytes in (0, 2) else -1 :]:
            for kind in KINDS[n_bytes] if "KIND" in constants else (0,):
                sizes = {"N_PLANES": n_bytes, "WIDTH": 8 * n_bytes, "KIND": kind}
                found = {key: sizes.get(key, value) for key, value in constants.items()}
                is_unit = constants.get("DOMAIN") == 2 or constants.get("PREDICTOR") == 0
                text = SIGNATURES[name].replace("TERM", "UNIT" if is_unit else "u32")
                types = dict(pair.split() for pair in text.replace("UNIT", f"u{8 * n_bytes}").split(", "))
                yield types | dict.fromkeys(found, "constexpr"), found
    # Triton makes a constant of every number that is 1: of a chunk alone, of a tensor of one element.
    ones = {key: 1 for key, what in types.items() if what == "i32"}
    yield types | dict.fromkeys({**found, **ones}, "constexpr"), {**found, **ones}


def unit_sizes(name: str) -> tuple[int, ...]:
    """List the bytes of a unit that a kernel is compiled for; (0,) where it has none."""
    if "KIND" in CONSTANTS.get(name, [{}])[0]:
        return (2, 4)
    if name == "_regions":
        return (2, 4)
    return (1, 2, 4, 8) if "UNIT" in SIGNATURES[name] else (0,)


def compiled(kernel: Any, name: str, architecture: int) -> str:
    n_bytes, seen = 0, set[str]()
    for types, constants in variants(name):
        source = ASTSource(kernel, types, constants)
        target = GPUTarget("cuda", architecture, 32)
        options: dict[str, Any] = {"num_warps": 1} if name in ONE_WARP else {}
        options |= triton_values.EXACT if name in EXACT else {}
        made = triton.compile(source, target=target, options=options).asm
        n_bytes += len(made["cubin"])
        seen |= {word for word in SHOWN if word in made["ptx"]}
    return f"{name} sm_{architecture} {n_bytes} {' '.join(sorted(seen))}"


if __name__ == "__main__":
    for module in (triton_planes, triton_rans, triton_values):
        for name in SIGNATURES.keys() & vars(module).keys():
            for architecture in ARCHITECTURES:
                print(compiled(vars(module)[name], name, architecture))
