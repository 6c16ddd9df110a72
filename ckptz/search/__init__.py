"""From a quality budget to a configuration: budgets, spaces, predicted sizes, strategies.

Knows callables and configurations; no file, no framework.
"""
