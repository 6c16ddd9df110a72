"""Fuzzing of the parsers (coverage-guided) and of the readers of other formats (mutations)."""
