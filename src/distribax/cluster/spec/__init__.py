"""The description of a cluster: its addresses, jobs and tasks, and the role of each task."""
