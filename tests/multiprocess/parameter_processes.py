"""Processes that tests/multiprocess/test_parameters.py starts: a parameter server, and workers.

Run as `python parameter_processes.py server|adder|reader|holder <folder> ...`. The folder holds the
file `endpoint`, which says where the server is now, and the server's snapshots.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from distribax.parameter_server import (
    AssignAdd,
    Endpoint,
    ParameterClient,
    ParameterServer,
    ParameterSpec,
)
from distribax.parameter_server.client import connection
from distribax.topology.host_memory import keep_freed_memory

TOKEN = b"a token for tests"
# Two, in order to see whether they are always changed together; large enough to be copied slowly.
LEFT = ParameterSpec("l", "left", (1000, 100), "float32", 0)
RIGHT = ParameterSpec("r", "right", (1000, 100), "float32", 0)
BOTH = [LEFT, RIGHT]


def locate(folder: Path) -> Endpoint:
    """Returns where the server is now."""
    try:
        return Endpoint(**json.loads((folder / "endpoint").read_text()))
    except FileNotFoundError:
        raise ConnectionError("the server has not been started") from None


def client(folder: Path, name: str, timeout: float = 60.0) -> ParameterClient:
    """Returns a client of the server whose endpoint is in the folder."""
    return ParameterClient(
        1, lambda index: locate(folder), client_id=name, token=TOKEN, timeout=timeout
    )


def serve(folder: Path, interval: str) -> None:
    """Is a server until the test closes this process' input."""
    keep_freed_memory()
    server = ParameterServer(
        0,
        token=TOKEN,
        snapshot_dir=folder / "snapshots" if interval else None,
        snapshot_interval=float(interval) if interval else None,
    )
    endpoint = server.start()
    (folder / "endpoint.new").write_text(json.dumps(asdict(endpoint)))
    os.replace(folder / "endpoint.new", folder / "endpoint")
    print(json.dumps(server.status()), flush=True)
    sys.stdin.read()
    server.close()


def add(folder: Path, count: str = "") -> None:
    """Adds one to both values so many times, or until the test says so; says what came of it."""
    mine = client(folder, f"adder-{os.getpid()}")
    lost: list[int] = []

    def note_loss(record: logging.LogRecord) -> bool:
        lost.append(int(re.findall(r"process: (\d+) of", record.getMessage())[0]))
        return True

    logging.getLogger(connection.__name__).addFilter(note_loss)
    ones = np.ones(LEFT.shape, np.float32)
    print("ready", flush=True)
    sys.stdin.readline()
    said = threading.Event()
    if not count:
        threading.Thread(target=lambda: (sys.stdin.readline(), said.set()), daemon=True).start()
    torn = added = 0
    done = False
    while not done:
        # Looked at before it adds: what it adds last is added after the test has said so.
        done = said.is_set() or str(added + 1) == count
        added += 1
        mine.push({0: [AssignAdd("l", ones), AssignAdd("r", ones)]})
        left, right = mine.pull(BOTH)
        torn += not (np.all(left == left[0, 0]) and np.all(right == left[0, 0]))
    mine.flush()
    print(json.dumps({"added": added, "lost": lost, "torn": torn}), flush=True)
    mine.close()


def read(folder: Path) -> None:
    """Pulls until it is killed."""
    mine = client(folder, "reader")
    print("ready", flush=True)
    while True:
        mine._cache.clear()
        mine.pull(BOTH)


def hold(folder: Path, seconds: str) -> None:
    """Pulls, keeps some of what it got, and looks at it again and again: it must not change."""
    mine = client(folder, f"holder-{os.getpid()}")
    generator = random.Random(os.getpid())
    held: list[tuple[float, list[Any]]] = []
    pulls = changed = 0
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        values = mine.pull(BOTH)
        held.append((float(values[0][0, 0]), values))
        if len(held) > generator.randrange(6):
            held.pop(generator.randrange(len(held)))
        for number, kept in held:
            changed += any(np.any(value != number) for value in kept)
        pulls += 1
    print(json.dumps({"pulls": pulls, "changed": changed}), flush=True)
    mine.close()


if __name__ == "__main__":
    role, place, *rest = sys.argv[1:]
    {"server": serve, "adder": add, "reader": read, "holder": hold}[role](Path(place), *rest)
