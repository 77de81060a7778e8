"""The measured end of the pipe: answers "run k steps" with the time they took.

It runs in the environments of all peers, so it uses the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, Any]


def serve(run: Callable[[int], Figures | None], info: Figures | None = None) -> None:
    """Say that this side is ready, then run as many steps as asked for, until the harness hangs up.

    `run(steps)` must come back only when the work of all steps is finished. Its time is measured
    here, alike for every side, unless the figures that it returns hold "seconds".
    """
    # What libraries print must not be taken for an answer: answers get the real standard output,
    # and everybody else's goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps({"ready": True, **(info or {})}) + "\n")
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        start = time.perf_counter()
        figures = run(steps)
        seconds = time.perf_counter() - start
        answers.write(json.dumps({"seconds": seconds, **(figures or {})}) + "\n")
