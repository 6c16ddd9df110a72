"""Adapters to other libraries, one module each, which loads only when it is imported."""
