"""What ckptz promises in figures: benches, studies, the demo and fuzzing; see README.md."""
