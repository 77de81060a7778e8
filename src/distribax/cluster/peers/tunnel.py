"""A way to JAX's coordination service that does not break when the service's process does.

XLA ends a process, from a thread of its own, as soon as its connection to the coordination service
breaks; no option and no Python code can prevent that. So the connection goes through a process of
our own: when the far end breaks, the near one stays open and silent until the loss is dealt with.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_MAIN: Final = Path(__file__).with_name("tunnel_main.py")
_CLOSE_SECONDS: Final = 5.0


class Tunnel:
    """Connects a local address, `address`, with another one, as long as this process lives."""

    def __init__(self, host: str, port: int) -> None:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            self.address = f"{_LOOPBACK}:{listener.getsockname()[1]}"
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_MAIN), str(descriptor), host, str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
            )

    def close(self) -> None:
        """Breaks the connections, which must not do harm any more; may be called twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def drop(self) -> None:
        """Closes what a forked process has inherited: its life must not stand for this one's."""
        assert self._process.stdin is not None
        self._process.stdin.close()
