"""Recording: what a function that is differentiated computes, noted instead of computed at once.

JAX differentiates eager code operation by operation, in Python. A recording runs the same code, but
only notes the operations, so that one program can compute all of them and the gradients. Where the
code needs a value (`if loss > 3:`), or does something that cannot be noted, what was noted is
computed, and the rest of the function runs operation by operation, as if nothing had been recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any

from jax._src import core as _core
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.numpy import array_constructors as _array_constructors
from typing_extensions import override

_INDIFFERENT = (_lax._convert_element_type.__code__, _array_constructors.array.__code__)


class RecordedTracer(_partial_eval.DynamicJaxprTracer):
    """A value that has not been computed yet."""

    __slots__ = ()

    _trace: RecordingTrace

    @property
    def primal(self) -> Any:
        """What stands for the value in the transformation that the recording is made for."""
        return self._trace.settle(self)

    @override
    def to_concrete_value(self) -> Any:
        # Some functions of JAX ask whether a value is known without a need for it.
        if sys._getframe(3).f_code in _INDIFFERENT:
            return None
        return _core.to_concrete_value(self.primal)

    @override
    def __repr__(self) -> str:
        return repr(self.primal)


def _ask_for_value(name: str) -> Any:
    """Returns a method that asks what stands for the value; JAX says what that cannot answer."""

    def method(self: RecordedTracer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.primal, name)(*args, **kwargs)

    return method


for _name in ("__array__", "__dlpack__", "__float__", "__complex__", "item", "tolist", "tobytes"):
    setattr(RecordedTracer, _name, _ask_for_value(_name))
for _name in ("device", "sharding", "committed", "addressable_shards", "devices"):
    setattr(RecordedTracer, _name, property(lambda self, n=_name: getattr(self.primal, n)))  # type: ignore[misc]

_core.pytype_aval_mappings[RecordedTracer] = lambda tracer: tracer.aval


class RecordingTrace(_partial_eval.DynamicJaxprTrace):
    """Notes operations until a value is needed; from then on hands them to the parent."""

    def __init__(self, parent: _core.Trace, values: Sequence[Any]) -> None:
        super().__init__(None, parent)
        self.parent = parent
        self.given = list(values)
        # What the noted operations have given, once they have been carried out.
        self.computed: dict[Any, Any] | None = None
        # By the operation with a custom derivative: what the derivative is.
        self.derivatives: dict[int, Hashable] = {}

    # Our own tracers, wherever JAX makes one.

    @override
    def var_to_tracer(self, *args: Any, **kwargs: Any) -> Any:
        return _adopt(super().var_to_tracer(*args, **kwargs))

    @override
    def new_arg(self, *args: Any, **kwargs: Any) -> Any:
        return _adopt(super().new_arg(*args, **kwargs))

    @override
    def _new_const(self, *args: Any, **kwargs: Any) -> Any:
        return _adopt(super()._new_const(*args, **kwargs))

    # Noting, or handing on.

    @override
    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        if self.computed is None and any(isinstance(each, RecordedTracer) for each in tracers):
            noted: list[Any] = self.frame.tracing_eqns
            count = len(noted)
            result = super().process_primitive(primitive, tracers, params)
            # A function that JAX inlines may return a number.
            for each in result if primitive.multiple_results else [result]:
                if isinstance(each, _partial_eval.DynamicJaxprTracer):
                    _adopt(each)
            if any(equation.effects for equation in noted[count:]):
                self.settle_all()
            return result
        # What does not depend on the values is known, as in all eager code.
        values = [self.settle(tracer) for tracer in tracers]
        avals = tuple(map(_core.typeof, values))
        return primitive.bind_with_trace(self.parent, values, avals, params)

    @override
    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, RecordedTracer) else self.parent.stage_value(val)

    @override
    def process_custom_jvp_call(
        self, prim: Any, fun: Any, jvp: Any, tracers: Any, /, *, symbolic_zeros: bool
    ) -> Any:
        if self.computed is None and any(isinstance(each, RecordedTracer) for each in tracers):
            result = super().process_custom_jvp_call(
                prim, fun, jvp, tracers, symbolic_zeros=symbolic_zeros
            )
            kept = tuple((each.f, each.transforms, each.params) for each in (fun, jvp))
            self.derivatives[len(self.frame.tracing_eqns) - 1] = kept
            return result
        values = [self.settle(tracer) for tracer in tracers]
        return self.parent.process_custom_jvp_call(
            prim, fun, jvp, values, symbolic_zeros=symbolic_zeros
        )

    @override
    def process_custom_vjp_call(
        self, prim: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **kwargs: Any
    ) -> Any:
        # Its derivative may be ordinary code that meets other replicas.
        values = self.settle_each(tracers)
        return self.parent.process_custom_vjp_call(prim, fun, fwd, bwd, values, **kwargs)

    @override
    def process_call(self, call_primitive: Any, f: Any, in_tracers: Any, params: Any, /) -> Any:
        values = self.settle_each(in_tracers)
        return self.parent.process_call(call_primitive, f, values, params)

    # Carrying out what was noted.

    def settle_each(self, tracers: Sequence[Any]) -> list[Any]:
        self.settle_all()
        return [self.settle(tracer) for tracer in tracers]

    def settle_all(self) -> None:
        """Carries out the noted operations in the parent, and records no more."""
        if self.computed is not None:
            return
        self.computed = dict(zip(self.frame.invars, self.given, strict=True))
        self.computed.update(self.frame.constvar_to_val)
        with _core.set_current_trace(self.parent):
            for equation in self.frame.tracing_eqns:
                inputs = [self.settle(tracer) for tracer in equation.in_tracers]  # type: ignore[union-attr]
                results = carry_out(equation, inputs)
                self.computed.update(zip(equation.outvars, results, strict=True))  # type: ignore[union-attr]

    def settle(self, value: Any) -> Any:
        """Returns what stands for a value in the parent."""
        # Not only our own tracers: JAX makes others of the numbers in a function that it inlines.
        if not isinstance(value, _partial_eval.DynamicJaxprTracer) or value._trace is not self:
            return value
        if self._invalidated:
            raise _core.escaped_tracer_error(value)
        self.settle_all()
        assert self.computed is not None
        atom = value.val
        return atom.val if isinstance(atom, _core.Literal) else self.computed[atom]

    def end(self) -> None:
        """Forgets everything; values that have left the function cannot be used any more."""
        _core.Trace.invalidate(self)
        self.invalidate()
        self.given, self.computed = [], None


def settle(value: Any) -> Any:
    """Returns what stands for a recorded value where it is computed; anything else as it is."""
    return value.primal if isinstance(value, RecordedTracer) else value


def _adopt(tracer: Any) -> Any:
    tracer.__class__ = RecordedTracer
    return tracer


def carry_out(step: Any, inputs: Sequence[Any]) -> list[Any]:
    params = step.primitive.get_bind_params(step.params)
    with step.ctx.manager:
        results = step.primitive.bind(*inputs, **params)
    return results if step.primitive.multiple_results else [results]
