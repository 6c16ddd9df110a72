"""What the verbs of the command line do, as functions: compress, restore, inspect, verify, diff, log."""
