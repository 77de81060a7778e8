"""What `distribax run` starts, and the environment variables of each process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from distribax.cli.task_processes import OutputTarget
from distribax.cluster.peers.cluster_secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE
from distribax.cluster.ray.cluster_token import make_token
from distribax.cluster.ray.ports import find_quiet_ports
from distribax.cluster.spec.address import Address, parse_full_address

RESTART_VARIABLE: Final = "DISTRIBAX_RESTART_COUNT"
"""Tells a worker how often the cluster has been started again: '0' at first."""

_LOCAL_HOST: Final = "127.0.0.1"
# Variables that would contradict the cluster that the launcher describes.
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
    """A script or module, and the workers of this machine that are to run it."""

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    log_dir: str | None = None
    tee: bool = False
    workers: int = 1
    ps: int = 0
    devices_per_worker: int | None = None
    max_restarts: int = 0
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.is_module:
            _check_module(self.script)
        else:
            _check_script(self.script)
        if self.tee and self.log_dir is None:
            raise ValueError(
                "--tee shows what is also written to files; say where: --log-dir=logs."
            )
        _check_at_least("--workers", self.workers, 1)
        _check_at_least("--ps", self.ps, 0)
        if self.ps and self.nnodes > 1:
            raise ValueError(
                f"--ps={self.ps} starts a cluster on this machine alone, but --nnodes="
                f"{self.nnodes}. On several machines, give each process its TF_CONFIG, and run "
                "dx.Server(resolver).join() in the workers and parameter servers."
            )
        if self.devices_per_worker is not None:
            _check_at_least("--devices-per-worker", self.devices_per_worker, 1)
        _check_at_least("--max-restarts", self.max_restarts, 0)
        _check_at_least("--nnodes", self.nnodes, 1)
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
            self.parse_leader()
        if not self.grace_seconds >= 0:
            raise ValueError(f"--grace-seconds={self.grace_seconds}: expected 0 or more seconds.")

    @property
    def command(self) -> list[str]:
        """What a worker runs: the script or "-m" and the module, and their arguments."""
        return [*(["-m"] if self.is_module else []), self.script, *self.arguments]

    @property
    def output_target(self) -> OutputTarget:
        """Where the output of the processes goes."""
        if self.log_dir is None:
            return OutputTarget()
        return OutputTarget(Path(self.log_dir), is_shown=self.tee)

    def parse_leader(self) -> Address:
        """Returns the address of worker 0, the only one that all machines of a cluster know."""
        assert self.rdzv_endpoint is not None
        return parse_full_address(self.rdzv_endpoint, "--rdzv-endpoint")

    @property
    def worker_ids(self) -> range:
        """The numbers, in the whole cluster, of the workers on this machine."""
        return range(self.node_rank * self.workers, (self.node_rank + 1) * self.workers)

    def make_environments(
        self, inherited: Mapping[str, str], restart: int
    ) -> dict[int, dict[str, str]]:
        """Returns the environment of each worker by its number; each call uses new free ports."""
        common = self._make_common(inherited, restart)
        if self.rdzv_endpoint is None:
            addresses = [
                Address(_LOCAL_HOST, port) for port in find_quiet_ports(self.workers, _LOCAL_HOST)
            ]
            leader = addresses[0]
        else:
            addresses, leader = [], self.parse_leader()
        return {
            worker_id: common
            | self._make_place(worker_id, leader)
            | (_make_tf_config({"worker": addresses}, "worker", worker_id) if addresses else {})
            for worker_id in self.worker_ids
        }

    def make_task_environments(
        self, inherited: Mapping[str, str], restart: int
    ) -> dict[tuple[str, int], dict[str, str]]:
        """Returns the environment of the chief, the workers and the parameter servers, by task."""
        common = self._make_common(inherited, restart)
        sizes = {"chief": 1, "worker": self.workers, "ps": self.ps}
        ports = iter(find_quiet_ports(sum(sizes.values()), _LOCAL_HOST))
        cluster = {
            job: [Address(_LOCAL_HOST, next(ports)) for _ in range(size)]
            for job, size in sizes.items()
        }
        return {
            (job, index): common | _make_tf_config(cluster, job, index)
            for job, size in sizes.items()
            for index in range(size)
        }

    def _make_common(self, inherited: Mapping[str, str], restart: int) -> dict[str, str]:
        """Returns the variables that all processes get."""
        common = {k: v for k, v in inherited.items() if k not in _CLUSTER_VARIABLES}
        common[RESTART_VARIABLE] = str(restart)
        # Several machines would each make their own.
        if self.nnodes == 1 and not {SECRET_VARIABLE, SECRET_FILE_VARIABLE} & common.keys():
            common[SECRET_VARIABLE] = make_token()
        if self.devices_per_worker is not None:
            common["JAX_NUM_CPU_DEVICES"] = str(self.devices_per_worker)
            # JAX refuses to start if the number is set in both ways.
            if "XLA_FLAGS" in common:
                common["XLA_FLAGS"] = _DEVICE_COUNT_FLAG.sub("", common["XLA_FLAGS"]).strip()
        return common

    def _make_place(self, worker_id: int, leader: Address) -> dict[str, str]:
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


def _check_script(script: str) -> None:
    if not Path(script).is_file():
        kind = "is a folder" if Path(script).is_dir() else "does not exist"
        raise ValueError(
            f"the script {script!r} {kind}. Expected the path of a Python file, or -m and the name "
            "of a module. Options of the launcher come before it, and those of the script after it."
        )


def _check_module(module: str) -> None:
    """Checks that the package that contains the module is found; imports nothing."""
    top = module.partition(".")[0]
    found = top in sys.builtin_module_names or PathFinder.find_spec(top, ["", *sys.path])
    if not found:
        raise ValueError(
            f"-m {module}: no module named {top!r}, neither in this folder nor among the installed "
            "packages. Expected a name as for `python -m`, such as my_package.train."
        )


def _check_at_least(option: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{option}={value}: expected a whole number of at least {minimum}.")


def _make_tf_config(cluster: Mapping[str, list[Address]], job: str, index: int) -> dict[str, str]:
    config = {
        "cluster": {job: [str(address) for address in tasks] for job, tasks in cluster.items()},
        "task": {"type": job, "index": index},
    }
    return {"TF_CONFIG": json.dumps(config)}
