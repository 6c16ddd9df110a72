"""One tensor to the bytes of its frame: maps are fitted, values rounded, codes sorted by context."""
