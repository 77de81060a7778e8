"""`distribax run`: starts the workers of a cluster on this machine."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from distribax.cli.help_format import USAGE_ERROR, add_command
from distribax.cli.launch import Launch
from distribax.cli.parameter_servers import run_cluster
from distribax.cli.restarts import (
    MAX_SHORT_LIVES,
    SHORT_LIFE_SECONDS,
    RestartDecision,
    RestartPolicy,
)
from distribax.cli.task_processes import TaskFailure, run_workers
from distribax.cluster.peers.cluster_secret import SECRET_FILE_VARIABLE, find_secret
from distribax.cluster.spec.host_address import is_loopback
from distribax.types import RESTARTABLE_EXIT_CODE

_INDENT: Final = "    "


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = add_command(
        commands,
        "run",
        summary="start a script in several worker processes",
        description="Starts a script in the workers of a cluster, on this machine or as its part "
        "of a larger cluster, and ends them all when one fails. Options of the launcher come "
        "before the script, those of the script after it.",
        examples="""
distribax run --workers 2 train.py
distribax run --workers 2 --devices-per-worker 4 train.py --batch-size 64
distribax run --workers 2 -m my_package.train
distribax run --workers 4 --log-dir logs --tee train.py
distribax run --workers 2 --ps 1 train.py
distribax run --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:9876 train.py""",
    )
    parser.usage = "distribax run [options] (script | -m module) [arguments ...]"
    add = parser.add_argument
    add("--workers", type=int, default=1, metavar="N", help="worker processes on this machine")
    add(
        "--ps",
        type=int,
        default=0,
        metavar="M",
        help="parameter servers: the script then runs once, as the coordinator of N workers and "
        "M servers",
    )
    add("--devices-per-worker", type=int, metavar="M", help="virtual CPU devices of each worker")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="how often all workers are started again when one has failed; exit code 42 (told to "
        "stop, and has saved) is not a failure",
    )
    add("--nnodes", type=int, default=1, help="machines in the cluster, each with N workers")
    add("--node-rank", type=int, default=0, help="number of this machine, from 0")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="host of node 0, and a free port there")
    add(
        "--grace-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="how long workers may take to end when they are told to",
    )
    add(
        "--log-dir",
        metavar="FOLDER",
        help="write the output of each process to a file of its own in this folder, such as "
        "worker_0.log, and not to the terminal",
    )
    add("--tee", action="store_true", help="with --log-dir: show the output in the terminal, too")
    add(
        "-m",
        "--module",
        action="store_true",
        dest="is_module",
        help="`script` is the name of a module, as in `python -m`",
    )
    add(
        "script",
        nargs="?",
        help="the Python file, or the module, that every worker runs, or the coordinator",
    )
    add("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the script and returns the exit code of the first worker that failed, 0 if none did."""
    names = Launch.__dataclass_fields__
    settings = {name: value for name, value in vars(options).items() if name in names}
    settings["arguments"] = tuple(options.arguments)
    try:
        if options.script is None:
            raise ValueError(
                "the script is missing: distribax run [options] train.py [arguments], or "
                "distribax run [options] -m package.module [arguments]. See distribax run --help."
            )
        launch = Launch(**settings)
        if launch.log_dir is not None:
            _make_folder(launch.log_dir)
        if launch.nnodes > 1 and not find_secret():
            _explain_secret(launch)
    except ValueError as error:
        print(f"distribax run: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    with _collect_signals() as stops:
        return _run_with_restarts(launch, stops)


def _explain_secret(launch: Launch) -> None:
    """Says what to do where several machines meet and nobody has given them a secret."""
    if is_loopback(launch.parse_leader().host):
        return
    _say(
        f"warning: --nnodes={launch.nnodes}, and there is no secret: whoever reaches "
        f"{launch.parse_leader()} can join the workers, or end them. Make one on this machine:\n"
        f"{_INDENT}openssl rand -hex 32 > ~/cluster-secret; chmod 600 ~/cluster-secret\n"
        "copy that file to the other machines (scp -p), and say on each where it is, before "
        "`distribax run`:\n"
        f"{_INDENT}export {SECRET_FILE_VARIABLE}=~/cluster-secret"
    )


def _make_folder(log_dir: str) -> None:
    try:
        os.makedirs(log_dir, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--log-dir={log_dir}: {error.strerror or error}. Expected a folder, or a path where "
            "one can be created."
        ) from None


def _run_with_restarts(launch: Launch, stops: Sequence[int]) -> int:
    policy = RestartPolicy(launch.max_restarts)
    for restart in itertools.count():
        started = time.monotonic()
        failure = _run_once(launch, restart, stops)
        if stops:
            _say(f"stopped by {signal.Signals(stops[0]).name}; the workers have ended")
            return 128 + stops[0]
        if failure is None:
            return 0
        decision = policy.decide(failure.exit_code, time.monotonic() - started)
        if decision is RestartDecision.RESUME:
            _say(
                f"{failure.name} was told to stop (exit code {failure.exit_code}); starting all "
                "workers again"
            )
            continue
        _report(failure)
        if failure.exit_code == RESTARTABLE_EXIT_CODE:
            _say(
                f"the workers have asked for a restart more than {MAX_SHORT_LIVES} times in a row, "
                f"each time within {SHORT_LIFE_SECONDS:g} s of their start: this is a failure"
            )
        if decision is RestartDecision.END:
            return failure.exit_code
        _say(f"starting all workers again (restart {policy.retries} of {policy.max_restarts})")
    raise AssertionError("the loop has no end of its own")


def _run_once(launch: Launch, restart: int, stops: Sequence[int]) -> TaskFailure | None:
    if launch.ps:
        return run_cluster(launch, restart, stops, _say)
    return run_workers(
        launch.command,
        launch.make_environments(os.environ, restart),
        launch.grace_seconds,
        stops,
        launch.output_target,
    )


def _report(failure: TaskFailure) -> None:
    if failure.others:
        _say(f"at the same time: {', '.join(failure.others)}")
    if not failure.tail:
        _say(f"{failure} and wrote nothing to its standard error")
        return
    _say(f"{failure}; its error output ended with:")
    for line in failure.tail:
        print(f"{_INDENT}{line}", file=sys.stderr)
    sys.stderr.flush()


def _say(text: str) -> None:
    print(f"distribax run: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Yields a list to which Ctrl-C and the signals that ask a process to end are appended.

    An exception could come between the start of a worker and the moment when it is known.
    """
    stops: list[int] = []
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup stays in effect.
    ]
    before = {number: signal.signal(number, lambda got, _: stops.append(got)) for number in numbers}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
