"""Compressed links of pipeline-parallel training, beside a paper's claims."""
