"""Reads and writes Orbax's files in this process alone, without waiting for others.

Importing Orbax takes a while: import this module where it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from typing_extensions import override


class _ArrayHandler(ocp.type_handlers.NumpyHandler):
    """Writes arrays; Orbax's own handler writes them on the first process only."""

    @override
    async def serialize(
        self, values: Sequence[np.ndarray], infos: Sequence[Any], args: object = None
    ) -> Sequence[Any]:
        await asyncio.gather(*map(_write_array, values, infos))
        return []


async def _write_array(value: np.ndarray, info: Any) -> None:
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=value.shape,
        local_shape=value.shape,
        dtype=value.dtype,
        process_index=jax.process_index(),
        arg=ocp.SaveArgs(),
    )
    store = await tensorstore.open(
        tensorstore.Spec(spec),
        create=True,
        open=True,
        dtype=value.dtype,  # Before Orbax 0.12.5, it is not in the spec.
        context=info.ts_context,
    )
    await store.write(value, can_reference_source_data_indefinitely=True)


def save(
    path: Path, arrays: tuple[str, Mapping[str, np.ndarray]], notes: tuple[str, Mapping[str, Any]]
) -> None:
    """Writes arrays and notes into a new directory.

    Args:
        path: The directory.
        arrays: The item that they are, and at least one array by name.
        notes: The item that they are, and what can be said in JSON.
    """
    items = {
        arrays[0]: ocp.args.PyTreeSave(dict(arrays[1])),
        notes[0]: ocp.args.JsonSave(dict(notes[1])),
    }
    with _make_checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.Composite(**items))


def restore_arrays(path: Path, item: str) -> dict[str, Any]:
    """Returns the arrays of a checkpoint by name.

    Args:
        path: Its directory.
        item: Which item they are.
    """
    with _make_checkpointer() as checkpointer:
        found = checkpointer.restore(
            path, args=ocp.args.Composite(**{item: ocp.args.StandardRestore()})
        )
    return dict(found[item])


def _make_checkpointer() -> ocp.Checkpointer:
    """Returns a checkpointer of this process alone: others are waited for elsewhere, with a bound.

    Without this Orbax would wait for all processes of `jax.distributed`.
    """
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"distribax_{process}",
    )
    arrays = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _ArrayHandler()),
        # There is none, but without a handler Orbax warns that it keeps no metadata of them.
        (jax.Array, ocp.type_handlers.ArrayHandler(primary_host=process)),
    )
    writer = ocp.PyTreeCheckpointHandler(
        type_handler_registry=arrays, multiprocessing_options=alone
    )
    reader = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    texts = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(None, ocp.args.PyTreeSave, writer)
    handlers.add(None, ocp.args.StandardRestore, reader)
    handlers.add(None, ocp.args.JsonSave, texts)
    # By default a thread makes the directories and tells those that write that it has. The key by
    # which it does so is the same in all processes: another one could tell them too early.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CompositeOptions(multiprocessing_options=alone, async_options=at_once)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, handler_registry=handlers)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
