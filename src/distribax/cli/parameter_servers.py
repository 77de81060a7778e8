"""The processes of `distribax run --ps`: a coordinator, and servers that are started again.

The script runs once, as the chief. When it ends, all processes end. A worker or a parameter server
that dies before that is started again: the coordinator recovers from its loss.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from distribax.cli.launch import Launch
from distribax.cli.restarts import ShortLives
from distribax.cli.task_processes import ProcessSet, TaskFailure, TaskProcess
from distribax.cluster.ray.cluster_token import find_token, make_token, make_token_environment

_SERVER_MAIN: Final = str(Path(__file__).with_name("server_main.py"))


class _Task:
    """A task of the cluster, whose process is started again when it dies.

    Args:
        make_process: Starts the process.
        processes: Where it is added.
    """

    def __init__(self, make_process: Callable[[], TaskProcess], processes: ProcessSet) -> None:
        self._make_process = make_process
        self._processes = processes
        self._short_lives = ShortLives()
        self._start()

    def _start(self) -> None:
        self.process = self._make_process()
        self._started = time.monotonic()
        self._processes.add(self.process)

    def start_again(self) -> None:
        """Replaces the process, which has died."""
        self._processes.remove(self.process)
        self._start()

    def count_death(self) -> bool:
        """Notes that the process has died; returns whether it does too often after its start."""
        return self._short_lives.add(time.monotonic() - self._started)


def run_cluster(
    launch: Launch, restart: int, stops: Sequence[int], say: Callable[[str], None]
) -> TaskFailure | None:
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
    starts = [
        partial(
            TaskProcess,
            job if job == "chief" else f"{job} {index}",
            launch.command if job == "chief" else [_SERVER_MAIN],
            environment,
            launch.output_target,
        )
        for (job, index), environment in environments.items()
    ]
    with ProcessSet(stops) as processes:
        chief, *servers = (_Task(start, processes) for start in starts)
        failure = _watch(chief, servers, processes, stops, say)
        processes.end(launch.grace_seconds)
    return failure


def _watch(
    chief: _Task,
    servers: Sequence[_Task],
    processes: ProcessSet,
    stops: Sequence[int],
    say: Callable[[str], None],
) -> TaskFailure | None:
    """Restarts dead servers until the chief has ended; returns the failure that ends them all."""
    while not stops:
        processes.pump()
        # Asked first: it may end, and fail, between the two questions.
        has_ended = chief.process.has_ended()
        if (failure := chief.process.find_failure()) or has_ended:
            return failure
        for server in servers:
            if server.process.has_ended() and (failure := server.process.find_failure()):
                if server.count_death():
                    return failure
                say(f"{failure}; it is started again")
                server.start_again()
    return None
