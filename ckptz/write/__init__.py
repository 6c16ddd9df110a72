"""Writing a file: from tensors and side information to a file and a report."""
