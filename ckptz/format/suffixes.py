"""The suffixes of files: the only list, by format.

| format | suffixes | may be a shard | a folder may have it |
|---|---|---|---|
| ckptz | `.ckptz` | no | no |
| safetensors | `.safetensors` | yes | no |
| torch | `.pt`, `.pth`, `.bin` | yes | no |
| Lightning, also torch | `.ckpt` | no | yes: sharded checkpoints |
"""

from __future__ import annotations

from typing import Final

SUFFIX: Final = ".ckptz"
PLAIN_SUFFIX: Final = ".safetensors"
TORCH_SHARD_SUFFIX: Final = ".bin"  # weights of transformers
LIGHTNING_SUFFIX: Final = ".ckpt"
TEMPORARY_SUFFIX: Final = ".ckptz-tmp"  # a file that is being written

STATE_SUFFIXES: Final = (".pt", ".pth", TORCH_SHARD_SUFFIX)  # torch files of a folder of shards
TORCH_SUFFIXES: Final = (*STATE_SUFFIXES, LIGHTNING_SUFFIX)
FOREIGN_SUFFIXES: Final = (PLAIN_SUFFIX, *TORCH_SUFFIXES)  # all kinds of others
SHARD_SUFFIXES: Final = (PLAIN_SUFFIX, *STATE_SUFFIXES)
FILE_SUFFIXES: Final = (SUFFIX, *SHARD_SUFFIXES)  # certainly files: a URL is not asked if it is a folder
INDEX_SUFFIX: Final = ".index.json"  # lists the shards of a folder, after the suffix of the shards
INDEX_SUFFIXES: Final = (PLAIN_SUFFIX + INDEX_SUFFIX, TORCH_SHARD_SUFFIX + INDEX_SUFFIX)
