"""Measures sides against each other: one long-lived process per side, taking turns step by step.

On a shared machine the speed changes from minute to minute, so two programs are compared only by
rounds in which both ran: A B, B A, A B, ... and by the ratios of those.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from distribax.cli.bench import peer_libraries

side_folders = [Path(__file__).resolve().parent / "sides"]
"""Where the programs to measure are; each is run by its path, and finds the others of its folder.

They use the standard library and what they measure, so that they run in any environment.
"""
_SOURCE = Path(__file__).resolve().parents[3]

_START_SECONDS = 600.0
_RUN_SECONDS = 180.0
_END_SECONDS = 10.0


@dataclass(frozen=True)
class BenchSettings:
    """How much to measure: on how many devices at most, and whether with few rounds."""

    quick: bool = False
    max_devices: int = 2

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Side:
    """A program to measure.

    Attributes:
        name: What reports call it.
        module: The name of its file in one of the `side_folders`.
        arguments: Its arguments.
        peer: The library whose virtual environment it runs in; None is this interpreter's.
        environment: Environment variables to set.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    peer: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def _find_program(module: str) -> Path:
    paths = [folder / f"{module}.py" for folder in side_folders]
    return next(path for path in paths if path.is_file())


class Turns:
    """Hears what a measurement does now; this one keeps it to itself."""

    def begin(self, what: str) -> None:
        """Something begins that may take seconds."""

    def end(self) -> None:
        """One more turn is done: a start of a side, or a round."""


class SideError(RuntimeError):
    """A side did not start, did not answer in time, or ended; the message has its last words."""


class Process:
    """A running side. Use it in a `with` block: the process ends with the block, come what may."""

    def __init__(self, side: Side) -> None:
        self.side = side
        python = sys.executable if side.peer is None else peer_libraries.find_python(side.peer)
        if python is None:
            raise SideError(f"{side.name}: {side.peer} is not installed; --peers installs it")
        paths = [str(folder) for folder in side_folders]
        # Programs of another folder may be parts of a package.
        paths += [str(folder.parents[1]) for folder in side_folders[1:]]
        if side.peer is None:
            paths.append(str(_SOURCE))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [str(python), str(_find_program(side.module)), *side.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(side.environment),
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it may have ended already
            self._process.stdin.close()
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            try:
                self._process.wait(_END_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.stdout.close()
        self._log.close()

    def wait_until_ready(self) -> None:
        """Wait until the side has set itself up."""
        self._answer(_START_SECONDS, "while it started")

    def run(self, steps: int) -> dict[str, Any]:
        """Have it run `steps` steps; the answer holds "seconds"."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"steps": steps}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._make_error("ended between two runs") from None
        return self._answer(_RUN_SECONDS, f"while it ran {steps} steps")

    def _answer(self, seconds: float, doing: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise self._make_error(f"gave no answer within {seconds:.0f} s {doing}")
                piece = os.read(descriptor, 65536)
                if not piece:
                    raise self._make_error(f"ended {doing}")
                self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def _make_error(self, what: str) -> SideError:
        with suppress(subprocess.TimeoutExpired):  # it may hang: what it has written must do
            self._process.wait(1.0)
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return SideError(f"{self.side.name} {what}: {words[-1] if words else 'no message'}")


@dataclass
class Measurement:
    """What the rounds gave: for each side the seconds per step, and the answer, of each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """The last answer of each side."""
        return {name: answers[-1] for name, answers in self.history.items()}

    def note(self, name: str, answer: dict[str, Any], steps: int) -> None:
        """Notes what a side has answered after some steps."""
        self.seconds.setdefault(name, []).append(answer["seconds"] / steps)
        self.history.setdefault(name, []).append(answer)


def interleave(
    sides: Sequence[Side],
    *,
    steps: int,
    rounds: int,
    warmup: int,
    turns: Turns | None = None,
) -> Measurement:
    """Run all sides in turn, `steps` steps per turn, for `rounds` rounds.

    Before the first, each runs `warmup` steps that do not count.
    A side that cannot run is left out, and named in the outcome's `failures`.
    `turns` hears of the start of each side and of each round.
    """
    turns = turns or Turns()
    outcome = Measurement()
    with ExitStack() as stack:
        running: list[Process] = []
        # One after the other: starting together they would fight for the cores, and time out.
        for side in sides:
            turns.begin(f"starting {side.name}")
            try:
                process = stack.enter_context(Process(side))
                process.wait_until_ready()
                process.run(warmup)
            except SideError as error:
                outcome.failures.append(str(error))
                continue
            finally:
                turns.end()
            running.append(process)
        for number in range(rounds):
            turns.begin(f"round {number + 1} of {rounds}")
            # Every side meets every place in the order, so that none has always the cold caches.
            shift = number % max(len(running), 1)
            for process in running[shift:] + running[:shift]:
                name = process.side.name
                try:
                    answer = process.run(steps)
                except SideError as error:
                    outcome.failures.append(str(error))
                    outcome.seconds.pop(name, None)
                    outcome.history.pop(name, None)
                    running.remove(process)
                    continue
                outcome.note(name, answer, steps)
            turns.end()
    return outcome
