"""Traces: what code sees while a program is made of it."""
