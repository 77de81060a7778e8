"""The comparisons, one a file: what is measured, how often, and what the figures must be."""
