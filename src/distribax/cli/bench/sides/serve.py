"""The measured end of the pipe: answers "run k steps" with the time they took.

It runs in the environments of all peers, so it uses the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Figures = Mapping[str, Any]


def claim_output() -> TextIO:
    """Take the standard output for the answers, so that nothing else is taken for one.

    What libraries print goes to standard error from now on.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(run: Callable[[int], Figures | None], answers: TextIO | None = None) -> None:
    """Say that this side is ready, then run as many steps as asked for, until the harness hangs up.

    `run(steps)` must come back only when the work of all steps is finished. Its time is measured
    here, alike for every side, unless the figures that it returns hold "seconds". A side whose
    library prints while it starts has claimed the output for its `answers` before.
    """
    answers = answers or claim_output()
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        start = time.perf_counter()
        figures = run(steps)
        seconds = time.perf_counter() - start
        answers.write(json.dumps({"seconds": seconds, **(figures or {})}) + "\n")
