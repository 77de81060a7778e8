"""Variables that live in parameter servers: where each is, and how its value comes and goes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distribax import jax_private
from distribax.errors import ParametersLostError
from distribax.execution import named_objects
from distribax.execution.remote_writes import Write, WriteRows
from distribax.parameter_server import (
    AddRows,
    Assign,
    AssignAdd,
    AssignRows,
    Op,
    ParameterClient,
    ParameterSpec,
)
from distribax.topology.host_memory import aligned_empty
from distribax.types import WriteKind
from distribax.variables.placement import Placement
from distribax.variables.sharded.division import check_ids


class ParameterSource:
    """A process's source to the servers: it fetches values and sends writes, many at once.

    Args:
        client: The connections to the servers.
        num_servers: How many servers there are.
        is_coordinator: Whether variables may be created here; the coordinator also waits until a
            write has arrived, so that functions which it schedules afterwards see it.
    """

    def __init__(self, client: ParameterClient, num_servers: int, is_coordinator: bool) -> None:
        self.client = client
        self.num_servers = num_servers
        self.is_coordinator = is_coordinator
        self._bytes = [0] * num_servers
        # The servers that shards of the variable being created are on already.
        self._is_apart = False
        self._taken: list[int] = []
        self._cached: dict[str, tuple[Any, jax.Array | None]] = {}
        # What has been registered on the servers, to be done again on one that has lost it.
        self.registrations: list[Callable[[], None]] = []

    def choose_server(self) -> int:
        """Returns the server that has the fewest bytes so far."""
        chosen = min(
            range(self.num_servers),
            key=lambda index: (self._taken.count(index), self._bytes[index], index),
        )
        if self._is_apart:
            self._taken.append(chosen)
        return chosen

    @contextlib.contextmanager
    def spread(self) -> Iterator[None]:
        """Puts what is created inside on different servers, as long as there are enough."""
        self._is_apart, self._taken = True, []
        try:
            yield
        finally:
            self._is_apart, self._taken = False, []

    def create(self, spec: ParameterSpec, value: np.ndarray) -> None:
        """Makes a parameter on its server."""
        self.client.create(spec, value)
        self._bytes[spec.server] += value.nbytes

    def pull(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the variables' values as a compiled program takes them.

        What has not changed is not sent again. A new value is given as the NumPy array that it
        came in: the CPU backend takes a large one as it is (the memory is aligned and never
        changes), and for once that costs less than making an array of JAX's. Who reads it again
        gets one.
        """
        known = self._cached
        values: list[Any] = []
        specs = [variable.placement.specs[0] for variable in variables]
        for spec, (version, array) in zip(specs, self.client.pull_versions(specs), strict=True):
            cached = known.get(spec.uid)
            if cached is None or cached[0] != version:
                known[spec.uid] = version, None
                values.append(array)
            else:
                values.append(self._get_cached_array(spec, version, array))
        return values

    def pull_specs(self, specs: Sequence[ParameterSpec]) -> list[jax.Array]:
        """Returns the parameters' values as arrays, on the default device."""
        return [
            self._get_cached_array(spec, version, array)
            for spec, (version, array) in zip(specs, self.client.pull_versions(specs), strict=True)
        ]

    def _get_cached_array(self, spec: ParameterSpec, version: Any, array: np.ndarray) -> jax.Array:
        cached = self._cached.get(spec.uid)
        if cached is not None and cached[0] == version and cached[1] is not None:
            return cached[1]
        placed = _place_on_device(array)
        self._cached[spec.uid] = version, placed
        return placed

    def rows(self, requests: Sequence[tuple[Any, np.ndarray]]) -> list[jax.Array]:
        """Returns rows of tables, each given with the ids; only they travel."""
        asked: list[tuple[ParameterSpec, np.ndarray]] = []
        plans = []
        for table, ids in requests:
            check_ids("embedding_lookup", table.shape, table.described, ids)
            plan = []
            for shard, places, own in table.division.split(ids.reshape(-1)):
                _, variable = table.row_shards[shard]
                asked.append((variable.placement.specs[0], own))
                plan.append(places)
            plans.append(plan)
        found = iter(self.client.pull_rows(asked))
        return [
            _place_on_device(_join_rows(table, ids, [(places, next(found)) for places in plan]))
            for (table, ids), plan in zip(requests, plans, strict=True)
        ]

    def write_rows(
        self, table: Any, kind: WriteKind, indices: np.ndarray, rows: np.ndarray
    ) -> None:
        """Sends a write to some rows of a table; only they travel."""
        self.push(make_row_operations(table, kind, indices, rows))

    def push(self, operations: Iterable[tuple[int, Op]]) -> None:
        """Sends operations, each with its server; those of one server are applied at once."""
        by_server: dict[int, list[Op]] = {}
        for server, operation in operations:
            by_server.setdefault(server, []).append(operation)
        self.client.push(by_server)
        if self.is_coordinator:
            self.client.flush()

    def commit(self, kinds: Sequence[object], arrays: Sequence[Any]) -> None:
        """Sends what a compiled step has computed for the servers."""
        given = _move_to_host(arrays)
        self.push(
            operation
            for what, own in zip(kinds, given, strict=True)
            for operation in _make_operations(what, own)
        )

    def write(self, variable: Any, kind: WriteKind, value: Any) -> None:
        """Sends a write to a variable now."""
        if kind is WriteKind.ASSIGN:
            self.assign(variable.placement.specs, np.asarray(value))
        else:
            self.push(make_operations(variable, kind, np.asarray(value)))

    def assign(self, specs: Sequence[ParameterSpec], value: np.ndarray) -> None:
        """Sets parameters to a value; the coordinator makes those again that a server has lost."""
        try:
            self.push((spec.server, Assign(spec.uid, value)) for spec in specs)
        except ParametersLostError:
            if not self.is_coordinator:
                raise
            for spec in specs:
                self.client.create(spec, value)
            for register in self.registrations:
                # Not until the last of its variables is there again.
                with contextlib.suppress(ParametersLostError):
                    register()


def _make_operations(what: Any, given: Any) -> Iterable[tuple[int, Op]]:
    if isinstance(what, Write):
        return make_operations(what.variable, what.kind, given)
    if isinstance(what, WriteRows):
        return make_row_operations(what.table, what.kind, *given)
    operations: Iterable[tuple[int, Op]] = what.operations(given)
    return operations


def make_row_operations(
    table: Any, kind: WriteKind, indices: np.ndarray, rows: np.ndarray
) -> list[tuple[int, Op]]:
    """Returns the operations of a write to some rows, one for each shard that has some of them."""
    check_ids("scatter", table.shape, table.described, indices)
    operation = AssignRows if kind is WriteKind.ASSIGN else AddRows
    operations: list[tuple[int, Op]] = []
    for shard, places, own in table.division.split(indices):
        _, variable = table.row_shards[shard]
        for spec in variable.placement.specs:
            operations.append((spec.server, operation(spec.uid, own, rows[places])))
    return operations


def _join_rows(table: Any, ids: np.ndarray, parts: list[tuple[Any, np.ndarray]]) -> np.ndarray:
    """Puts rows that came from several shards into the order in which they were asked for."""
    shape = (*ids.shape, *table.shape[1:])
    if len(parts) == 1 and parts[0][1].shape[0] == ids.size:
        return parts[0][1].reshape(shape)
    rows = aligned_empty((ids.size, *table.shape[1:]), table.dtype)
    for places, part in parts:
        rows[places] = part
    return rows.reshape(shape)


def make_operations(variable: Any, kind: WriteKind, value: Any) -> list[tuple[int, Op]]:
    """Returns the operations of a write, one for each copy."""
    operation = Assign if kind is WriteKind.ASSIGN else AssignAdd
    if kind is WriteKind.ASSIGN_SUB:
        value = -value
    value = np.asarray(value)
    if value.shape != variable.shape:
        value = np.broadcast_to(value, variable.shape)
    return [(spec.server, operation(spec.uid, value)) for spec in variable.placement.specs]


class Served(Placement):
    """One value on a parameter server, chosen by size when the variable is created.

    A step count that every server of an optimizer keeps has a copy on each; they are always the
    same, and the first one is read.
    """

    label = "ServedVariable"
    source: ParameterSource

    def __init__(
        self,
        source: ParameterSource,
        server: int | None = None,
        specs: tuple[ParameterSpec, ...] = (),
        name: str = "Variable",
    ) -> None:
        self.source = source
        self.specs = specs
        self._server = server
        self._name = name

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return (jax.local_devices()[0],)

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(f"/job:ps/replica:0/task:{spec.server}/device:CPU:0" for spec in self.specs)

    def beside(self) -> Placement:
        return Served(self.source, self.specs[0].server, name=self._name)

    def initial(self, value: Any) -> jax.Array:
        if not self.source.is_coordinator:
            raise RuntimeError(
                f"dx.Variable: {self._name!r} is created in a function that runs on a worker. "
                "Functions may run several times and on any worker, so variables are created by "
                "the coordinator: make it before coordinator.schedule(), inside "
                "`with strategy.scope():`, and refer to it in the function."
            )
        value = np.asarray(value, order="C")
        server = self.source.choose_server() if self._server is None else self._server
        uid = named_objects.make_uid()
        spec = ParameterSpec(uid, self._name, value.shape, value.dtype.name, server)
        self.source.create(spec, value)
        self.specs = (spec,)
        return _make_placeholder()

    def store(self, value: Any) -> jax.Array:
        raise NotImplementedError(
            "ParameterServerStrategy: the state of a flax.nnx module cannot live on parameter "
            "servers. Make a dx.Variable of each parameter inside `with strategy.scope():`, and "
            "in the function put their values into the module: nnx.merge(graphdef, state)."
        )

    def current(self, buffer: jax.Array) -> jax.Array:
        return self.source.pull_specs([self.specs[0]])[0]

    def pieces(self, buffer: jax.Array) -> list[jax.Array]:
        return [jax_private.uncommit(self.current(buffer))]

    def to_program(self, buffer: jax.Array) -> jax.Array:
        return self.current(buffer)


def _place_on_device(array: np.ndarray) -> jax.Array:
    return jax_private.run_outside_trace(lambda: jax.device_put(array))


@functools.cache
def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _move_to_host(nest: Any) -> Any:
    if not _is_on_cpu():
        return jax.device_get(nest)
    # Much cheaper here than fetching, which begins with all arrays before it waits for the first.
    return jax.tree.map(np.asarray, nest)


def _make_placeholder() -> jax.Array:
    """Returns what a process keeps of a variable that lives elsewhere."""
    return jax_private.run_outside_trace(lambda: jax.numpy.zeros(()))
