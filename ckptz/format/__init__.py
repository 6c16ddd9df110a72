"""The frame of one tensor: its plan, which holds every choice, and how it is decoded.

Knows no files and no sockets.
"""
