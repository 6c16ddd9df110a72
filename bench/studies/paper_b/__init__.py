"""Compressed links of pipeline-parallel training, compared with the claims of a paper."""
