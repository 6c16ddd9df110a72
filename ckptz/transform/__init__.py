"""Exactly invertible steps between a tensor's bit patterns and its code streams. Knows no files."""
