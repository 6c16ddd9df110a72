"""All codec kernels for the CPU under one name, compiled by numba on first use and cached."""

from __future__ import annotations

from ckptz.kernels.coding_cpu import (  # noqa: F401
    count_streams,
    histogram,
    normalise,
    pack_tables,
    rans_decode,
    rans_encode,
    repeats,
    slot_tables,
    table_unpack,
)
from ckptz.kernels.huffman_cpu import (  # noqa: F401
    huffman_decode,
    huffman_encode,
    huffman_lengths,
)
from ckptz.kernels.planes_cpu import (  # noqa: F401
    context_counts,
    context_histogram,
    group,
    magnitudes,
    merge_planes,
    restore,
    split_planes,
    transform,
    ungroup,
)
from ckptz.kernels.planning_cpu import (  # noqa: F401
    deviation,
    entropies,
    merge_rows,
    partition,
    scale_runs,
)
from ckptz.kernels.values_cpu import (  # noqa: F401
    add_bits,
    add_f32,
    add_linear,
    all_finite,
    from_f32,
    lookup,
    outer_product,
    pack_codes,
    region_codes,
    to_f32,
    top_histogram,
    unpack_codes,
)
