"""What JAX remembers of functions that read variables: traces with values of the moment in them.

`jax.lax.scan`, `cond`, `while_loop` and `jax.checkpoint` trace a function once and use the trace
again, whenever they are given the same function object. What the function closes over is a constant
of the trace. The value of a variable is none: it changes, and has other tracers in each step that
is compiled. So each read inside such a trace is noted, and JAX is told to forget the trace before
anything happens that may give the variable another value.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src.interpreters import partial_eval as _partial_eval

from distribax.jax_private.tracing import Trace, get_innermost_trace

_Note = tuple["weakref.ref[Trace]", Any, "weakref.ref[Callable[..., Any]]"]
_notes: list[_Note] = []


def iterate_staging(outer: Trace | None) -> Iterator[Trace]:
    """Yields the transformations inside `outer` that stage the code which runs now for later."""
    trace: Trace | None = get_innermost_trace()
    while trace is not None and trace is not outer:
        if getattr(trace, "frame", None) is not None:
            yield trace
        trace = getattr(trace, "parent_trace", None)


def is_for_jit(trace: Trace) -> bool:
    """Tells whether `jax.jit` stages code with this transformation."""
    return bool(trace.frame.debug_info.traced_for == "jit")  # type: ignore[attr-defined]


def note_closures(staging: list[Trace]) -> None:
    """Notes that what is being traced has read something whose value will change.

    Args:
        staging: The transformations that stage the code which runs now.
    """
    frame: FrameType | None = sys._getframe(1)
    trace: Trace | None = None
    while frame is not None:
        where = (frame.f_code.co_name, frame.f_code.co_filename)
        if where == ("trace_to_jaxpr", _partial_eval.__file__):
            trace = frame.f_locals["trace"]
            if all(trace is not each for each in staging):
                return
            _note(trace, _partial_eval.trace_to_jaxpr, frame.f_locals["fun"])
        elif where == ("_trace_to_jaxpr", _ad_checkpoint.__file__):
            assert trace is not None
            _note(trace, _ad_checkpoint._trace_to_jaxpr, frame.f_locals["fun"])
        frame = frame.f_back


def _note(trace: Trace, cache: Any, function: Callable[..., Any]) -> None:
    _notes.append((weakref.ref(trace), cache, weakref.ref(function)))


def forget_closures() -> None:
    """Lets JAX forget the traces that were noted, but those that are not finished."""
    if not _notes:
        return
    unfinished = set(map(id, iterate_staging(None)))
    kept: list[_Note] = []
    while _notes:
        note = _notes.pop()
        trace, cache, function = note
        if id(trace()) in unfinished:
            kept.append(note)
        elif (known := function()) is not None:
            cache.evict_weakref(known)
    _notes.extend(kept)
