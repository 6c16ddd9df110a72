"""The folder of a run: its files, what the next is stored against, which stay, what may be deleted.

Knows no torch.
"""
