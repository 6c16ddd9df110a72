"""The version of the package; the version of the format is `ckptz.format.index.FORMAT_VERSION`."""

__version__ = "0.1.0"
