"""Chains of checkpoint files: finding bases, checking them. Knows no torch."""
