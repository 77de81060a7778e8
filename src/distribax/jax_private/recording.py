"""Recording: code is traced once, and inputs are added to the program while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend import core
from jax.typing import ArrayLike

from distribax.jax_private.tracing import is_tracing, run_outside_trace

ArrayType: TypeAlias = _core.ShapedArray
"""The type that an array has in a program."""

Description: TypeAlias = _core.DebugInfo
"""What JAX's messages say of a function that is traced."""

Recorded: TypeAlias = core.ClosedJaxpr
"""A program that was recorded."""


def make_array_type(shape: Sequence[int], dtype: np.dtype[Any]) -> ArrayType:
    """Returns the type of an array, wherever it lives."""
    return _core.ShapedArray(tuple(shape), dtype)


def get_array_type(value: ArrayLike) -> ArrayType:
    """Returns the type that an array or a number has in a program, as for `jax.jit`."""
    return _core.shaped_abstractify(value)


def get_trace_settings() -> Hashable:
    """Returns the settings of JAX that change what is recorded, such as `jax.enable_x64`.

    The same settings are always the same object, as JAX's own are slow to hash.
    """
    global _last_settings
    last, current = _last_settings, _config.trace_context()
    if last is None or current != last.values:
        last = _last_settings = _known_settings.setdefault(current, _TraceSettings(current))
    return last


class _TraceSettings:
    """Settings of JAX, compared by identity."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


_known_settings: dict[Hashable, _TraceSettings] = {}
_last_settings: _TraceSettings | None = None


def run_recorded(program: Recorded, inputs: Sequence[ArrayLike], name: str) -> list[jax.Array]:
    """Returns the results of a recorded program.

    Inside `jax.jit` it becomes a part of that program as it is: its operations are not traced one
    by one a second time.
    """
    if not inputs or not is_tracing():
        # Step by step, as `jax.disable_jit` wants it, and `jax_debug_nans` when it looks for a NaN.
        return _core.eval_jaxpr(program.jaxpr, program.consts, *inputs)
    (call,) = jax.make_jaxpr(_any_program)(0).eqns
    num_inputs, num_results = len(inputs), len(program.out_avals)
    parameters = {
        **call.params,
        "jaxpr": program,
        "name": name,
        "in_shardings": call.params["in_shardings"] * num_inputs,
        "in_layouts": call.params["in_layouts"] * num_inputs,
        "donated_invars": call.params["donated_invars"] * num_inputs,
        "out_shardings": call.params["out_shardings"] * num_results,
        "out_layouts": call.params["out_layouts"] * num_results,
    }
    return core.primitives.jit_p.bind(*inputs, **parameters)


@jax.jit
def _any_program(value: ArrayLike) -> ArrayLike:
    """A program with one input and one result: how `jax.jit` describes it."""
    return value


def fits(program: Recorded, inputs: Sequence[ArrayLike]) -> bool:
    """Tells whether `inputs` have the types that a program was recorded for."""
    types = [(each.shape, each.dtype) for each in map(get_array_type, inputs)]
    return types == [(each.shape, each.dtype) for each in program.in_avals]


def count_operations(program: Recorded) -> int:
    """Returns how many operations a program has on the way to its results."""
    jaxpr, _, _ = _partial_eval.dce_jaxpr_consts(
        program.jaxpr, [True] * len(program.jaxpr.outvars), False
    )
    return _count_equations(jaxpr)


def _count_equations(jaxpr: _core.Jaxpr) -> int:
    return len(jaxpr.eqns) + sum(map(_count_equations, _core.subjaxprs(jaxpr)))


def describe(what: str, fn: Callable[..., object], names: Sequence[str]) -> Description:
    """Returns a description of `fn`: what it is traced for, where it is, and its inputs' names."""
    where = _api_util.fun_sourceinfo(fn) or getattr(fn, "__name__", "<unknown>")
    return _core.DebugInfo(what, where, tuple(names), None)


def set_description(fn: Callable[..., object], description: Description) -> None:
    """Lets JAX's messages speak of another function than of `fn`, which only calls it."""
    _api_util.save_wrapped_fun_debug_info(fn, description)


class Recording:
    """A program that is being recorded.

    Args:
        description: What JAX's messages say of the code.
    """

    def __init__(self, description: Description) -> None:
        self._description = description
        parent = _core.trace_ctx.trace
        self._trace = _partial_eval.DynamicJaxprTrace(description, parent_trace=parent)
        self._get_values: list[Callable[[], ArrayLike]] = []

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Records the code inside."""
        # As JAX does for `jax.jit`: names of operations begin at the program.
        with _source_info_util.reset_name_stack(), core.set_current_trace(self._trace):
            yield

    def add_input(
        self, type_: ArrayType, name: str, get_value: Callable[[], ArrayLike]
    ) -> jax.Array:
        """Returns what stands for a new input, which all code may use, however deep it is.

        `get_value` returns the value that it has before the program runs.
        """
        self._get_values.append(get_value)
        named = self._description
        assert named.arg_names is not None
        self._description = named._replace(arg_names=(*named.arg_names, name))
        self._trace.frame.debug_info = self._description
        return self._trace.new_arg(type_, _source_info_util.current())

    def evaluate(self, value: jax.Array) -> jax.Array:
        """Returns what a value of the program is, given its inputs as they are now."""
        part = cut_out(self._trace, value)

        def compute() -> jax.Array:
            inputs = [self._get_values[index]() for index in part.inputs]
            return jax.jit(part.run)(part.constants, inputs)

        return run_outside_trace(compute)

    def close(self, inputs: Sequence[jax.Array], outputs: Sequence[ArrayLike]) -> Recorded:
        """Returns the program that computes `outputs` from `inputs`.

        Other inputs that were added must not matter for the outputs.
        """
        source = _source_info_util.current()
        results = [
            self._trace.to_jaxpr_tracer(_dtypes.canonicalize_value(each), source)
            for each in outputs
        ]
        unnamed = self._description._replace(arg_names=None)
        jaxpr, constants = self._trace.to_jaxpr(results, unnamed, source)
        wanted = [_get_variable(each) for each in inputs]
        if len(wanted) < len(jaxpr.invars):
            jaxpr, constants, _ = _drop_unused(jaxpr, constants)
            assert set(jaxpr.invars) <= set(wanted)
        return core.ClosedJaxpr(jaxpr.replace(invars=wanted), constants)


@dataclass(frozen=True)
class PartialProgram:
    """A part of a program that is being recorded: what computes one of its values.

    Attributes:
        run: Computes the value from constants and inputs.
        constants: What it uses from outside the program; these may be traced themselves.
        inputs: The places of those inputs of the program that it uses.
    """

    run: Callable[[Sequence[ArrayLike], Sequence[ArrayLike]], jax.Array]
    constants: list[Any]
    inputs: list[int]


def cut_out(trace: _core.Trace, value: jax.Array) -> PartialProgram:
    """Returns the part of the program that `trace` records which computes `value`."""
    assert isinstance(trace, _partial_eval.DynamicJaxprTrace)
    assert isinstance(value, _partial_eval.DynamicJaxprTracer)
    assert trace.frame.debug_info is not None
    unnamed = trace.frame.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr, constants = trace.to_jaxpr([value], unnamed, _source_info_util.current())
    jaxpr, constants, inputs = _drop_unused(jaxpr, constants)

    def run(constants: Sequence[ArrayLike], inputs: Sequence[ArrayLike]) -> jax.Array:
        (result,) = _core.eval_jaxpr(jaxpr, list(constants), *inputs)
        return result

    return PartialProgram(run, constants, inputs)


def _drop_unused(
    jaxpr: _core.Jaxpr, constants: Sequence[Any]
) -> tuple[_core.Jaxpr, list[Any], list[int]]:
    """Leaves out what no result needs; returns the constants and the places of inputs that stay."""
    jaxpr, kept, used = _partial_eval.dce_jaxpr_consts(
        jaxpr, [True] * len(jaxpr.outvars), [False] * (len(constants) + len(jaxpr.invars))
    )
    return (
        jaxpr,
        [each for each, keep in zip(constants, kept, strict=True) if keep],
        [index for index, keep in enumerate(used) if keep],
    )


def _get_variable(tracer: jax.Array) -> Any:
    assert isinstance(tracer, _partial_eval.DynamicJaxprTracer)
    return tracer.val


def compute_on_host(program: Recorded, inputs: Sequence[np.ndarray]) -> list[Any] | None:
    """Returns what a program computes, if it only fills arrays and passes its inputs on.

    Args:
        program: The program.
        inputs: The values of its inputs.

    Returns:
        The results as NumPy arrays, or None if the program does anything else.
    """
    values: dict[Any, ArrayLike] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    values.update(zip(program.jaxpr.constvars, program.consts, strict=True))
    for equation in program.jaxpr.eqns:
        operand = equation.invars[0] if equation.invars else None
        is_fill = equation.primitive is core.primitives.broadcast_in_dim_p
        if not is_fill or not isinstance(operand, core.Literal):
            return None
        (result,) = equation.outvars
        values[result] = _fill(result.aval, operand.val)
    return [
        _fill(each.aval, each.val) if isinstance(each, core.Literal) else values[each]
        for each in program.jaxpr.outvars
    ]


def _fill(array_type: Any, number: Any) -> np.ndarray:
    return np.full(array_type.shape, number, array_type.dtype)
