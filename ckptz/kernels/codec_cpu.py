"""All codec kernels for the CPU under one name, compiled by numba on first use and cached."""

from __future__ import annotations

from ckptz.kernels.coding_cpu import *  # noqa: F403
from ckptz.kernels.huffman_cpu import *  # noqa: F403
from ckptz.kernels.planes_cpu import *  # noqa: F403
from ckptz.kernels.planning_cpu import *  # noqa: F403
from ckptz.kernels.values_cpu import *  # noqa: F403
