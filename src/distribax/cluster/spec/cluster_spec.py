"""The description of a cluster: jobs, their tasks, and the tasks' addresses."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, SupportsIndex

from typing_extensions import override

from distribax.cluster.spec.address import Address, parse_address, parse_full_address
from distribax.cluster.spec.cluster_def import ClusterDef, ClusterLike, JobDef

MAX_TASKS: Final = 1_000_000
"""Task indices are smaller than this: `job_tasks` makes a list as long as the highest index."""

Tasks = Sequence[str] | Mapping[int, str] | Mapping[str, str]


class ClusterSpec:
    """A cluster: its jobs, the tasks of each, and their addresses.

    Args:
        cluster: A dict from job names to their tasks, another ClusterSpec, or a ClusterDef. The
            tasks of a job are a list of addresses ('host:port'), or, if only some are known, a dict
            from task index to address.

    Raises:
        TypeError: `cluster` has another form.
        ValueError: An address or an index is malformed, or occurs twice.

    >>> cluster = ClusterSpec({"worker": ["w0:2222", "w1:2222"], "ps": {3: "p3:2222"}})
    >>> cluster.jobs
    ['worker', 'ps']
    >>> cluster.num_tasks("worker"), cluster.task_indices("ps")
    (2, [3])
    >>> cluster.task_address("worker", 1)
    'w1:2222'
    """

    def __init__(self, cluster: Mapping[str, Tasks] | ClusterSpec | ClusterLike) -> None:
        self._tasks: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._tasks = {job: dict(tasks) for job, tasks in cluster._tasks.items()}
            return
        if isinstance(cluster, ClusterLike) and not isinstance(cluster, Mapping):
            cluster = {job.name: dict(job.tasks) for job in cluster.job}
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"cluster={cluster!r} is a {type(cluster).__name__}. Expected a dict from job "
                "names to addresses, such as {'worker': ['host0:2222', 'host1:2222']}."
            )
        self._tasks = {
            parse_task_type(job, "cluster: job name"): _index_tasks(job, tasks)
            for job, tasks in cluster.items()
        }
        _check_addresses(self._tasks)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Returns how many tasks the job has.

        Args:
            job_name: The job.

        Returns:
            The number of tasks.

        Raises:
            ValueError: The cluster has no such job.
        """
        return len(self._get_job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the job's tasks, sorted.

        Args:
            job_name: The job.

        Returns:
            The indices.

        Raises:
            ValueError: The cluster has no such job.
        """
        return sorted(self._get_job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Args:
            job_name: The job of the task.
            task_index: The index of the task in its job.

        Returns:
            The address, 'host:port'.

        Raises:
            ValueError: The cluster has no such task.
        """
        job = self._get_job(job_name)
        if task_index not in job:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}; it has the tasks "
                f"{_list_some(sorted(job))}."
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of the job's tasks by index, None for an index that is not in use.

        Args:
            job_name: The job.

        Returns:
            The addresses, as many as the highest index demands.

        Raises:
            ValueError: The cluster has no such job.

        >>> ClusterSpec({"ps": {0: "p0:2222", 2: "p2:2222"}}).job_tasks("ps")
        ['p0:2222', None, 'p2:2222']
        """
        job = self._get_job(job_name)
        return [job.get(i) for i in range(max(job, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns a dict from jobs to lists of addresses, or to dicts if some indices are missing.

        >>> ClusterSpec({"worker": {1: "b:1", 0: "a:1"}, "ps": {3: "c:1"}}).as_dict()
        {'worker': ['a:1', 'b:1'], 'ps': {3: 'c:1'}}
        """
        return {job: _compact(tasks) for job, tasks in self._tasks.items()}

    def as_cluster_def(self) -> ClusterDef:
        """Returns the cluster as an object like TensorFlow's `ClusterDef`.

        Returns:
            An object whose `job` lists the jobs, each with its name and tasks.

        >>> ClusterSpec({"worker": ["a:1", "b:1"]}).as_cluster_def().job[0].tasks
        {0: 'a:1', 1: 'b:1'}
        """
        return ClusterDef(
            [JobDef(job, dict(sorted(self._tasks[job].items()))) for job in sorted(self._tasks)]
        )

    def _get_job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._tasks:
            raise ValueError(
                f"No such job in cluster: {job_name!r}; it has the jobs {_list_some(self._tasks)}."
            )
        return self._tasks[job_name]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._tasks == other._tasks
        if isinstance(other, Mapping):
            # Both forms of a job's tasks are equal to it.
            return self._tasks == {
                job: dict(enumerate(tasks)) if isinstance(tasks, list | tuple) else tasks
                for job, tasks in other.items()
            }
        return NotImplemented

    @override
    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"


def parse_task_index(value: object, field: str) -> int:
    """Returns the index of a task as a number.

    Args:
        value: The index, also as text: the keys of JSON objects are text.
        field: Where the value comes from, for error messages.

    Raises:
        TypeError: The value is neither text nor an integer.
        ValueError: It is not an index.
    """
    where = f"{field}={value!r}"
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise ValueError(f"{where}: expected an index, 0, 1, 2 and so on.")
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{where}: is a {type(value).__name__}. Expected an index, such as 0.")
    index = operator.index(value)
    if not 0 <= index < MAX_TASKS:
        raise ValueError(f"{where}: expected an index from 0 to {MAX_TASKS - 1}.")
    return index


def parse_task_type(value: object, field: str) -> str:
    """Returns the value, which must be the name of a job.

    Args:
        value: The name.
        field: Where the value comes from, for error messages.

    Raises:
        TypeError: The value is not text.
        ValueError: It is empty.
    """
    if not isinstance(value, str):
        raise TypeError(
            f"{field}={value!r}: is a {type(value).__name__}. Expected a job's name, such as "
            "'worker'."
        )
    if not value:
        raise ValueError(f"{field}='': expected a job's name, such as 'worker'.")
    return value


def _name_job_field(job: str) -> str:
    return f"cluster.{job}" if job.isidentifier() else f"cluster[{job!r}]"


def name_task_field(job: str, index: int) -> str:
    """Returns how error messages refer to the address of a task."""
    return f"{_name_job_field(job)}[{index}]"


def parse_task_address(cluster_spec: ClusterSpec, job: str, index: int) -> Address:
    """Returns the address of a task, which must have a port."""
    return parse_full_address(cluster_spec.task_address(job, index), name_task_field(job, index))


def _index_tasks(job: str, tasks: object) -> dict[int, str]:
    """Returns the tasks of a job by index, from a list or a dict."""
    field = _name_job_field(job)
    indexed: dict[int, object]
    if isinstance(tasks, Mapping):
        indexed = {parse_task_index(i, f"{field}: index"): address for i, address in tasks.items()}
        if len(indexed) < len(tasks):
            raise ValueError(f"{field}: an index occurs twice, as a number and as text.")
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        indexed = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"{field}={tasks!r}: is a {type(tasks).__name__}. Expected a list of addresses, or a "
            "dict from task index to address."
        )
    addresses: dict[int, str] = {}
    for i, address in indexed.items():
        if not isinstance(address, str):
            raise TypeError(
                f"{field}[{i}]={address!r}: is a {type(address).__name__}. Expected an address "
                "'host:port'."
            )
        addresses[i] = address
    return addresses


def _check_addresses(jobs: Mapping[str, Mapping[int, str]]) -> None:
    """Raises an error if a task has no proper address, or the address of another task."""
    seen: dict[Address, str] = {}
    for job, tasks in jobs.items():
        for i, text in tasks.items():
            field = name_task_field(job, i)
            address = parse_address(text, field)
            first = seen.setdefault(Address(address.host.lower(), address.port), field)
            if first != field:
                raise ValueError(
                    f"{field}={text!r}: {first} has this address already. Give each task its own."
                )


def _compact(tasks: Mapping[int, str]) -> list[str] | dict[int, str]:
    indices = sorted(tasks)
    if indices and indices[-1] + 1 == len(indices):
        return [tasks[i] for i in indices]
    return {i: tasks[i] for i in indices}


def _list_some(items: Iterable[object]) -> str:
    """Returns a text with up to ten of the items."""
    shown = [str(item) for item in items]
    if len(shown) > 10:
        shown = [*shown[:8], "...", shown[-1]]
    return ", ".join(shown) if shown else "(none)"
