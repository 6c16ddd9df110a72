"""One `.ckptz` file: envelope, index and frames, written and read.

Knows nothing of chains.
"""
