"""Runs searches: writes trial files, measures them, keeps the best. `ckptz.search` says what to try."""
