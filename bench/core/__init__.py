"""What the benches share: timing and tables, sources of weights, other packages, a small GPT, the summary."""
