"""Code shared by all benchmarks: timing, result tables, input weights, other compressors, a small GPT."""
