"""The quantization map, its fitters and their error bounds: the only lossy step. Knows no bytes."""
