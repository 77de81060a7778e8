"""Helpers for tests of distributed programs."""

from __future__ import annotations

from distribax.testing.faults import Fault as Fault
from distribax.testing.faults import FaultInjector as FaultInjector
from distribax.testing.faults import FaultKind as FaultKind
from distribax.testing.faults import History as History
from distribax.testing.local_cluster import WorkerResult as WorkerResult
from distribax.testing.local_cluster import free_ports as free_ports
from distribax.testing.local_cluster import run_workers as run_workers
from distribax.testing.local_servers import LocalServersStrategy as LocalServersStrategy
from distribax.testing.local_servers import local_servers as local_servers
