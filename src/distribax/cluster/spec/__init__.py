"""The description of a cluster: addresses, jobs and tasks, and who plays which role."""
