"""The folder of a run: its files, the choice of a base, keep rules and deletion.

Knows no torch.
"""
