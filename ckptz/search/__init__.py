"""The search for the smallest file within a quality budget: budgets, trials, measurements."""
