"""Benchmarks, studies, the demo and the fuzzers behind the published figures of ckptz; see README.md."""
