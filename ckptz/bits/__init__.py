"""Bytes and bits: bounds-checked reading and writing, variable-length integers, packing, checksums."""
