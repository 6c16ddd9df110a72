"""One `.ckptz` file: envelope, index, frames and streams, and their decoding."""
