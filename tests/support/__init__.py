"""What several tests use: states, files made by hand, vectors, and the programs that worker processes run."""
