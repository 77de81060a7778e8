"""Compiled programs: what they read, write and return, and which one fits a call."""
