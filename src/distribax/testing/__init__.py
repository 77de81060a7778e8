"""Helpers for tests of distributed programs, ours and yours."""

from distribax.testing.local_cluster import WorkerResult as WorkerResult
from distribax.testing.local_cluster import free_ports as free_ports
from distribax.testing.local_cluster import run_workers as run_workers
