"""Makes the virtual environments of the libraries that distribax is measured against.

python benchmarks/peers.py              # all of them
python benchmarks/peers.py tensorflow   # one
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Run as a file, so that `benchmarks` is not a package that Python finds by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import benchmarks
from distribax.cli.bench import peer_libraries


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = peer_libraries.REQUIREMENTS
    parser.add_argument("peers", nargs="*", help=f"which ones: {', '.join(known)}")
    options = parser.parse_args(arguments)
    for peer in options.peers or known:
        try:
            interpreter = peer_libraries.make(peer)
        except ValueError as error:
            parser.error(str(error))
        print(f"{peer}: {interpreter.relative_to(benchmarks.FOLDER.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
