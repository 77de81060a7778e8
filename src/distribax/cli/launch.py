"""What `distribax run` is asked to start, and the environment that each worker gets for it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distribax.cluster.ray.ports import find_quiet_ports
from distribax.cluster.spec.address import Address, parse_address

RESTART_VARIABLE: Final = "DISTRIBAX_RESTART_COUNT"
"""Tells a worker how often the cluster was started again before it: '0' at first."""

_LOCAL_HOST: Final = "127.0.0.1"
# What would contradict the cluster that the launcher describes.
_CLUSTER_VARIABLES: Final = (
    "TF_CONFIG",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_DEVICE_COUNT_FLAG: Final = re.compile(r"--xla_force_host_platform_device_count=\S*")


@dataclass(frozen=True)
class Launch:
    """A script, and the workers of this machine that are to run it."""

    script: str
    arguments: tuple[str, ...] = ()
    workers: int = 1
    ps: int = 0
    devices_per_worker: int | None = None
    max_restarts: int = 0
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not Path(self.script).is_file():
            kind = "is a folder" if Path(self.script).is_dir() else "does not exist"
            raise ValueError(
                f"the script {self.script!r} {kind}. Expected the path of a Python file; the "
                "launcher's own options stand before it, the script's after it."
            )
        _at_least("--workers", self.workers, 1)
        _at_least("--ps", self.ps, 0)
        if self.ps and self.nnodes > 1:
            raise ValueError(
                f"--ps={self.ps} starts a cluster on this machine alone, but --nnodes="
                f"{self.nnodes}. On several machines, give each process its TF_CONFIG, and run "
                "dx.Server(resolver).join() in the workers and parameter servers."
            )
        if self.devices_per_worker is not None:
            _at_least("--devices-per-worker", self.devices_per_worker, 1)
        _at_least("--max-restarts", self.max_restarts, 0)
        _at_least("--nnodes", self.nnodes, 1)
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"--node-rank={self.node_rank}: with --nnodes={self.nnodes}, expected a number "
                f"from 0 to {self.nnodes - 1}; each machine has its own."
            )
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise ValueError(
                f"--nnodes={self.nnodes} needs --rdzv-endpoint=host:port, the same on every "
                "machine: the host of node 0 and a free port there."
            )
        if self.rdzv_endpoint is not None:
            self.leader()
        if not self.grace_seconds >= 0:
            raise ValueError(f"--grace-seconds={self.grace_seconds}: expected 0 or more seconds.")

    def leader(self) -> Address:
        """Returns where worker 0 listens; the machines of a larger cluster know only that."""
        assert self.rdzv_endpoint is not None
        address = parse_address(self.rdzv_endpoint, "--rdzv-endpoint")
        if address.port is None:
            raise ValueError(
                f"--rdzv-endpoint={self.rdzv_endpoint!r}: the port is missing: 'host:port'."
            )
        return address

    @property
    def worker_ids(self) -> range:
        """The numbers, in the whole cluster, of the workers on this machine."""
        return range(self.node_rank * self.workers, (self.node_rank + 1) * self.workers)

    def environments(self, inherited: Mapping[str, str], restart: int) -> dict[int, dict[str, str]]:
        """Returns each worker's environment by its number; every call takes new free ports."""
        common = self._common(inherited, restart)
        if self.rdzv_endpoint is None:
            addresses = [Address(_LOCAL_HOST, port) for port in _free_ports(self.workers)]
            leader = addresses[0]
        else:
            addresses, leader = [], self.leader()
        return {
            worker_id: common
            | self._place(worker_id, leader)
            | (_tf_config({"worker": addresses}, "worker", worker_id) if addresses else {})
            for worker_id in self.worker_ids
        }

    def task_environments(
        self, inherited: Mapping[str, str], restart: int
    ) -> dict[tuple[str, int], dict[str, str]]:
        """Returns the environment of the chief, the workers and the parameter servers, by task."""
        common = self._common(inherited, restart)
        sizes = {"chief": 1, "worker": self.workers, "ps": self.ps}
        ports = iter(find_quiet_ports(sum(sizes.values()), _LOCAL_HOST))
        cluster = {
            job: [Address(_LOCAL_HOST, next(ports)) for _ in range(size)]
            for job, size in sizes.items()
        }
        return {
            (job, index): common | _tf_config(cluster, job, index)
            for job, size in sizes.items()
            for index in range(size)
        }

    def _common(self, inherited: Mapping[str, str], restart: int) -> dict[str, str]:
        """Returns what all processes get."""
        common = {k: v for k, v in inherited.items() if k not in _CLUSTER_VARIABLES}
        common[RESTART_VARIABLE] = str(restart)
        if self.devices_per_worker is not None:
            common["JAX_NUM_CPU_DEVICES"] = str(self.devices_per_worker)
            # JAX refuses to be told the number in both ways.
            if "XLA_FLAGS" in common:
                common["XLA_FLAGS"] = _DEVICE_COUNT_FLAG.sub("", common["XLA_FLAGS"]).strip()
        return common

    def _place(self, worker_id: int, leader: Address) -> dict[str, str]:
        """Returns torchrun's and JAX's variables, for `dx` and for scripts that read them."""
        return {
            "MASTER_ADDR": leader.host,
            "MASTER_PORT": str(leader.port),
            "WORLD_SIZE": str(self.nnodes * self.workers),
            "RANK": str(worker_id),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(worker_id - self.worker_ids[0]),
            "JAX_COORDINATOR_ADDRESS": str(leader),
            "JAX_NUM_PROCESSES": str(self.nnodes * self.workers),
            "JAX_PROCESS_ID": str(worker_id),
        }


def _at_least(option: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{option}={value}: expected a whole number of at least {minimum}.")


def _tf_config(cluster: Mapping[str, list[Address]], job: str, index: int) -> dict[str, str]:
    config = {
        "cluster": {job: [str(address) for address in tasks] for job, tasks in cluster.items()},
        "task": {"type": job, "index": index},
    }
    return {"TF_CONFIG": json.dumps(config)}


def _free_ports(count: int) -> list[int]:
    """Returns different ports of this machine that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server((_LOCAL_HOST, 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]
