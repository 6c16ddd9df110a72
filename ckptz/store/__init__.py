"""Checkpoints on disks and behind URLs: opened with their bases, published, locked.

Without torch.
"""
