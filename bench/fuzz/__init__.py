"""Coverage-guided fuzzing of the parsers."""
