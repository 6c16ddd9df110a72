"""Checkpoints in a training loop: the Checkpointer, and what becomes of a snapshot."""
