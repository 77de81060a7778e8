"""Traces: which JAX transformation runs the code now, and SPMD programs over a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeGuard, TypeVar

import jax
from jax import lax
from jax._src import config as _config
from jax._src import core as _core
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

Trace: TypeAlias = _core.Trace
"""A JAX transformation that is tracing code."""

Tracer: TypeAlias = jax.core.Tracer
"""What stands for an array inside a JAX transformation."""

_Result = TypeVar("_Result")


def is_tracer(value: object) -> TypeGuard[jax.Array]:
    """Tells whether `value` stands for an array inside a JAX transformation."""
    return isinstance(value, Tracer)


def is_tracing() -> bool:
    """Tells whether a JAX transformation is tracing the code that runs now."""
    return not isinstance(_core.trace_ctx.trace, _core.EvalTrace)


def get_innermost_trace() -> Trace:
    """Returns the transformation that is tracing now."""
    return _core.trace_ctx.trace


def get_trace(tracer: jax.Array) -> Trace:
    """Returns the transformation that `tracer` belongs to."""
    assert isinstance(tracer, Tracer)
    return tracer._trace


def get_outside_trace_state() -> _core.OpaqueTraceState:
    """Returns JAX's token for code that no JAX transformation is tracing."""
    return _core.OpaqueTraceState(_core.eval_trace._weakref)


def has_mesh() -> bool:
    """Tells whether the user has set a mesh with `jax.set_mesh`."""
    mesh = _config.device_context.value
    return mesh is not None and not mesh.empty


@contextlib.contextmanager
def leave_mesh() -> Iterator[None]:
    """Runs code without the mesh of `jax.set_mesh`: the replicas have a mesh of their own."""
    if not has_mesh() or is_tracing():
        yield
        return
    with jax.set_mesh(None):
        yield


def run_outside_trace(fn: Callable[[], _Result]) -> _Result:
    """Runs `fn` as ordinary code although a transformation is tracing the caller.

    What a transformation sets for the code inside (the mesh of `jax.shard_map` and its axes) does
    not hold for `fn`; settings of the user, such as `jax.enable_x64`, do.
    """
    if not is_tracing():
        return fn()
    axes = _core.trace_ctx.axis_env
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with core.set_current_trace(_core.eval_trace), no_mesh, _config._check_vma(False):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            return fn()
        finally:
            _core.trace_ctx.set_axis_env(axes)


def varies(value: object, axis: str) -> bool:
    """Tells whether `value` differs along the mesh axis, inside `jax.shard_map`."""
    return isinstance(value, Tracer) and axis in jax.typeof(value).manual_axis_type.varying


def to_varying(value: jax.Array, axis: str) -> jax.Array:
    """Marks `value` as each replica's own, so that gradients to it stay the replica's own."""
    return value if varies(value, axis) else lax.pcast(value, axis, to="varying")


def all_gather_same(value: jax.Array, axis: str) -> jax.Array:
    """Stacks the values of all replicas; the result is known to be the same on each."""
    return lax.all_gather(value, axis, to=_choose_gathered_type())


def all_gather_joined(value: jax.Array, axis_name: str, axis: int) -> jax.Array:
    """Joins the values of all replicas along a dimension; the result is the same on each."""
    return lax.all_gather(
        value, axis_name, axis=axis % value.ndim, tiled=True, to=_choose_gathered_type()
    )


def _choose_gathered_type() -> str:
    # Where JAX does not track it, "invarying" has the gradient of one replica's use only.
    return "invarying" if _config._check_vma.value else "varying"


def shard_map(
    fn: Callable[..., list[jax.Array]],
    mesh: Mesh,
    in_specs: object,
    out_specs: list[PartitionSpec],
) -> Callable[..., list[jax.Array]]:
    """Like `jax.shard_map` for a function that returns a list and fills `out_specs` as it runs.

    Which results vary is known only when the body has been traced. JAX reads `out_specs` after it
    has traced the body, so one trace is enough; tests/unit/test_jax_private.py guards that order.

    JAX is not asked to track which values vary, as that would change what a replica's code means:
    a gradient with respect to a constant would be summed over replicas, and a loop that starts
    from zeros would be refused (the zeros are the same everywhere, its results are not).
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
