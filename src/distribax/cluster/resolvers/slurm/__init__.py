"""The resolver for tasks that Slurm has started."""
