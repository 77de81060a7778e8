"""Recordings of differentiated functions: which are alike, and the program that computes one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax._src import core as _core
from jax._src import linear_util as _linear_util
from jax._src import source_info_util as _source_info_util

from distribax.jax_private.recording_trace import RecordedTracer, RecordingTrace, carry_out
from distribax.types import Identity

GradientProgram: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], Any]
"""Computes ((loss, other results), gradients) of the values and constants of a recording."""

_OUTPUT = object()
_jaxpr_keys: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()


class WholeRecorded(BaseException):
    """Ends the differentiation of a function that has been recorded as a whole."""


class _RecordedOperation:
    """One operation of a recording; an input is the number of a result, or ~number of a constant.

    The values that the function is differentiated with respect to are the first results.
    """

    def __init__(self, equation: Any, inputs: tuple[int, ...]) -> None:
        self.primitive, self.params, self.ctx = equation.primitive, equation.params, equation.ctx
        self.inputs = inputs


class EagerRecording:
    """A function that runs in order to be differentiated, with what it computes.

    Attributes:
        is_whole: Whether all of the function was recorded.
        constants: What the function uses beside the values: arrays and numbers.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.constants: list[Any] = []
        self._constant_types: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._steps: list[_RecordedOperation] = []
        self._outputs: list[int] = []
        self._leaves: list[Any] = []
        self._tree: Any = None

    def run(
        self,
        fn: Callable[[list[Any]], Any],
        values: list[Any],
        has_aux: bool,
        accept: Callable[[Hashable], bool],
    ) -> Any:
        """Runs `fn` inside the transformation that differentiates it.

        Args:
            fn: The function.
            values: What it is a function of, as the transformation has it.
            has_aux: Whether `fn` returns something beside the loss.
            accept: Tells whether a program shall compute the recording, given a key that is equal
                for recordings that one program can compute.

        Returns:
            What `fn` returns, for the transformation to go on with.

        Raises:
            WholeRecorded: The function was recorded as a whole, and is accepted.
        """
        trace = RecordingTrace(_core.trace_ctx.trace, values)
        try:
            source = _source_info_util.current()
            arguments = [trace.new_arg(_core.typeof(value), source) for value in values]
            with _core.set_current_trace(trace):
                result = fn(arguments)
            if trace.computed is None and _has_gradient(trace, result, has_aux):
                self.is_whole = True
                key = self._describe(trace, result)
                if key is not None and accept(key):
                    raise WholeRecorded
            return jax.tree.map(trace.settle, result)
        finally:
            trace.end()

    def _describe(self, trace: RecordingTrace, result: Any) -> Hashable | None:
        """Notes what the program is, and returns its key; None if there is none."""
        frame = trace.frame
        self._numbers = {var: index for index, var in enumerate(frame.invars)}
        parts: list[Hashable] = [tuple(var.aval for var in frame.invars)]
        count = len(frame.invars)
        for index, equation in enumerate(frame.tracing_eqns):
            step: Any = equation
            inputs = tuple(map(self._number, step.in_tracers))
            params = dict(step.params)
            if index in trace.derivatives:
                params["jvp_jaxpr_fun"] = trace.derivatives[index]
            parts += [step.primitive, _describe_param(params), step.ctx, inputs, len(step.outvars)]
            self._steps.append(_RecordedOperation(step, inputs))
            self._numbers.update((var, count + i) for i, var in enumerate(step.outvars))
            count += len(step.outvars)
        leaves, self._tree = jax.tree.flatten(result)
        for leaf in leaves:
            is_output = isinstance(leaf, RecordedTracer) and leaf._trace is trace
            if is_output:
                self._outputs.append(self._number(leaf))
            self._leaves.append(_OUTPUT if is_output else leaf)
        key = (*parts, *self._constant_types, *self._outputs)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _number(self, tracer: RecordedTracer) -> int:
        atom: Any = tracer.val
        is_literal = isinstance(atom, _core.Literal)
        if not is_literal and atom in self._numbers:
            return self._numbers[atom]
        value = atom.val if is_literal else tracer._trace.frame.constvar_to_val[atom]
        number = ~len(self.constants)
        self.constants.append(value)
        self._constant_types.append(tracer.aval)
        if not is_literal:
            self._numbers[atom] = number
        return number

    def build_program(self) -> GradientProgram:
        """Returns the compiled program of this recording, and of all that are like it."""
        steps, outputs = self._steps, self._outputs

        def evaluate(values: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, list[Any]]:
            results = list(values)

            def read(number: int) -> Any:
                return results[number] if number >= 0 else constants[~number]

            for step in steps:
                results += carry_out(step, [read(number) for number in step.inputs])
            loss, *others = map(read, outputs)
            return loss, others

        return jax.jit(jax.value_and_grad(evaluate, has_aux=True))

    def rebuild(self, loss: Any, others: Sequence[Any]) -> Any:
        """Returns what the function returns, given what the program does."""
        outputs = iter((loss, *others))
        leaves = [next(outputs) if leaf is _OUTPUT else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._tree, leaves)


def _has_gradient(trace: RecordingTrace, result: Any, has_aux: bool) -> bool:
    """Tells whether a result is as it should be; if not, JAX has the words for it."""
    if has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
        return False
    loss = result[0] if has_aux else result
    if not isinstance(loss, RecordedTracer) or loss._trace is not trace:
        return False
    return not loss.shape and jax.numpy.issubdtype(loss.dtype, jax.numpy.floating)


def _describe_param(param: Any) -> Hashable:
    """Returns a parameter of an operation as something that is equal the next time."""
    if isinstance(param, _core.ClosedJaxpr):
        return _describe_jaxpr(param.jaxpr), *map(Identity, param.consts)
    if isinstance(param, _core.Jaxpr):
        return _describe_jaxpr(param)
    if isinstance(param, dict):
        return tuple((name, _describe_param(value)) for name, value in param.items())
    if isinstance(param, (tuple, list)):
        return type(param), *map(_describe_param, param)
    if isinstance(param, float) and math.isnan(param):
        return "nan"
    if getattr(param, "__module__", None) == _linear_util.__name__ and hasattr(param, "__code__"):
        # Reads what a transformation has stored; a new function each time.
        return param.__code__
    return param


def _describe_jaxpr(jaxpr: _core.Jaxpr) -> Hashable:
    known = _jaxpr_keys.get(jaxpr)
    if known is not None:
        return known
    numbers: dict[Any, int] = {}

    def describe(atom: Any) -> Hashable:
        if not isinstance(atom, _core.Literal):
            return numbers.setdefault(atom, len(numbers)), atom.aval
        is_scalar = not getattr(atom.val, "shape", ())
        return (str(atom.val), atom.aval) if is_scalar else Identity(atom.val)

    parts: list[Hashable] = [tuple(map(describe, (*jaxpr.constvars, *jaxpr.invars)))]
    for step in jaxpr.eqns:
        parts += [step.primitive, _describe_param(dict(step.params)), step.ctx]
        parts += [tuple(map(describe, step.invars)), tuple(map(describe, step.outvars))]
    parts.append(tuple(map(describe, jaxpr.outvars)))
    key = _jaxpr_keys[jaxpr] = tuple(parts)
    return key
