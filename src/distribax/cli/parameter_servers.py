"""The processes of `distribax run --ps`: a coordinator, and servers that are started again.

The script runs once, as the chief. When it ends, all end. A worker or a parameter server that dies
before is started again in its place: the coordinator gets over it.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from distribax.cli.launch import Launch
from distribax.cli.processes import Failure, TaskProcess, end, pump, reap, register, unregister
from distribax.cli.restarts import MAX_SHORT_LIVES, SHORT_LIFE_SECONDS
from distribax.cluster.ray.cluster_token import find_token, make_token, make_token_environment

_SERVER_MAIN: Final = str(Path(__file__).with_name("server_main.py"))
_CHIEF: Final = ("chief", 0)
_Task = tuple[str, int]


class _Crew:
    """The processes of the cluster, by task."""

    def __init__(
        self,
        commands: Mapping[_Task, Sequence[str]],
        environments: Mapping[_Task, Mapping[str, str]],
        selector: selectors.BaseSelector,
    ) -> None:
        self._commands = commands
        self._environments = environments
        self._selector = selector
        self._started: dict[_Task, float] = {}
        self._short_lives = dict.fromkeys(environments, 0)
        self.processes: dict[_Task, TaskProcess] = {}

    def start(self, task: _Task) -> None:
        """Starts the process of a task, or starts it again."""
        if task in self.processes:
            dead = self.processes.pop(task)
            unregister(self._selector, dead)
            reap([dead])
        job, index = task
        name = job if task == _CHIEF else f"{job} {index}"
        process = TaskProcess(name, self._commands[task], self._environments[task])
        self.processes[task] = process
        self._started[task] = time.monotonic()
        register(self._selector, process)

    def dead_servers(self) -> dict[_Task, Failure]:
        """Returns the workers and parameter servers that have died, and how."""
        return {
            task: failure
            for task, process in self.processes.items()
            if task != _CHIEF and process.has_ended() and (failure := process.failure())
        }

    def is_hopeless(self, task: _Task) -> bool:
        """Tells whether a task has died too often soon after its start; ask once for each death."""
        short = time.monotonic() - self._started[task] < SHORT_LIFE_SECONDS
        self._short_lives[task] = self._short_lives[task] + 1 if short else 0
        return self._short_lives[task] > MAX_SHORT_LIVES


def run_cluster(
    launch: Launch, restart: int, stops: Sequence[int], say: Callable[[str], None]
) -> Failure | None:
    """Runs the script as the coordinator of a cluster; returns how it has failed, if it has.

    Args:
        launch: What to start.
        restart: How often the cluster was started before.
        stops: Signal handlers add to this. Its first entry ends the processes, its second kills
            them.
        say: Tells the user something.
    """
    inherited = make_token_environment(find_token() or make_token(), os.environ)
    environments = launch.task_environments(inherited, restart)
    commands = {task: [_SERVER_MAIN] for task in environments}
    commands[_CHIEF] = [launch.script, *launch.arguments]
    with selectors.DefaultSelector() as selector:
        crew = _Crew(commands, environments, selector)
        try:
            for task in environments:
                crew.start(task)
            failure = _watch(crew, selector, stops, say)
            end(list(crew.processes.values()), selector, launch.grace_seconds, stops)
        finally:
            reap(list(crew.processes.values()))
    return failure


def _watch(
    crew: _Crew,
    selector: selectors.BaseSelector,
    stops: Sequence[int],
    say: Callable[[str], None],
) -> Failure | None:
    """Looks after the processes until the chief has ended; returns the failure that ends all."""
    chief = crew.processes[_CHIEF]
    while not stops:
        pump(selector)
        if failure := chief.failure():
            return failure
        if chief.has_ended():
            break
        for task, failure in crew.dead_servers().items():
            if crew.is_hopeless(task):
                return failure
            say(f"{failure}; it is started again")
            crew.start(task)
    return None
