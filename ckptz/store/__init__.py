"""Several files: chains and their bases, folders of steps, locks, keep rules.

Knows no torch.
"""
