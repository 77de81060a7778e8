"""Large variables divided over servers: the variable, its division, partitioners, lookups."""
