"""Tests of distributed input."""
