"""Benchmarks of distribax against JAX by hand, TensorFlow and torch: see docs/benchmarks.md."""
