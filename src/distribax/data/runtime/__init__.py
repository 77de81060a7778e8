"""Runs plans on Grain."""
