"""Keras models whose variables live on parameter servers, and whose steps run on workers."""
