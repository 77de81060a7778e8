"""Resolvers: where a cluster's description comes from, one file for each source."""
