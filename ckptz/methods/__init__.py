"""How tensors become smaller: one file for each method, and the table of them.

Only encoders need it: a reader imports nothing of it. docs/adding-a-method.md shows how to add one.
"""
