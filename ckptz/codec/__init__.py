"""Encoding of one tensor into one frame: a file for each method, and the steps that methods share."""
