"""Adapters to other libraries, one module each, imported only on demand."""
