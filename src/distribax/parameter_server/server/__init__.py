"""A server: what it stores, and how pushes change it."""
