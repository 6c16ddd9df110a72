"""Exactly invertible steps between a tensor's bit patterns and its code streams: byte planes and classes.

Knows no files.
"""
