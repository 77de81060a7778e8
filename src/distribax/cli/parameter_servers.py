"""The processes of `distribax run --ps`: a coordinator, and servers that are started again.

The script runs once, as the chief. When it ends, all processes end. A worker or a parameter server
that dies before that is started again: the coordinator recovers from its loss.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from distribax.cli.launch import Launch
from distribax.cli.restarts import ShortLives
from distribax.cli.task_processes import Failure, OutputTarget, ProcessSet, TaskProcess
from distribax.cluster.ray.cluster_token import find_token, make_token, make_token_environment

_SERVER_MAIN: Final = str(Path(__file__).with_name("server_main.py"))
_Task = tuple[str, int]
_CHIEF: Final[_Task] = ("chief", 0)


class _Tasks:
    """The processes of the cluster by task."""

    def __init__(
        self,
        commands: Mapping[_Task, Sequence[str]],
        environments: Mapping[_Task, Mapping[str, str]],
        processes: ProcessSet,
        target: OutputTarget,
    ) -> None:
        self._target = target
        self._commands = commands
        self._environments = environments
        self._processes = processes
        self._start_times: dict[_Task, float] = {}
        self._short_lives = {task: ShortLives() for task in environments}
        self._by_task: dict[_Task, TaskProcess] = {}
        for task in environments:
            self.start(task)

    @property
    def chief(self) -> TaskProcess:
        """The process that runs the script."""
        return self._by_task[_CHIEF]

    def start(self, task: _Task) -> None:
        """Starts the process of a task; if it has died, starts it again."""
        if task in self._by_task:
            self._processes.remove(self._by_task.pop(task))
        job, index = task
        name = job if task == _CHIEF else f"{job} {index}"
        process = TaskProcess(name, self._commands[task], self._environments[task], self._target)
        self._by_task[task] = process
        self._start_times[task] = time.monotonic()
        self._processes.add(process)

    def find_dead_servers(self) -> dict[_Task, Failure]:
        """Returns the workers and parameter servers that have died, and how."""
        return {
            task: failure
            for task, process in self._by_task.items()
            if task != _CHIEF and process.has_ended() and (failure := process.find_failure())
        }

    def count_death(self, task: _Task) -> bool:
        """Notes that a task has died; returns whether it dies too often soon after its start."""
        return self._short_lives[task].add(time.monotonic() - self._start_times[task])


def run_cluster(
    launch: Launch, restart: int, stops: Sequence[int], say: Callable[[str], None]
) -> Failure | None:
    """Runs the script as the coordinator of a cluster.

    Args:
        launch: What to start.
        restart: How often the cluster was started before.
        stops: Signal handlers append signals to this list. The first one ends the processes, the
            second one kills them.
        say: Tells the user something.

    Returns:
        The failure that has ended the cluster, if any.
    """
    inherited = make_token_environment(find_token() or make_token(), os.environ)
    environments = launch.make_task_environments(inherited, restart)
    commands = {task: [_SERVER_MAIN] for task in environments}
    commands[_CHIEF] = launch.command
    with ProcessSet(stops) as processes:
        tasks = _Tasks(commands, environments, processes, launch.output_target)
        failure = _watch(tasks, processes, stops, say)
        processes.end(launch.grace_seconds)
    return failure


def _watch(
    tasks: _Tasks, processes: ProcessSet, stops: Sequence[int], say: Callable[[str], None]
) -> Failure | None:
    """Restarts dead servers until the chief has ended; returns the failure that ends them all."""
    while not stops:
        processes.pump()
        if failure := tasks.chief.find_failure():
            return failure
        if tasks.chief.has_ended():
            break
        for task, failure in tasks.find_dead_servers().items():
            if tasks.count_death(task):
                return failure
            say(f"{failure}; it is started again")
            tasks.start(task)
    return None
