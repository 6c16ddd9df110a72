"""`torch.distributed.checkpoint` with `.ckptz` files: each rank writes its shards, any number of ranks reads.

    dcp.save(state, storage_writer=CkptzStorageWriter("run/step-100", base="run/step-50"))
    dcp.load(state, storage_reader=CkptzStorageReader("run/step-100"))

A folder holds one file per rank, the files that these are stored against, and a JSON index, which is
written last: without it the folder is no checkpoint. No pickle. A shard's file records its offsets and
the shapes of the whole tensors too. Reading decodes only the chunks that a rank's own shards touch. See
docs/frameworks.md.
"""

from __future__ import annotations

from typing import Final

import torch

from ckptz.integrations.dcp_read import CkptzStorageReader
from ckptz.integrations.dcp_write import CkptzStorageWriter
from ckptz.integrations.linked import ChainOptions
from ckptz.integrations.versions import warn_untested

TESTED: Final = ((2, 13), (2, 13))  # first and last torch that tests/test_dcp.py ran with
warn_untested("torch", torch.__version__, TESTED)

__all__ = ["ChainOptions", "CkptzStorageReader", "CkptzStorageWriter"]
