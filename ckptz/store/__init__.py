"""Chains of files on disks and behind URLs: opened with their bases, put over live tensors, locked.

Knows no torch.
"""
