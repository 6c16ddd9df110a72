"""One tensor to the bytes of its frame, as its plan says. Encoder only: a reader imports nothing of it."""
