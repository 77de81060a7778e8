"""Imports a module when asked to run: the time of a fresh process's first import."""

from __future__ import annotations

import importlib
import sys

from serve import serve


def main() -> None:
    module = sys.argv[1]

    def run(steps: int) -> dict[str, int]:
        before = len(sys.modules)
        importlib.import_module(module)
        return {"modules": len(sys.modules) - before}

    serve(run)


if __name__ == "__main__":
    main()
