"""Whole training states by ckptz and by rivals: sizes and resumed losses."""
