"""A resolver that reads the variables of torchrun and of JAX."""

from __future__ import annotations

import os
from typing import Final

from typing_extensions import override

from distribax.cluster.environment_variables import read_integer
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.address import (
    MAX_PORT,
    Address,
    parse_address,
    parse_full_address,
    parse_port,
)
from distribax.cluster.spec.cluster_spec import MAX_TASKS, ClusterSpec

_JAX_VARIABLES: Final = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_TORCH_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


class EnvironmentClusterResolver(ClusterResolver):
    """Reads the cluster from the variables of JAX programs, or from those that torchrun sets.

    | | JAX | torchrun |
    |---|---|---|
    | address of process 0 | JAX_COORDINATOR_ADDRESS | MASTER_ADDR, MASTER_PORT |
    | number of processes | JAX_NUM_PROCESSES | WORLD_SIZE |
    | number of this process | JAX_PROCESS_ID | RANK |
    | its number on this machine | | LOCAL_RANK |

    They are read at each use; if both variables of a line are set, JAX's is used. All processes are
    workers. Only the address of worker 0 is known: the hosts of the others are called
    rank-1.invalid and so on, names that no host can have.

    Args:
        coordinator_address: The address of process 0, instead of the variables'.
        num_processes: The number of processes, instead of the variables'.
        process_id: The number of this process, instead of the variables'.
        rpc_layer: The protocol between tasks.

    Raises:
        TypeError: `coordinator_address` is not text.
        ValueError: `num_processes` is not a number of processes.

    >>> EnvironmentClusterResolver("host0:2222", num_processes=2, process_id=0).cluster_spec()
    ClusterSpec({'worker': ['host0:2222', 'rank-1.invalid:2222']})
    """

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if coordinator_address is not None and not isinstance(coordinator_address, str):
            raise TypeError(
                f"coordinator_address={coordinator_address!r} is a "
                f"{type(coordinator_address).__name__}. Expected 'host:port'."
            )
        if num_processes is not None and (
            not isinstance(num_processes, int) or not 1 <= num_processes <= MAX_TASKS
        ):
            raise ValueError(
                f"num_processes={num_processes!r}: expected a whole number from 1 to {MAX_TASKS}."
            )
        self._coordinator_address = coordinator_address
        self._num_processes = num_processes
        self.task_id = process_id
        self.rpc_layer = rpc_layer

    @classmethod
    @override
    def find_variables(cls) -> list[str]:
        """Returns the variables that are set, if they are meant to describe a cluster.

        Other programs also use some of torchrun's names, so that one of them proves nothing: both
        RANK and WORLD_SIZE must be set.
        """
        jax_names = [name for name in _JAX_VARIABLES if name in os.environ]
        torch_names = [name for name in _TORCH_VARIABLES if name in os.environ]
        if not jax_names and not {"RANK", "WORLD_SIZE"} <= set(torch_names):
            return []
        return jax_names + torch_names

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that the variables describe now; an empty one if none is set.

        Raises:
            ValueError: A variable is malformed or missing.
        """
        if not self._is_described():
            return ClusterSpec({})
        num_processes = self._count_processes()
        self._find_own_id(num_processes)
        leader = self._find_leader(num_processes)
        others = (Address(f"rank-{i}.invalid", leader.port) for i in range(1, num_processes))
        return ClusterSpec({"worker": [str(leader), *map(str, others)]})

    @property
    @override
    def local_task_id(self) -> int | None:
        """The number of this process among those of its machine: LOCAL_RANK."""
        return read_integer("LOCAL_RANK")

    @override
    def _find_task(self) -> tuple[str | None, int | None]:
        if not self._is_described():
            return None, None
        return "worker", self._find_own_id(self._count_processes())

    def _is_described(self) -> bool:
        given = (self._coordinator_address, self._num_processes, self._task_id)
        return given != (None, None, None) or bool(self.find_variables())

    def _count_processes(self) -> int:
        if self._num_processes is not None:
            return self._num_processes
        for name in ("JAX_NUM_PROCESSES", "WORLD_SIZE"):
            if (count := read_integer(name, minimum=1)) is not None:
                if count > MAX_TASKS:
                    raise ValueError(f"{name}={count}: expected at most {MAX_TASKS}.")
                return count
        raise _make_missing_error("the number of processes", "JAX_NUM_PROCESSES (or WORLD_SIZE)")

    def _find_own_id(self, num_processes: int) -> int:
        sources = (
            ("process_id", self._task_id),
            ("JAX_PROCESS_ID", read_integer("JAX_PROCESS_ID")),
            ("RANK", read_integer("RANK")),
        )
        for name, number in sources:
            if number is not None:
                if number >= num_processes:
                    raise ValueError(
                        f"{name}={number}: there are {num_processes} processes, with the numbers "
                        f"0 to {num_processes - 1}."
                    )
                return number
        raise _make_missing_error("the number of this process", "JAX_PROCESS_ID (or RANK)")

    def _find_leader(self, num_processes: int) -> Address:
        """Returns the address of process 0."""
        for field, text in (
            ("coordinator_address", self._coordinator_address),
            ("JAX_COORDINATOR_ADDRESS", os.environ.get("JAX_COORDINATOR_ADDRESS")),
        ):
            if text is not None:
                return parse_full_address(text, field)
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is None and num_processes == 1:
            return Address("localhost")
        if host is None or port is None:
            missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
            raise _make_missing_error(
                "the address of process 0", f"JAX_COORDINATOR_ADDRESS ({missing} is missing too)"
            )
        number = parse_port(port.strip(), f"MASTER_PORT={port!r}")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun itself listens on that port.
            number += 1 if number < MAX_PORT else -1
        bracketed = f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host
        address = parse_address(bracketed, "MASTER_ADDR")
        if address.port is not None:
            raise ValueError(f"MASTER_ADDR={host!r}: has a port. The port is MASTER_PORT.")
        return Address(address.host, number)


def _make_missing_error(what: str, name: str) -> ValueError:
    return ValueError(f"{name} is missing: {what} is not known. Set it, or give it as an argument.")
