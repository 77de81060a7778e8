"""Gradients in eager code: the loss function runs as it is written, one program computes it.

The function's Python code runs at each call. What it computes is recorded, and a program that was
compiled for the same operations before computes the loss and the gradients. A function that looks
at values while it runs, or whose operations are new each time, is differentiated operation by
operation instead.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from distribax import jax_private
from distribax.topology import launch_lock

_MAX_PROGRAMS = 256
# So many programs are compiled for a function at once; then only what has occurred twice is.
_MAX_NEW_PROGRAMS = 16


class _FunctionHistory:
    """What is known of a function from its earlier calls."""

    def __init__(self) -> None:
        self.is_recordable = True
        self.num_new = 0
        self.seen: OrderedDict[Hashable, None] = OrderedDict()


_programs: OrderedDict[Hashable, jax_private.GradientProgram] = OrderedDict()
_histories: weakref.WeakKeyDictionary[Any, _FunctionHistory] = weakref.WeakKeyDictionary()


def differentiate(
    fn: Callable[..., Any],
    of_values: Callable[[list[jax.Array]], Any],
    values: list[jax.Array],
    has_aux: bool,
) -> tuple[Any, list[jax.Array]]:
    """Returns what `jax.value_and_grad(of_values, has_aux=has_aux)(values)` does.

    Args:
        fn: The user's function, which `of_values` calls.
        of_values: A function of the values.
        values: What to differentiate with respect to.
        has_aux: Whether the function returns something beside the loss.
    """
    history = _get_history(fn)
    if jax_private.is_tracing() or not history.is_recordable:
        return jax.value_and_grad(of_values, has_aux=has_aux)(values)
    recording = jax_private.EagerRecording()
    key: Hashable = None

    def accept(found: Hashable) -> bool:
        nonlocal key
        key = found
        return key in _programs or _is_worth_compiling(key, history)

    def run(values: list[jax.Array]) -> Any:
        return recording.run(of_values, values, has_aux, accept)

    try:
        result = jax.value_and_grad(run, has_aux=has_aux)(values)
    except jax_private.WholeRecorded:
        program = _get_program(key, recording)
        with launch_lock:
            (loss, others), gradients = program(values, recording.constants)
        return recording.rebuild(loss, others), gradients
    history.is_recordable = recording.is_whole
    return result


def _get_history(fn: Callable[..., Any]) -> _FunctionHistory:
    while isinstance(fn, functools.partial):
        fn = fn.func
    # By the code: the function itself may be created anew for each step.
    return _histories.setdefault(getattr(fn, "__code__", type(fn)), _FunctionHistory())


def _is_worth_compiling(key: Hashable, history: _FunctionHistory) -> bool:
    if history.num_new < _MAX_NEW_PROGRAMS or key in history.seen:
        history.num_new += 1
        history.seen.pop(key, None)
        return True
    history.seen[key] = None
    if len(history.seen) > _MAX_PROGRAMS:
        history.seen.popitem(last=False)
    return False


def _get_program(
    key: Hashable, recording: jax_private.EagerRecording
) -> jax_private.GradientProgram:
    program = _programs.pop(key, None) or recording.build_program()
    _programs[key] = program
    if len(_programs) > _MAX_PROGRAMS:
        _programs.popitem(last=False)
    return program
