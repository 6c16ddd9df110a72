"""Compiles every kernel for GPUs to machine code, for three generations of them; needs none.

Prints a line for each: kernel, architecture, bytes, and which of a warp's cheap instructions it uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckptz.kernels import triton_planes, triton_rans, triton_values, triton_wire
from ckptz.kernels.wire_arrays import LARGEST_F32

MODULES = (triton_planes, triton_rans, triton_values, triton_wire)
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
    "_count": "codes *u8, bounds *i64, counts *i32, n i32",
    "_xxh64": "words *u64, data *u8, n_bytes i64, chunk_bytes i64, checksums *u64, n_chunks i32",
    "_restore": "codes *u8, rows *i16, table *TERM, base *UNIT, outer_rows *u32, outer_columns *u32, "
    "out *UNIT, n i32, n_codes i32, n_columns i32, begin i32",
    "_grid": "values *fp32, base *fp32, steps *fp32, labels *u8, out *u8, n i32, row_units i32, "
    "widened fp32, key i64, begin i64",
    "_draw": "out *fp32, n i32, key i64, begin i64",
    "_leaf_sums": "values *fp64, ends *i64, sizes *i64, sums *fp64, n_leaves i32",
    "_run_sums": "values *fp64, ends *i64, sums *fp64, n_runs i32",
    "_pack": "codes *u8, packed *u8, n i32, n_bytes i32",
    "_unpack": "packed *u8, codes *u8, n i32, n_bytes i32",
    "_words": "out *u64, " + ", ".join(f"word_{i} u64" for i in range(8)),
    "_widen": "units *u16, out *u32, n i32",
    "_narrow": "patterns *u32, out *u16, n i32",
    "_checksum": "words *u64, total *u64, n i32",
    "_quantize": "patterns *i32, offsets *u16, scales *u16, codes *u8, n i32, block i32, seed u64",
    "_dequantize": "offsets *u16, scales *u16, codes *u8, out *i32, n i32, block i32",
    "_digits": "patterns *i32, prefixes *i64, counts *i32, size i32, n_parts i32",
    "_mark": "patterns *i32, limits *i64, marks *u8, n_equal *i64, size i32, n_parts i32",
    "_settle": "marks *u8, before *i64, rests *i64, size i32, n_parts i32",
    "_move": "source *i32, mask *u8, before *i64, out *i32, n i32, k i32",
    "_rotate": "patterns *i32, out *i32, n i32",
    "_peaks": "patterns *i32, out *i64, n_tiles i32",
    "_tile_codes": "patterns *i32, peaks *i64, widths *i64, out *u8, n i32, row i32, seed u64",
    "_tile_values": "peaks *i64, widths *i64, codes *u8, out *i32, n i32, row i32",
    "_widths": "logs *i64, out *i64, n i32, n_planes i32",
    "_pack_rows": "codes *u8, widths *i64, before *i64, planes *u8, n i32, n_planes i32, row_bytes i32",
    "_unpack_rows": "planes *u8, widths *i64, before *i64, codes *u8, n i32, n_planes i32, row_bytes i32",
    "_sum": "a *i32, b *i32, out *i32, n i32",
}
BLOCKS = {"BLOCK": triton_planes.BLOCK}
TILES = [{"LOG": log, "TILE": 1 << log, "ROWS": triton_planes.BLOCK >> log} for log in (4, 6, 8)]
CONSTANTS: dict[str, list[dict[str, int]]] = {
    **{name: [BLOCKS | {"MODE": mode, "N_PLANES": 0} for mode in range(5)] for name in ("_split", "_merge")},
    "_magnitudes": [BLOCKS | {"WIDTH": 0}],
    "_count": [BLOCKS | {"TILE": triton_planes.TILE}],
    "_restore": [
        BLOCKS | {"DOMAIN": domain, "PREDICTOR": predictor, "KIND": 0, "HAS_ROWS": 1, "WIDTH": 0}
        for domain in (1, 2)
        for predictor in range(3)
    ],
    "_grid": [BLOCKS | {"HAS_BASE": nearest, "IS_NEAREST": nearest} for nearest in range(2)],
    "_draw": [BLOCKS],
    "_leaf_sums": [{"LEAVES": triton_values.LEAVES}],
    "_run_sums": [{"RUNS": triton_values.RUNS}],
    **{name: [BLOCKS | {"N_BITS": n_bits} for n_bits in (3,)] for name in ("_pack", "_unpack")},
    **{name: [BLOCKS | {"KIND": 0}] for name in ("_widen", "_narrow")},
    **{name: [BLOCKS] for name in ("_checksum", "_mark", "_settle", "_pack_rows", "_unpack_rows")},
    "_quantize": [
        {"LAST": 15, "IS_RANDOM": is_random, "BLOCK": block}
        for is_random in range(2)
        for block in (256, 4096)
    ],
    "_dequantize": [BLOCKS | {"LARGEST": largest} for largest in LARGEST_F32],
    "_digits": [
        BLOCKS | {"SHIFT": shift, "N_DIGITS": 1 << width, "TILE": triton_wire.TILE}
        for shift, width in triton_wire.DIGITS
    ],
    "_move": [BLOCKS | {"IS_TAKEN": is_taken} for is_taken in range(2)],
    "_rotate": [{"IS_INVERSE": is_inverse} | tile for is_inverse in range(2) for tile in TILES],
    "_peaks": [{name: tile[name] for name in ("TILE", "ROWS")} for tile in TILES],
    "_tile_codes": [BLOCKS | {"TILE": 64, "IS_RANDOM": is_random} for is_random in range(2)],
    "_tile_values": [BLOCKS | {"TILE": 64}],
    "_widths": [BLOCKS | {"SPREAD": 13}],
    "_sum": [BLOCKS | {"IS_DIFFERENCE": is_difference} for is_difference in range(2)],
}
KINDS = {2: (1, 2), 4: (0,)}  # of floats, by the bytes of their units

ONE_WARP = ("_decode", "_encode", "_xxh64", "_run_sums")
EXACT = (  # nothing may be rounded otherwise than IEEE says, or twice
    *(
        "_restore",
        "_draw",
        "_grid",
        "_leaf_sums",
        "_run_sums",
        "_widen",
        "_narrow",
        "_quantize",
        "_dequantize",
    ),
    *("_rotate", "_tile_codes", "_tile_values", "_sum"),
)


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
    if name in ("_widen", "_narrow"):
        return (2,)
    if "KIND" in CONSTANTS.get(name, [{}])[0]:
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
    for module in MODULES:
        for name in SIGNATURES.keys() & vars(module).keys():
            for architecture in ARCHITECTURES:
                print(compiled(vars(module)[name], name, architecture))
