"""A resolver for tasks that Slurm's srun has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from typing_extensions import override

from distribax.cluster.environment_variables import read_integer
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.resolvers.slurm import gpus
from distribax.cluster.resolvers.slurm.host_lists import expand_hostlist, expand_tasks_per_node
from distribax.cluster.spec.address import Address, make_natural_key, parse_port
from distribax.cluster.spec.cluster_spec import ClusterSpec, parse_task_type
from distribax.errors import DistribaxError

T = TypeVar("T")

_STEP_VARIABLES: Final = ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")


class SlurmError(DistribaxError, ValueError, RuntimeError):
    """Slurm's variables do not describe the cluster that was asked for.

    It is a ValueError, like all errors in the description of a cluster, and a RuntimeError because
    TensorFlow raises that.
    """


class SlurmClusterResolver(ClusterResolver):
    """Reads the cluster from the variables that srun sets for each task.

    SLURM_PROCID says which task this process is. Everything that is not given as an argument is
    read from SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE. The tasks of
    a host have the ports `port_base`, `port_base` + 1 and so on.

    Args:
        jobs: The jobs and how many tasks each has. Tasks are assigned to the jobs in the order of
            their names: {"ps": 1, "worker": 4} makes Slurm's task 0 the parameter server. By
            default all tasks are workers.
        port_base: The first port on each host.
        gpus_per_node: The GPUs of a host. The default is those in CUDA_VISIBLE_DEVICES, else
            SLURM_GPUS_ON_NODE, else what nvidia-smi lists.
        gpus_per_task: The GPUs of a task, the same for all. The default is an equal share.
        tasks_per_node: How many tasks run on each host: a number, or a dict from host to number.
        auto_set_gpu: Whether `cluster_spec` makes only this task's GPUs visible to the process,
            by setting CUDA_VISIBLE_DEVICES.
        rpc_layer: The protocol between tasks.

    Raises:
        SlurmError: A variable is missing, or the variables contradict the arguments.
        ValueError: An argument or a variable is not valid.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._rank = _require_integer("SLURM_PROCID")
        self._hosts = _count_tasks_of_hosts(tasks_per_node)
        num_tasks = sum(self._hosts.values())
        self._jobs = self._check_jobs(jobs, num_tasks)
        self._port_base = parse_port(port_base, f"port_base={port_base!r}")
        parse_port(
            self._port_base + max(self._hosts.values()) - 1,
            f"port_base={port_base!r}: for {max(self._hosts.values())} tasks on a host",
        )
        if self._rank >= num_tasks:
            raise SlurmError(f"SLURM_PROCID={self._rank}: there are {num_tasks} tasks.")
        if tasks_per_node is None:
            self._check_layout()
        self._auto_set_gpu = auto_set_gpu
        self._gpus_were_seen = gpus_per_node is None
        self._gpus, self._gpus_per_task = self._divide_gpus(gpus_per_node, gpus_per_task)
        self.rpc_layer = rpc_layer

    @classmethod
    @override
    def find_variables(cls) -> list[str]:
        """Returns Slurm's variables if srun has started this process as one of several tasks.

        An interactive shell, or a batch script outside srun, is a single task, whatever Slurm has
        allocated.
        """
        if any(name not in os.environ for name in _STEP_VARIABLES):
            return []
        return list(_STEP_VARIABLES) if _require_integer("SLURM_STEP_NUM_TASKS") > 1 else []

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster; with `auto_set_gpu`, also sets CUDA_VISIBLE_DEVICES."""
        addresses = [
            str(Address(host, self._port_base + i))
            for host, num_tasks in self._hosts.items()
            for i in range(num_tasks)
        ]
        if self._auto_set_gpu and self._gpus_per_task:
            first = self.local_task_id * self._gpus_per_task
            share = self._gpus[first : first + self._gpus_per_task]
            gpus.take_share(share, self._gpus if self._gpus_were_seen else None)
        numbers = iter(addresses)
        return ClusterSpec(
            {job: [next(numbers) for _ in range(count)] for job, count in self._jobs.items()}
        )

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job of this process and its index in the job."""
        return self.task_type, self.task_id

    @property
    @override
    def local_task_id(self) -> int:
        """The number of this process among the tasks of its host."""
        return [i for num_tasks in self._hosts.values() for i in range(num_tasks)][self._rank]

    @override
    def _count_accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        return {"GPU": self._gpus_per_task}

    @override
    def _find_task(self) -> tuple[str | None, int | None]:
        return [(job, i) for job, count in self._jobs.items() for i in range(count)][self._rank]

    @staticmethod
    def _check_jobs(jobs: Mapping[str, int] | None, num_tasks: int) -> dict[str, int]:
        source = "jobs"
        if jobs is None:
            source = "SLURM_STEP_NUM_TASKS"
            jobs = {"worker": _require_integer(source)}
        for job, count in jobs.items():
            parse_task_type(job, "jobs: job name")
            _check_count(count, f"jobs[{job!r}]")
        if sum(jobs.values()) != num_tasks:
            raise SlurmError(
                f"{source}: asks for {sum(jobs.values())} tasks, and Slurm has started "
                f"{num_tasks}. The jobs must use all of them."
            )
        return dict(sorted(jobs.items()))

    def _check_layout(self) -> None:
        """Checks that Slurm has numbered its tasks host by host: the addresses depend on it."""
        node_id = read_integer("SLURM_NODEID")
        if node_id is None:
            return
        before = [sum([*self._hosts.values()][:i]) for i in range(len(self._hosts) + 1)]
        if node_id >= len(self._hosts) or not before[node_id] <= self._rank < before[node_id + 1]:
            raise SlurmError(
                f"SLURM_NODEID={node_id}: the task SLURM_PROCID={self._rank} should be on another "
                "of the hosts in SLURM_STEP_NODELIST. Tasks must be numbered host by host: start "
                "them with srun --distribution=block, or give tasks_per_node."
            )

    def _divide_gpus(self, per_node: int | None, per_task: int | None) -> tuple[list[str], int]:
        """Returns the GPUs of this host and how many of them each task has."""
        visible = [] if per_node is not None and per_task is not None else gpus.list_visible_gpus()
        if per_node is None and per_task is None and "SLURM_GPUS_PER_TASK" in os.environ:
            # Slurm itself has divided them: a task sees only its own.
            self._auto_set_gpu = False
            return visible, len(visible)
        max_tasks = max(self._hosts.values())
        if per_node is not None:
            _check_count(per_node, "gpus_per_node")
            visible = visible if len(visible) == per_node else [str(i) for i in range(per_node)]
        if per_task is None:
            return visible, len(visible) // max_tasks
        _check_count(per_task, "gpus_per_task")
        if max_tasks * per_task > len(visible):
            raise SlurmError(
                f"gpus_per_task={per_task}: {max_tasks} tasks on a host need "
                f"{max_tasks * per_task} GPUs, and it has {len(visible)} (gpus_per_node)."
            )
        return visible, per_task


def _count_tasks_of_hosts(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    """Returns how many tasks run on each host, in the order in which Slurm numbers them."""
    if isinstance(tasks_per_node, Mapping):
        hosts = {
            host: tasks_per_node[host] for host in sorted(tasks_per_node, key=make_natural_key)
        }
        for host, count in hosts.items():
            _check_count(count, f"tasks_per_node[{host!r}]")
    else:
        # Slurm's list is already in the order of its task numbers.
        names = _expand("SLURM_STEP_NODELIST", expand_hostlist)
        if tasks_per_node is None:
            counts = _expand("SLURM_STEP_TASKS_PER_NODE", expand_tasks_per_node)
        else:
            _check_count(tasks_per_node, "tasks_per_node")
            counts = [tasks_per_node] * len(names)
        if len(counts) != len(names):
            raise SlurmError(
                f"SLURM_STEP_TASKS_PER_NODE: is for {len(counts)} hosts, and "
                f"SLURM_STEP_NODELIST has {len(names)}."
            )
        hosts = dict(zip(names, counts, strict=True))
        if len(hosts) < len(names):
            raise SlurmError("SLURM_STEP_NODELIST: a host occurs twice.")
    if not any(hosts.values()):
        raise SlurmError(f"tasks_per_node={tasks_per_node!r}: there are no tasks.")
    return hosts


def _expand(name: str, expand: Callable[[str], list[T]]) -> list[T]:
    """Returns the list that is abbreviated in one of Slurm's variables."""
    text = _require(name)
    try:
        return expand(text)
    except ValueError as error:
        raise SlurmError(f"{name}: {error}") from None


def _require(name: str) -> str:
    if name not in os.environ:
        raise SlurmError(
            f"{name} is missing. Slurm sets it for the tasks that srun starts; is this one?"
        )
    return os.environ[name]


def _require_integer(name: str) -> int:
    _require(name)
    number = read_integer(name)
    assert number is not None
    return number


def _check_count(value: object, field: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{field}={value!r}: expected a whole number, 0 or more.")
