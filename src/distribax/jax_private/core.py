"""Every use of a JAX name that is not stable, in one place; the rest of the code asks here."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import pxla
from jax.sharding import Mesh, PartitionSpec

from distribax.errors import explained, explaining

Tracer = jax.core.Tracer


def is_tracer(value: object) -> bool:
    """Tells whether `value` stands for an array inside a JAX transformation."""
    return isinstance(value, Tracer)


def varies(value: Any, axis: str) -> bool:
    """Tells whether `value` differs along the mesh axis, inside `jax.shard_map`."""
    if not is_tracer(value):
        return False
    return axis in jax.typeof(value).manual_axis_type.varying


def to_varying(value: Any, axis: str) -> Any:
    """Marks `value` as each replica's own, so that gradients to it stay the replica's own."""
    if varies(value, axis):
        return value
    return lax.pcast(value, axis, to="varying")


def tracks_varying() -> bool:
    """Tells whether JAX computes, in the code that runs now, which values differ by replica."""
    return _config._check_vma.value


def all_gather_same(value: Any, axis: str) -> Any:
    """Stacks the values of all replicas; the result is known to be the same on each."""
    return lax.all_gather(value, axis, to=_gathered())


def _gathered() -> str:
    # Where JAX does not track it, "invarying" has the gradient of one replica's use only.
    return "invarying" if tracks_varying() else "varying"


def shard_map(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: list[PartitionSpec],
) -> Callable[..., Any]:
    """Like `jax.shard_map` for a function that returns a list and fills `out_specs` as it runs.

    Which results vary is known only when the body has been traced. JAX reads `out_specs` after it
    has traced the body, so one trace is enough; tests/unit/test_jax_private.py guards that order.

    JAX is not asked to track which values vary, as that would change what a replica's code means:
    a gradient with respect to a constant would be summed over replicas, and a loop that starts
    from zeros would be refused (the zeros are the same everywhere, its results are not).
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns the same buffer as an array that may be mixed with arrays of other devices."""
    if is_tracer(array) or not array.committed or len(array.sharding.device_set) > 1:
        return array
    if is_key(array):
        return on_key_data(uncommitted, array)
    return _array.ArrayImpl(array.aval, array.sharding, [array], committed=False)  # type: ignore[list-item]


def device_pieces(array: jax.Array) -> list[jax.Array]:
    """Returns the single-device arrays of `array` on this process, in the order of its devices."""
    if is_key(array):
        key: Any = array
        return [type(key)(key._impl, piece) for piece in key._base_array._arrays]
    return list(array._arrays)  # type: ignore[attr-defined]


def trace_state() -> Any:
    """Returns a token that is equal as long as no JAX transformation is entered or left."""
    return _core.get_opaque_trace_state()


def innermost_trace() -> Any:
    """Returns the transformation that is tracing now."""
    return _core.trace_ctx.trace


def is_in_jit(outer: Any) -> bool:
    """Tells whether `jax.jit` traces the code that runs now, inside the transformation `outer`."""
    trace = innermost_trace()
    while trace is not None and trace is not outer:
        frame = getattr(trace, "frame", None)
        if frame is not None and frame.debug_info.traced_for == "jit":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def trace_of(tracer: Any) -> Any:
    """Returns the transformation that `tracer` belongs to."""
    return tracer._trace


def backends_started() -> bool:
    """Tells whether JAX has made its device clients, after which device counts are fixed."""
    return _xla_bridge.backends_are_initialized()


def process_id() -> int:
    """Returns this process' index among those of `jax.distributed`, without starting a backend."""
    return _distributed.global_state.process_id


def cpu_pool_threads() -> int | None:
    """Returns how many threads XLA's CPU client has for its programs; None when that is unknown.

    XLA tells nobody, but names the threads of its compute pool, and Linux shows thread names.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    count = 0
    for comm in tasks.glob("*/comm"):
        # A thread may end between the listing and the reading.
        with contextlib.suppress(OSError):
            count += comm.read_text().startswith("tf_XLAEigen")
    return count or None


def all_gather_joined(value: Any, axis_name: str, axis: int) -> Any:
    """Joins the values of all replicas along a dimension; the result is the same on each."""
    return lax.all_gather(value, axis_name, axis=axis % value.ndim, tiled=True, to=_gathered())


def fresh(array: jax.Array) -> jax.Array:
    """Returns the same buffers as a new array object; uncommitted if it is on one device."""
    if is_key(array):
        return on_key_data(fresh, array)
    pieces = device_pieces(array)
    return _array.ArrayImpl(array.aval, array.sharding, pieces, committed=len(pieces) > 1)  # type: ignore[arg-type]


def on_device(array: jax.Array, device: jax.Device) -> jax.Array:
    """Returns the whole of `array` on one device, without a copy if it is there already."""
    if is_key(array):
        return on_key_data(lambda data: on_device(data, device), array)
    if array.sharding.is_fully_replicated:
        near = {piece.device: piece for piece in device_pieces(array)}
        array = near.get(device, next(iter(near.values())))
    return array if array.devices() == {device} else jax.device_put(uncommitted(array), device)


def outside_trace(fn: Callable[[], Any]) -> Any:
    """Runs `fn` as ordinary code although a transformation is tracing the caller.

    JAX keeps its trace in the thread, so a fresh thread is outside of it. It also keeps what
    `jax.enable_x64` and `jax.default_device` have set there, which the fresh one is given.
    """
    if not is_tracing():
        return fn()
    outcome: list[Any] = []
    wide, device = has_64_bits(), current_default_device()

    def call() -> None:
        try:
            with jax.enable_x64(wide), jax.default_device(device):
                outcome.extend((context.run(fn), None))
        except BaseException as error:  # Raised again by the caller.
            outcome.extend((None, error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=call, name="distribax-outside-trace", daemon=True)
    thread.start()
    thread.join()
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def is_tracing() -> bool:
    """Tells whether a JAX transformation is tracing the code that runs now."""
    return not isinstance(_core.trace_ctx.trace, _core.EvalTrace)


def one_copy(array: jax.Array) -> jax.Array:
    """Returns one device's copy of a replicated array."""
    return array if len(array.sharding.device_set) == 1 else device_pieces(array)[0]


@functools.lru_cache(maxsize=256)
def _abstract(shape: tuple[int, ...], dtype: Any) -> Any:
    return _core.ShapedArray(shape, dtype)


def put_rows(leaf: Any, sharding: Any, devices: Sequence[jax.Device]) -> jax.Array:
    """Puts a host array on devices, an equal part of its rows on each.

    It does what `jax.device_put` does, in a fifth of the time: a batch is small, and what Python
    does for it is what a training loop loses to its input.
    """
    if not isinstance(leaf, np.ndarray) or jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return jax.device_put(leaf, sharding)
    rows = leaf.shape[0] // len(devices)
    parts = [leaf[index * rows : (index + 1) * rows] for index in range(len(devices))]
    aval = _abstract(leaf.shape, leaf.dtype)
    array: jax.Array = pxla.batched_device_put(aval, sharding, parts, devices)
    return array


def current_default_device() -> Any:
    """Returns the device that `jax.default_device` has set, or None."""
    return _config.default_device.value


def has_64_bits() -> bool:
    """Tells whether JAX computes with 64 bits where it is asked to."""
    return bool(_config.enable_x64.value)


def with_dim(value: Any) -> jax.Array:
    """Returns `value` with a first dimension of size 1, on the device it is on."""
    if not isinstance(value, jax.Array) or is_tracer(value):
        return jax.numpy.asarray(value)[None]
    with jax.default_device(next(iter(value.devices()))):
        return value[None]


def asked_cpu_devices() -> int | None:
    """Returns the value of jax_num_cpu_devices; None when it is not set."""
    asked: int = _xla_bridge.num_cpu_devices.value
    return asked if asked >= 0 else None


def is_concrete_array(value: object) -> bool:
    """Tells whether `value` is an ordinary array: no tracer, and no array of random keys."""
    return type(value) is _array.ArrayImpl


def is_key(value: Any) -> bool:
    """Tells whether `value` is an array of random keys."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def on_key_data(fn: Callable[[jax.Array], jax.Array], key: Any) -> Any:
    """Applies `fn`, which moves arrays, to the numbers that an array of random keys consists of."""
    return type(key)(key._impl, fn(key._base_array))


def outside_trace_state() -> Any:
    """Returns what `trace_state` returns where no JAX transformation is tracing."""
    return _core.OpaqueTraceState(_core.eval_trace._weakref)


def is_local(array: Any) -> bool:
    """Tells whether all of an array is on devices of this process (a tracer counts as local)."""
    return is_tracer(array) or not isinstance(array, jax.Array) or array.is_fully_addressable


def _multihost() -> Any:
    # Loaded on use: one process alone has no need of it.
    from jax.experimental import multihost_utils

    return multihost_utils


@explaining
def broadcast_from_first(value: Any) -> Any:
    """Returns the first process's value, in every process; all must call it."""
    return _multihost().broadcast_one_to_all(value)


@explaining
def gather_from_all(value: Any, axis: int) -> list[Any]:
    """Returns every process's array, in their order; sizes along `axis` may differ."""
    sizes = _multihost().process_allgather(np.int64(value.shape[axis]))
    widest = int(sizes.max())
    padding = [(0, 0)] * value.ndim
    padding[axis % value.ndim] = (0, widest - value.shape[axis])
    stacked = _multihost().process_allgather(np.pad(value, padding))
    return [np.take(part, range(int(n)), axis) for part, n in zip(stacked, sizes, strict=True)]


@explaining
def texts_of_all(text: str) -> list[str]:
    """Returns every process's text, in their order; all must call it."""
    lengths = _multihost().process_allgather(np.int64(len(text.encode())))
    own = np.frombuffer(text.encode().ljust(int(lengths.max()), b" "), np.uint8)
    return [
        bytes(row[: int(length)]).decode()
        for row, length in zip(_multihost().process_allgather(own), lengths, strict=True)
    ]


@explaining
def agree_on(text: str) -> bool:
    """Tells whether every process has said the same text; all must call it."""
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint32)
    return bool((_multihost().process_allgather(digest) == digest).all())


@explaining
def sum_over_processes(value: int) -> int:
    """Adds up a number of every process; all must call it."""
    return int(_multihost().process_allgather(np.int64(value)).sum())


def for_user(array: Any) -> Any:
    """Returns an array as user code gets it: free to be mixed, and of this process alone.

    An array over several processes could only be computed with by all of them together.
    """
    if is_tracer(array) or array.is_fully_addressable:
        return uncommitted(array)
    if not array.sharding.is_fully_replicated:
        # A program whose results nobody has told where to be; all processes come here together.
        return jax.numpy.asarray(_multihost().process_allgather(array, tiled=True))
    return uncommitted(one_copy(array))


def exchange_text(key: str, text: str, seconds: float) -> list[str]:
    """Returns what every process has said under `key`, in their order; all must call it.

    It goes through the coordination service, so that a thread of its own can use it while programs
    run. A worker that says nothing in time is named.
    """
    client = _distributed.global_state.client
    if client is None:
        return [text]
    texts = []
    try:
        client.key_value_set(f"{key}/{jax.process_index()}", text)
        for process in range(jax.process_count()):
            texts.append(client.blocking_key_value_get(f"{key}/{process}", int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if (named := explained(error)) is not error:
            raise named from error
        raise RuntimeError(
            f"worker {len(texts)} gave no sign within {seconds:g} s (waiting for {key}). Is it "
            "still running, and does it run the same program?"
        ) from error
    return texts


def forget_text(key: str) -> None:
    """Takes back what this process has said under `key`, to free the coordinator's memory."""
    client = _distributed.global_state.client
    if client is not None:
        client.key_value_delete(f"{key}/{jax.process_index()}")


@explaining
def reached_preemption_point(number: int) -> bool:
    """Tells whether to save now, as a process was told to stop; all ask with growing numbers.

    JAX answers yes to all processes at the same number.
    """
    if _distributed.global_state.preemption_sync_manager is None:
        raise RuntimeError(
            "JAX does not listen for preemptions: its preemption service is off. Turn it on before "
            'the strategy is made: jax.config.update("jax_enable_preemption_service", True).'
        )
    return _multihost().reached_preemption_sync_point(number)
