"""Snapshots of a server: when they are taken, what is in them, how they are written."""
