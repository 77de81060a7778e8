"""Several processes: exchanging values, and agreeing on them."""

from __future__ import annotations

import hashlib
from types import ModuleType

import jax
import numpy as np
from jax._src import distributed as _distributed

from distribax.jax_private.arrays import pick_copy, uncommit
from distribax.jax_private.joint_calls import joint_calls
from distribax.jax_private.tracing import is_tracer


def _import_multihost() -> ModuleType:
    # Imported on use: a single process does not need it.
    from jax.experimental import multihost_utils

    return multihost_utils


def broadcast_from_first(value: np.ndarray) -> np.ndarray:
    """Returns the first process's value, in every process; all must call it."""
    with joint_calls.record(f"broadcast of {value.dtype.name}{list(value.shape)}"):
        received: np.ndarray = _import_multihost().broadcast_one_to_all(value)
    return received


def gather_from_all(value: np.ndarray, axis: int) -> list[np.ndarray]:
    """Returns every process's array, in their order; sizes along `axis` may differ."""
    sizes = _gather_numbers("gather of sizes", value.shape[axis])
    widest = int(sizes.max())
    padding = [(0, 0)] * value.ndim
    padding[axis % value.ndim] = (0, widest - value.shape[axis])
    padded = np.pad(value, padding)
    with joint_calls.record(f"gather of {value.dtype.name}{list(padded.shape)}"):
        stacked = _import_multihost().process_allgather(padded)
    return [np.take(part, range(int(n)), axis) for part, n in zip(stacked, sizes, strict=True)]


def gather_texts(text: str) -> list[str]:
    """Returns every process's text, in their order; all must call it."""
    lengths = _gather_numbers("gather of text lengths", len(text.encode()))
    own = np.frombuffer(text.encode().ljust(int(lengths.max()), b" "), np.uint8)
    with joint_calls.record("gather of texts"):
        rows = _import_multihost().process_allgather(own)
    return [bytes(row[: int(length)]).decode() for row, length in zip(rows, lengths, strict=True)]


def agree_on(text: str) -> bool:
    """Tells whether every process has said the same text; all must call it."""
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint32)
    with joint_calls.record("agreement"):
        said = _import_multihost().process_allgather(digest)
    return bool((said == digest).all())


def sum_over_processes(value: int) -> int:
    """Adds up a number of every process; all must call it."""
    return int(_gather_numbers("sum of sizes", value).sum())


def _gather_numbers(name: str, value: int) -> np.ndarray:
    with joint_calls.record(name):
        numbers: np.ndarray = _import_multihost().process_allgather(np.int64(value))
    return numbers


def localize(array: jax.Array) -> jax.Array:
    """Returns an array as user code gets it: on this process alone, and committed to no device.

    With an array over several processes, only all of them together could compute.
    """
    if is_tracer(array) or array.is_fully_addressable:
        return uncommit(array)
    if not array.sharding.is_fully_replicated:
        # The program left the placement of its results open; all processes come here together.
        with joint_calls.record(f"gather of {array.dtype.name}{list(array.shape)}"):
            return jax.numpy.asarray(_import_multihost().process_allgather(array, tiled=True))
    return uncommit(pick_copy(array))


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
        raise RuntimeError(
            f"worker {len(texts)} did not answer within {seconds:g} s (waiting for {key}). Is it "
            "still running, and does it run the same program?"
        ) from error
    return texts


def forget_text(key: str) -> None:
    """Takes back what this process has said under `key`, to free the coordinator's memory."""
    client = _distributed.global_state.client
    if client is not None:
        client.key_value_delete(f"{key}/{jax.process_index()}")


def has_reached_preemption_point(number: int) -> bool:
    """Tells whether to save now, as a process was told to stop; all ask with growing numbers.

    JAX answers yes to all processes at the same number.
    """
    if _distributed.global_state.preemption_sync_manager is None:
        raise RuntimeError(
            "JAX does not listen for preemptions: its preemption service is off. Turn it on before "
            'the strategy is made: jax.config.update("jax_enable_preemption_service", True).'
        )
    return _import_multihost().reached_preemption_sync_point(number)
