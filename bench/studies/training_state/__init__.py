"""Whole training states by ckptz and by rivals: sizes, resumed losses, and real restarts."""
