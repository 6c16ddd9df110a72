"""Codes to bytes and back: constant, stored, zstd, interleaved rANS, sparse.

Knows no tensors.
"""
