"""Fits quantization maps to values: k-means, grids, moments, rounding; the only lossy step.

Knows no bytes.
"""
