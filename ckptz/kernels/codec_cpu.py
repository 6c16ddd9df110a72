"""All codec kernels for the CPU under one name, compiled by numba on first use and cached."""

from __future__ import annotations

from ckptz.kernels.batches_cpu import (  # noqa: F401
    count_streams,
    delta_bits,
    encode_classed,
    rans_encode_streams,
    repeats,
    weigh_rows,
)
from ckptz.kernels.coding_cpu import (  # noqa: F401
    encoding_tables,
    golomb_pack,
    golomb_unpack,
    pack_table,
    pack_tables,
    rans_decode,
    rans_encode,
    slot_tables,
    sparse_merge,
    sparse_split,
    table_unpack,
    weigh,
)
from ckptz.kernels.planes_cpu import (  # noqa: F401
    class_counts,
    class_histogram,
    group,
    histogram,
    magnitude_classes,
    merge_planes,
    split_planes,
    ungroup,
)
from ckptz.kernels.planning_cpu import (  # noqa: F401
    best_golomb_order,
    cost_bits,
    deviation,
    entropy_bits,
    merge_neighbours,
    normalise,
    normalise_rows,
    partition,
    shared_cost_bits,
    used_class_histogram,
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
