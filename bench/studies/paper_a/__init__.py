"""Lossy chains of checkpoints under a budget of quality, on two models, beside a paper's claims."""
