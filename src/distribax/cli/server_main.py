"""What `distribax run --ps` runs as a worker or a parameter server: a Server, until it is ended.

The script may close its strategy and make another one, so a cluster that has ended is followed by
the next one.
"""

from __future__ import annotations

import os
import signal
import sys

# The launcher runs this file as a script; its folder is no place to look for modules.
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]

from distribax.cluster.ray.server import Server, ServerConfig
from distribax.cluster.resolvers.tf_config import TFConfigClusterResolver

_UNTIL_THE_LAUNCHER_ENDS_IT = float(1 << 31)


def main() -> None:
    """Serves until SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = ServerConfig(join_timeout_seconds=_UNTIL_THE_LAUNCHER_ENDS_IT)
    while True:
        with Server(TFConfigClusterResolver(), config=config) as server:
            server.join()


if __name__ == "__main__":
    main()
