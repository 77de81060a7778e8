"""Resolvers: one file or folder for each source that can describe a cluster."""
