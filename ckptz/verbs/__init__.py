"""The verbs of the command line as functions with reports: compress, restore, inspect and the others."""
