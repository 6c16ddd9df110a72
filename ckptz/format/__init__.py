"""One `.ckptz` file: envelope, index, frames and streams, what they say and how they are read."""
