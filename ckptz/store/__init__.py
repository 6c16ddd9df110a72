"""Chains of files on disks and behind URLs: opened with their bases, published, locked.

Knows no torch.
"""
