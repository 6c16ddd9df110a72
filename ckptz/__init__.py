"""ckptz."""
