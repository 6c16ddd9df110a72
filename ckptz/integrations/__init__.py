"""Adapters to other libraries: one module each, loaded by who uses that library."""
