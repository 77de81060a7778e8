"""One call of a compiled function: its arguments, and what they make it special for."""
