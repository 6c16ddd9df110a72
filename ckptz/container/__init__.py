"""One `.ckptz` file: a valid safetensors file of frames and an index. Knows nothing of chains."""
