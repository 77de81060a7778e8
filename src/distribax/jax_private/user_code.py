"""The user's code: which line of it is behind a call, and what a function of it takes."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import jax

# Frozen modules, such as the import system, have no path.
_LIBRARIES: Final = (
    "<frozen",
    *(
        str(Path(str(file)).parent) + os.sep
        for file in (Path(__file__).parent, jax.__file__, threading.__file__)
    ),
)
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_known: dict[CodeType, bool] = {}


def is_library(frame: FrameType) -> bool:
    """Tells whether a frame is outside the user's program."""
    return is_library_code(frame.f_code)


def is_library_code(code: CodeType) -> bool:
    """Tells whether code is outside the user's program."""
    found = _known.get(code)
    if found is None:
        found = _known[code] = is_library_file(code.co_filename)
    return found


def is_library_file(name: str) -> bool:
    """Tells whether a file is outside the user's program."""
    return name.startswith(_LIBRARIES) or any(folder in name for folder in _INSTALLED)


def find_user_line(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's program that has led to a frame."""
    while frame is not None and is_library(frame):
        frame = frame.f_back
    if frame is None:
        return "a thread without code of the program"
    return (
        f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_qualname}'
    )


def list_parameters(fn: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a function; none if it does not tell, as some in C do not."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def list_main_stack() -> list[tuple[FrameType, int]]:
    """Returns the frames of the main thread and their lines, the innermost last."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return list(traceback.walk_stack(main))[::-1]
