"""Nested states as named tensors and a tree of plain values; arrays for decoded tensors."""
