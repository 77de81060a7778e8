"""What a worker does when it has lost another one: it says so, calls back, and ends."""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Final, TypeAlias, TypeVar

from distribax import jax_private
from distribax.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from distribax.types import COLLECTIVE_ERROR_EXIT_CODE, PEER_LOST_EXIT_CODE

Callback = Callable[[PeerLostError], object]
_CallbackT = TypeVar("_CallbackT", bound=Callback)

Ending: TypeAlias = PeerLostError | CollectiveMismatchError | CollectiveTimeoutError
"""Why a worker cannot go on."""

CALLBACK_SECONDS: Final = 30.0
"""How long all callbacks together may take."""

_logger = logging.getLogger(__name__)
_callbacks: list[Callback] = []
_NAMES: Final = ("distribax.", "jax.")


def on_peer_lost(callback: _CallbackT) -> _CallbackT:
    """Has a function called when another worker is lost, before this process ends.

    The function runs in a thread of its own: the main thread may be waiting for the lost worker. It
    must not do anything together with the other workers. An exception in it is printed. All such
    functions together have 30 seconds; then the process ends all the same.

    Args:
        callback: Called with the `dx.PeerLostError` that names the worker.

    Returns:
        The function itself, so that this can be used as a decorator.

    Example:
        >>> @on_peer_lost
        ... def note(error):
        ...     print("lost", error.peer)
    """
    _callbacks.append(callback)
    return callback


class LastWords:
    """Ends this process with a report, once.

    Its thread is started ahead of time: Python starts none when it is about to end itself.

    Args:
        own: This worker's name, with its address.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        # Where the program has failed, if it has.
        self.trace: TracebackType | None = None
        self._errors: queue.SimpleQueue[Ending] = queue.SimpleQueue()
        self._said = threading.Event()
        threading.Thread(target=self._say, name="distribax-last-words", daemon=True).start()

    def end_process(self, error: Ending) -> None:
        """Says what has happened, runs the callbacks and ends the process; does not return."""
        self._errors.put(error)
        # Even a full pipe, to which nobody listens, must not keep the process alive.
        self._said.wait(CALLBACK_SECONDS)
        is_lost = isinstance(error, PeerLostError)
        os._exit(PEER_LOST_EXIT_CODE if is_lost else COLLECTIVE_ERROR_EXIT_CODE)

    def _say(self) -> None:
        error = self._errors.get()
        try:
            if _logger.hasHandlers():
                _logger.error("%s", error)
            print(_report(error, self._own, self.trace), file=sys.stderr, flush=True)
            if isinstance(error, PeerLostError):
                _call_back(error)
            flush_output()
        finally:
            self._said.set()


def _call_back(error: PeerLostError) -> None:
    for callback in tuple(_callbacks):
        try:
            callback(error)
        except BaseException:
            traceback.print_exc()


def flush_output() -> None:
    """Hands on what was printed, before the process ends without Python's own cleaning up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _report(error: Ending, own: str, trace: TracebackType | None) -> str:
    """Returns who is missing, since when, and what this worker was waiting for."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    lines = [f"{name}: {error}"]
    if not isinstance(error, PeerLostError):
        lines += [f"  {place}" for place in error.places]
        if isinstance(error, CollectiveTimeoutError):
            lines.append(
                "  If a worker only needs more time, give it: "
                "dx.CommunicationOptions(timeout_seconds=...), or DISTRIBAX_COLLECTIVE_TIMEOUT."
            )
        lines.append(f"  {own} ends with exit code {COLLECTIVE_ERROR_EXIT_CODE}.")
        return "\n".join(lines)
    if error.since is not None:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error.since))
        lines.append(f"  Missing since {clock}, {max(0.0, time.time() - error.since):.1f} s ago.")
    lines.append(f"  Meanwhile {own} was here:")
    lines += _find_position(trace)
    lines.append(
        f"  It ends with exit code {PEER_LOST_EXIT_CODE}. Start all workers again, from the last "
        "checkpoint: `distribax run --max-restarts` does."
    )
    return "\n".join(lines)


def _find_position(trace: TracebackType | None) -> Iterator[str]:
    """Yields the line of the user's program that runs in the main thread, and what it calls."""
    if trace is not None:
        stack = [(frame, line) for frame, line in traceback.walk_tb(trace)]
    else:
        stack = jax_private.list_main_stack()
    last = max(
        (i for i, (frame, _) in enumerate(stack) if not jax_private.is_library(frame)), default=-1
    )
    if last >= 0:
        frame, line = stack[last]
        code = frame.f_code
        yield f'    File "{code.co_filename}", line {line}, in {code.co_qualname}'
        if source := linecache.getline(code.co_filename, line or 0).strip():
            yield f"      {source}"
    called = [frame for frame, _ in stack[last + 1 :] if _name_module(frame).startswith(_NAMES)]
    # The call that the user sees, and where it is stuck.
    for frame in dict.fromkeys((called[0], called[-1])) if called else ():
        yield f"    in {_name_module(frame)}.{frame.f_code.co_qualname}"


def _name_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
