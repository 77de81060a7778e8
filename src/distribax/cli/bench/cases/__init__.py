"""What `distribax bench` measures: one file per case, each a function that returns a report."""
