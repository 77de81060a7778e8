"""`dx.function`: the decorator, and what it makes of a function."""
