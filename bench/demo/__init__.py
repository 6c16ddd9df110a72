"""The demo (`make demo`): train, compress, restore and resume, with a table and a picture."""
