"""Tensor to frame and back. A `Plan` holds every choice for one tensor; knows no files or sockets."""
