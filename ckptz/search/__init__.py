"""From a quality budget to a file: budgets, what is tried, how it is measured, and the best of it."""
