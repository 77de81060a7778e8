"""The iterators of a running pipeline, one kind of step a module."""
