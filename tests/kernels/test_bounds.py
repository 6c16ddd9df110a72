"""No kernel accesses memory out of bounds, whatever a file, a message or a saved state contains.

Compiled kernels have no bounds checks. Positions, codes, contexts, counts and lengths from a file or a peer
are checked before a kernel indexes with them: the tables name the function that checks, and mutants test it.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.spec_support import ROOT

KERNELS = ROOT / "ckptz" / "kernels"
DECORATORS = {"kernel", "part", "summing", "summing_part"}
ACCESSORS = {"cpu", "rounding", "moments", "compiled"}  # functions that return a module of kernels
WIRE_NAMES = {"k", "_k", "kernels"}  # names of a module of kernels in ckptz/wire

# Kernels that index with numbers from data, and the function that checks these numbers.
CHECKED = {
    # entropy coding: the decoder checks the end of its input at each word or bit
    "_rans_decode": "ckptz/kernels/coding_cpu.py:_decode_scalar",
    "_decode_scalar": "ckptz/kernels/coding_cpu.py:_decode_scalar",
    "_table_unpack": "ckptz/kernels/coding_cpu.py:_table_unpack",
    # the Huffman code is complete; the parts are within the stream
    "_huffman_codes": "ckptz/format/huffman.py:parse_lengths",
    "_fill_entries": "ckptz/format/huffman.py:parse_lengths",
    "_huffman_decode": "ckptz/format/huffman.py:parse_parts",
    "_decode_tail": "ckptz/kernels/huffman_cpu.py:_decode_tail",
    "_ends_at": "ckptz/format/huffman.py:parse_parts",
    # contexts are below the number of contexts
    "_ungroup": "ckptz/format/frame.py:_parse_indices",
    "_context_counts": "ckptz/format/frame.py:_parse_indices",
    "_group": "ckptz/format/frame.py:_parse_indices",
    "_context_histogram": "ckptz/format/sources.py:_labels_by",
    # codes and rows are within the table of the map
    "_lookup": "ckptz/format/decode.py:map_codes",
    "_add_linear_32": "ckptz/format/context_rules.py:parse_runs",
    "_add_linear_16": "ckptz/format/context_rules.py:parse_runs",
    "_add_bits": "ckptz/format/context_rules.py:parse_runs",
    # row labels of a base are below its number of steps
    "_nearest_codes": "ckptz/codec/grid.py:_steps_of",
    "_stochastic_codes": "ckptz/codec/grid.py:_steps_of",
    "_residual_sums": "ckptz/codec/grid.py:_steps_of",
    # the number of ones in a mask is the number of values
    "take": "ckptz/wire/state.py:pop_mask",
    "put": "ckptz/wire/payload.py:topk",
    "_threshold": "ckptz/wire/policy.py:k",
    "_find": "ckptz/wire/policy.py:k",
    "top_mask": "ckptz/wire/policy.py:k",
    # the number of bytes fits the number of codes and their bits
    "_unpack_codes": "ckptz/wire/payload.py:unpacked",
    "dequantize": "ckptz/wire/payload.py:uniform",
    "_checksum": "ckptz/wire/endpoint.py:_check_header",  # a multiple of 16 bytes
    "_quantize": "ckptz/wire/endpoint.py:_check_patterns",
    "_codes_nearest": "ckptz/wire/endpoint.py:_check_patterns",
    "_codes_random": "ckptz/wire/endpoint.py:_check_patterns",
    "_range": "ckptz/wire/endpoint.py:_check_patterns",
    # outer vectors have an element for each row and column of the tensor
    "_outer_rows": "ckptz/format/frame.py:_parse_outer",
    # tiles divide rows, and all planes are in the payload
    "tile_values": "ckptz/wire/payload.py:tiled",
    "unpack_rows": "ckptz/wire/payload.py:tiled",
    # a base, or a context tensor, has the number of patterns of the tensor
    "_add_ordered": "ckptz/format/reader.py:base",
    "_add_block": "ckptz/format/reader.py:base",
    "_magnitudes": "ckptz/format/reader.py:_context_tensor",
    "_to_f32": "ckptz/format/reader.py:base",
    "_from_f32": "ckptz/format/reader.py:base",
    **dict.fromkeys(
        ("_merge_2", "_merge_4", "_merge_rotated_2", "_merge_rotated_4"), "ckptz/format/decode.py:_plain"
    ),
}
# Kernels that index with loop counters, with patterns whose bits match the size of the table, or with values
# that the encoder computed.
UNCHECKED = {
    *("_encode_scalar", "_rans_encode", "_count_streams", "_repeats", "_sort_row"),
    *("_normalise", "_pack_tables", "_count_pairs"),
    *("_huffman_lengths", "_huffman_encode", "_encode_quarter", "_put_whole_bytes"),
    *("_ordered_difference", "_split_2", "_split_4", "_split_rotated_2", "_split_rotated_4"),
    *("_slot_tables",),
    *("_top_histogram", "_region_codes", "_any_equal_masked"),
    *("_pack_codes", "_scale_of", "_row_bits", "_entropies", "_merge_rows", "_fill_row"),
    *("_deviation", "_thresholds"),
    *("_indices", "log_level_codes", "log_level_sums", "log_level_bits", "level_codes", "level_sums"),
    *("_near_zero", "beyond"),
    *("_stochastic", "_leaf", "_power", "_largest", "_row_sums", "sensitivities", "_add_tiny"),
    *("_row_product", "_split_floats", "_fold", "log_sums", "root_ratios"),
    *("add_products", "add_transposed_products"),
    *("_rotate", "tile_peaks", "_tile_codes", "pack_rows"),
    "_scale_runs",
}
# Modules that call kernels which index with numbers from data. A new caller needs a check, and a row here.
CALLERS = {
    "rans_decode": {"format/streams.py"},
    "table_unpack": {"format/frequency.py"},
    "huffman_decode": {"format/huffman.py"},
    "group": {"codec/contexts.py"},
    "ungroup": {"format/decode.py"},
    "context_counts": {"format/decode.py", "codec/contexts.py"},
    "context_histogram": {"codec/tensor_plan.py"},
    "lookup": {"format/values.py", "codec/eight_bit.py"},  # codes of a byte in a table of 256 values
    "add_linear": {"format/values.py"},
    "add_bits": {"format/values.py"},
    "outer_product": {"format/plan.py", "codec/moment_codes.py"},
    "merge_planes": {"format/decode.py"},
    "restore": {"format/decode.py"},
    "magnitudes": {
        "format/sources.py",
        "codec/chunk.py",
        "codec/moments.py",
        "codec/tensor_plan.py",
    },
    "unpack_codes": {"codec/coded.py"},
    "unpack": {"wire/payload.py", "wire/state.py"},
    "take": {"wire/payload.py"},
    "residual_codes": {"codec/grid_tensor.py", "codec/column_rounding.py"},
    "residual_sums": {"codec/grid_tensor.py"},
    "put": {"wire/payload.py"},
    "top_mask": {"wire/payload.py"},
    "dequantize": {"wire/payload.py"},
    "quantize": {"wire/payload.py"},
    "tile_values": {"wire/payload.py"},
    "unpack_rows": {"wire/payload.py"},
}


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a module."""
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def compiled() -> set[str]:
    """Return the names of all functions that numba compiles."""
    return {
        function.name
        for path in KERNELS.glob("*.py")
        for function in functions(path)
        if any(isinstance(mark, ast.Name) and mark.id in DECORATORS for mark in function.decorator_list)
    }


def _is_kernel_module(node: ast.expr) -> bool:
    """Return whether an expression is a module of kernels."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ACCESSORS
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name in WIRE_NAMES


def test_every_kernel_is_in_one_of_the_tables() -> None:
    assert compiled() == set(CHECKED) | UNCHECKED
    assert not set(CHECKED) & UNCHECKED


@pytest.mark.parametrize("check", sorted(set(CHECKED.values())))
def test_every_check_of_the_table_exists(check: str) -> None:
    path, name = check.split(":")
    assert name in {function.name for function in functions(ROOT / path)}


def test_kernels_have_the_callers_of_the_table_and_no_others() -> None:
    callers: dict[str, set[str]] = {name: set() for name in CALLERS}
    for path in sorted((ROOT / "ckptz").rglob("*.py")):
        if path.parent == KERNELS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in CALLERS and _is_kernel_module(node.value):
                callers[node.attr].add(path.relative_to(ROOT / "ckptz").as_posix())
    assert callers == CALLERS


# --- mutants ------------------------------------------------------------------------------------

SHORT = (1200, 100, 7)
LONG = (90_000, 10_000, 8)  # mutants of files, mutants of messages and states, seed


@pytest.mark.apps  # compiles every kernel with bounds checks
@pytest.mark.parametrize("counts", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
def test_mutants_are_refused_or_read_as_the_second_decoder_reads_them(
    counts: tuple[int, int, int], pytestconfig: pytest.Config
) -> None:
    """Run the mutants in a process whose kernels have bounds checks, cached in pytest's cache folder."""
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir("bounds"))}
    command = [sys.executable, "-m", "tests.support.bounds_worker", *map(str, counts)]
    run = subprocess.run(command, env=os.environ | checks, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    allowed = {"kind", "mutants", "accepted", "refused", "codes alone"}
    assert all(set(row) <= allowed for row in rows), run.stderr
    by_kind = {row["kind"]: row for row in rows}
    assert {"file", "chain", "apply_ base", "apply_ stored", "message", "shape", "state"} == set(by_kind)
    assert by_kind["file"]["mutants"] + by_kind["chain"]["mutants"] == counts[0]
    for kind in ("file", "chain", "apply_ base", "message", "state"):
        assert by_kind[kind]["refused"] > 0
        assert by_kind[kind]["accepted"] > 0.05 * by_kind[kind]["mutants"]
