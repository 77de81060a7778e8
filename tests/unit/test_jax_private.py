"""What the engine relies on in JAX beyond its promises; a new JAX must keep it, or this fails."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from distribax import jax_private
from distribax.topology import REPLICA_AXIS, make_replica_mesh

SPLIT, SAME = PartitionSpec(REPLICA_AXIS), PartitionSpec()


def _mesh() -> jax.sharding.Mesh:
    return make_replica_mesh(jax.devices()[:2])


def test_out_specs_are_read_after_the_body_is_traced() -> None:
    out_specs: list[PartitionSpec] = []

    def body(x: Any) -> list[Any]:
        out_specs[:] = [SPLIT, SAME]
        return [x * 2, jax.lax.psum(x, REPLICA_AXIS)]

    program = jax.jit(jax_private.shard_map(body, _mesh(), (SPLIT,), out_specs))
    doubled, total = program(jnp.arange(4.0))
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert total.tolist() == [2.0, 4.0]


def test_gradients_of_collectives_count_every_replica() -> None:
    """The gradient of a sum over replicas is the sum of the gradients; of a gather, its part."""
    out_specs: list[PartitionSpec] = [SPLIT, SPLIT]

    def body(x: Any) -> list[Any]:
        total = jax.grad(lambda w: jax.lax.psum(jnp.sum(w * x), REPLICA_AXIS))(1.0)
        joined = jax.grad(lambda w: jnp.sum(jax_private.all_gather_joined(w * x, REPLICA_AXIS, 0)))(
            1.0
        )
        return [total[None], joined[None]]

    total, joined = jax.jit(jax_private.shard_map(body, _mesh(), (SPLIT,), out_specs))(
        jnp.arange(4.0)
    )
    assert total.tolist() == joined.tolist() == [2.0, 10.0]


def test_what_varies_is_tracked_on_demand() -> None:
    seen: list[Any] = []

    def body(x: Any) -> Any:
        seen.append(jax_private.varies(x, REPLICA_AXIS))
        same = jax.lax.psum(x, REPLICA_AXIS)
        seen.append(jax_private.varies(same, REPLICA_AXIS))
        own = jax_private.to_varying(same, REPLICA_AXIS)
        seen.append(jax_private.varies(own, REPLICA_AXIS))
        assert jax_private.to_varying(own, REPLICA_AXIS) is own
        return jax_private.all_gather_same(own, REPLICA_AXIS)

    jax.jit(jax.shard_map(body, mesh=_mesh(), in_specs=SPLIT, out_specs=SAME))(jnp.arange(4.0))
    assert seen == [True, False, True]
    assert jax_private.varies(jnp.ones(2), REPLICA_AXIS) is False


def test_arrays_are_unbound_from_devices_without_a_copy() -> None:
    bound = jax.device_put(jnp.ones(2), jax.devices()[3])
    free = jax_private.uncommit(bound)
    assert (bound.committed, free.committed) == (True, False)
    assert free.unsafe_buffer_pointer() == bound.unsafe_buffer_pointer()
    assert jax_private.uncommit(free) is free
    with jax.default_device(jax.devices()[4]):
        assert (free + 1).devices() == {jax.devices()[4]}
    again = jax_private.rewrap(free)
    assert again is not free
    assert again.unsafe_buffer_pointer() == free.unsafe_buffer_pointer()


def test_copies_are_found_where_they_are() -> None:
    sharding = jax.sharding.NamedSharding(_mesh(), SAME)
    array = jax.device_put(jnp.ones(2), sharding)
    assert [piece.device for piece in jax_private.split_by_device(array)] == jax.devices()[:2]
    assert jax_private.pick_copy(array).devices() == {jax.devices()[0]}
    assert jax_private.move_to_device(array, jax.devices()[1]).devices() == {jax.devices()[1]}
    assert jax_private.move_to_device(array, jax.devices()[5]).devices() == {jax.devices()[5]}
    scalar = jax.device_put(jnp.ones(()), jax.devices()[2])
    assert jax_private.add_dim(scalar).devices() == {jax.devices()[2]}
    assert jax_private.add_dim(3.0).shape == (1,)


def test_code_runs_outside_of_a_trace() -> None:
    seen: list[Any] = []

    @jax.jit
    def traced(x: Any) -> Any:
        seen.append(jax_private.is_tracing())
        seen.append(jax_private.run_outside_trace(lambda: float(jnp.ones(()) + 1)))
        seen.append(jax_private.get_trace(x) is jax_private.get_innermost_trace())
        with pytest.raises(KeyError, match="mine"):
            jax_private.run_outside_trace(lambda: {}["mine"])
        return x

    traced(1.0)
    assert seen == [True, 2.0, True]
    assert not jax_private.is_tracing()
    assert jax_private.run_outside_trace(threading.get_ident) == threading.get_ident()


def test_code_outside_of_a_trace_has_the_callers_settings() -> None:
    device = jax.devices()[1]
    made: list[jax.Array] = []

    @jax.jit
    def traced(x: Any) -> Any:
        made.append(jax_private.run_outside_trace(lambda: jnp.asarray(2.0**40 + 1)))
        return x

    with jax.enable_x64(True), jax.default_device(device):
        traced(1.0)
    assert int(made[0]) == 2**40 + 1
    assert made[0].devices() == {device}


def test_the_backend_has_started() -> None:
    assert jax_private.have_backends_started()
    assert jax_private.get_process_id() == 0
    assert jax_private.get_default_device() is None


def test_a_trace_that_is_noted_is_forgotten() -> None:
    """JAX keeps traces by function; see `jax_private.closures`."""
    held = [1.0]

    def read() -> float:
        jax_private.note_closures(list(jax_private.iterate_staging(None)))
        return held[0]

    def body(carry: Any, x: Any) -> Any:
        return carry + read() * x, None

    def impatient(carry: Any, x: Any) -> Any:
        total = carry + read() * x
        # The trace is not finished: it can be forgotten later only.
        jax_private.forget_closures()
        return total, None

    remembered = jax.checkpoint(lambda x: x * read())
    for value in (1.0, 2.0):
        held[0] = value
        for fn in (body, impatient):
            assert float(jax.lax.scan(fn, 0.0, jnp.ones(2))[0]) == 2 * value
        assert float(remembered(1.0)) == value
        jax_private.forget_closures()


def test_arrays_can_have_methods() -> None:
    array = jnp.ones(2)

    def assign() -> int:
        return 3

    more: Any = jax_private.add_methods(array, [assign])
    assert (more.assign(), more.tolist()) == (3, [1.0, 1.0])
    assert not hasattr(array, "assign")


def test_what_only_fills_arrays_is_computed_without_compiling() -> None:
    def fill(x: Any) -> Any:
        return jnp.zeros_like(x), jnp.full((2, 1), 3, jnp.int16), x, jnp.int32(7)

    x = np.arange(3, dtype=np.float32)
    results = jax_private.compute_on_host(jax.make_jaxpr(fill)(x), [x])
    assert results is not None
    for result, expected in zip(results, fill(x), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    assert jax_private.compute_on_host(jax.make_jaxpr(lambda x: x + 1)(x), [x]) is None
    spread = jax.make_jaxpr(lambda x: jnp.broadcast_to(x[0], (2,)))(x)
    assert jax_private.compute_on_host(spread, [x]) is None


def test_a_recorded_program_is_run_as_it_is() -> None:
    program = jax.make_jaxpr(lambda x, y: (x + y, x * 2))(1.0, 2.0)

    def run(x: Any, y: Any) -> Any:
        return jax_private.run_recorded(program, [x, y], "known")

    assert [float(each) for each in jax.jit(run)(1.0, 2.0)] == [3.0, 2.0]
    (call,) = jax.make_jaxpr(run)(1.0, 2.0).eqns
    assert call.params["name"] == "known" and call.params["jaxpr"] is program
    with jax.disable_jit():
        assert [float(each) for each in run(1.0, 2.0)] == [3.0, 2.0]
