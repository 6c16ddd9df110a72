"""Code that tests share: states, hand-made files, vectors, and the programs of worker processes."""
