"""From a quality budget to a configuration: budgets, spaces of settings, predicted sizes, strategies.

Knows callables and configurations; no file, no framework.
"""
