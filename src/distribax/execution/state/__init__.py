"""State that functions use: variables by their roles, stand-ins, other libraries' objects."""
