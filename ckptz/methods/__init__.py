"""How tensors become smaller: one file for each method. Encoder only: a reader imports nothing of it."""
