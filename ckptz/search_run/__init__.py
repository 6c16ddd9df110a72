"""Runs a search: writes trial files, measures them and keeps the best, as `ckptz.search` proposes them."""
