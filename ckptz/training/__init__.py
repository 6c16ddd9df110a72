"""Checkpoints in a training loop: the Checkpointer, its snapshots and files, and how they are restored."""
