"""Encoding one tensor into a frame: one file for each method, and shared steps."""
