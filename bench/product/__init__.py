"""The benches that `make bench` runs: sizes, speeds, memory and start of what users call."""
