"""The program of the workers and parameter servers that `distribax run --ps` starts.

The user's script may close its strategy and create another one. So when a cluster has ended, the
process joins the next one, until the launcher ends it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

# The launcher runs this file as a script; modules must not be imported from its folder.
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]

from distribax.cluster.ray.server import Server, ServerConfig
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver

_JOIN_SECONDS: Final = float(1 << 31)
"""Practically no limit: the launcher ends this process."""


def main() -> None:
    """Serves until SIGTERM ends the process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = ServerConfig(join_timeout_seconds=_JOIN_SECONDS)
    while True:
        with Server(TFConfigClusterResolver(), config=config) as server:
            server.join()


if __name__ == "__main__":
    main()
