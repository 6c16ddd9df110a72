"""The verbs of the command line as functions that return reports."""
