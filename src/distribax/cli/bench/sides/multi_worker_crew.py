"""A side that is several processes: the one that the harness talks to leads, the others follow.

It runs in the environments of all peers, so it uses the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from serve import Figures, claim_output, serve

_END_SECONDS = 8.0


@dataclass
class Crew:
    """This process among those of the side; all run the same module with the same arguments."""

    rank: int
    ports: list[int]
    answers: TextIO
    followers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.ports)

    @property
    def addresses(self) -> list[str]:
        """An address for each process; the library decides what listens there."""
        return [f"127.0.0.1:{port}" for port in self.ports]

    @property
    def tf_config(self) -> str:
        """The crew as a cluster of workers, in the form of TF_CONFIG."""
        task = {"type": "worker", "index": self.rank}
        return json.dumps({"cluster": {"worker": self.addresses}, "task": task})

    def serve(self, run: Callable[[int], Figures | None]) -> None:
        """Like `serve.serve`, with `run(steps)` in all processes at once. It ends the process."""
        if self.rank > 0:
            self._follow(run)
        else:
            self._lead(run)
        # At the end of the interpreter, libraries would wait for each other's processes.
        os._exit(0)

    def _lead(self, run: Callable[[int], Figures | None]) -> None:
        def run_all(steps: int) -> Figures | None:
            for follower in self.followers:
                assert follower.stdin is not None
                follower.stdin.write(f"{steps}\n".encode())
                follower.stdin.flush()
            return run(steps)

        serve(run_all, self.answers)
        for follower in self.followers:
            assert follower.stdin is not None
            follower.stdin.close()
            follower.wait(_END_SECONDS)

    def _follow(self, run: Callable[[int], Figures | None]) -> None:
        requests: queue.SimpleQueue[int] = queue.SimpleQueue()

        def listen() -> None:
            for line in sys.stdin:
                requests.put(int(line))
            # The leader has gone, perhaps in the middle of a step that now never ends.
            os._exit(0)

        threading.Thread(target=listen, daemon=True).start()
        while True:
            run(requests.get())


def join(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Crew]:
    """Parse the arguments and, in the first process, start the others (as many as replicas)."""
    parser.add_argument("--rank", type=int, default=0, help="set by the leader")
    parser.add_argument("--ports", type=int, nargs="*", default=[], help="set by the leader")
    options = parser.parse_args()
    # Libraries say that they are connected, long before the side is ready.
    answers = claim_output()
    crew = Crew(options.rank, options.ports or _free_ports(options.replicas), answers)
    if crew.rank == 0:
        ports = [str(port) for port in crew.ports]
        for rank in range(1, crew.size):
            # As this process was started, by its path or as a module.
            command = [sys.executable, *sys.orig_argv[1:]]
            crew.followers.append(
                subprocess.Popen(
                    [*command, "--rank", str(rank), "--ports", *ports],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                )
            )
    return options, crew


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
