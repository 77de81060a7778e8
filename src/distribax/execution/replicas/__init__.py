"""The two ways to run replicas: one compiled SPMD program, or eager threads."""
