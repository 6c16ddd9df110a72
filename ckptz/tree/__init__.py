"""Nested states as named tensors and a tree of plain values, and back.

Implements spec/09-tree.md.
"""
