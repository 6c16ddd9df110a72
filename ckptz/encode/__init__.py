"""One tensor to the bytes of its frame, as its plan says.

Only encoders need it: a reader imports nothing of it.
"""
