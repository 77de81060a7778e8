"""JAX's coordination service, for a process that holds nothing else.

The hub loads this file by its path: it imports nothing of distribax, and of JAX only what it needs.
"""

from __future__ import annotations

from jaxlib import _jax

# Years, in seconds: the hub watches the processes, and much sooner.
_NEVER = 10**8


def start_service(address: str, num_processes: int) -> object:
    """Returns the service, which runs as long as it is referred to.

    Its processes are "recoverable": no process is told to end because another one is lost, and none
    waits for the others when it ends.
    """
    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=_NEVER, recoverable=True
    )
