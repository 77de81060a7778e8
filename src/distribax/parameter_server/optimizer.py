"""Updates of variables that live in parameter servers: the gradients go there, and so do the slots.

An optax transformation keeps state: one array for each variable (a slot), and some that belong to
none (a step count). Here a slot lives beside its variable, each server has its own copy of the
rest, and a server runs the transformation over the variables that it has. That is the same as one
update of all variables only if the transformation treats each for itself, which is tried out first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax import jax_private
from distribax.execution import frames, named_objects
from distribax.parameter_server import Apply, AssignAdd, Op, OptimizerSpec, ParameterSpec, Rows
from distribax.parameter_server.placement import ParameterLink, Served
from distribax.types import VariableAggregation, VariableSynchronization
from distribax.values import IndexedSlices
from distribax.variables import Variable
from distribax.variables.sharded.division import check_ids


@dataclass(frozen=True)
class _Part:
    """A variable on one server: a target, or a shard of it (`place` among the shards)."""

    target: int
    place: int
    spec: ParameterSpec


class ServedUpdate:
    """How one optimizer updates one list of served variables.

    Args:
        uid: The optimizer's name, the same in every process.
        transformation: The optax transformation, with support for extra arguments.
        targets: The variables.
        owners: For each leaf of the transformation's state the index of its target, or None.
        state: The leaves of the state, as shapes and data types.
        name: What the slots' names begin with.
        counter: A variable that counts the updates, if there is one already.
        rounds: How many workers' gradients are averaged into one update.
    """

    def __init__(
        self,
        uid: str,
        transformation: Any,
        targets: Sequence[Any],
        owners: Sequence[int | None],
        state: Sequence[jax.ShapeDtypeStruct],
        name: str,
        counter: Variable | None,
        rounds: int,
    ) -> None:
        self._uid = uid
        self._transformation = transformation
        self._targets = list(targets)
        self._name = name
        self._strategy = self._targets[0].distribute_strategy
        self._link: ParameterLink = self._targets[0].source
        self._parts = [
            _Part(index, place, variable.placement.specs[0])
            for index, target in enumerate(self._targets)
            for place, variable in enumerate(shards_of(target))
        ]
        self._servers = list(dict.fromkeys(part.spec.server for part in self._parts))
        self._check_shapes(owners, state)
        if len(self._servers) > 1 or len(self._parts) > len(self._targets):
            check_separable(transformation, [(len(t.shape), t.dtype) for t in self._targets])
        self.counter = counter if counter is not None else self._counter_variable()
        self.slots: list[Any] = []
        self._by_server: dict[int, list[str]] = {server: [] for server in self._servers}
        for index, (owner, leaf) in enumerate(zip(owners, state, strict=True)):
            self.slots.append(self._slot(index, owner, leaf))
        self._rounds = rounds
        self._register()
        self._link.registrations.append(self._register)

    def _check_shapes(self, owners: Sequence[int | None], state: Sequence[Any]) -> None:
        for owner, leaf in zip(owners, state, strict=True):
            if owner is None or len(shards_of(self._targets[owner])) == 1:
                continue
            if tuple(leaf.shape) != tuple(self._targets[owner].shape):
                raise ValueError(
                    f"dx.Optimizer: the transformation keeps state of shape {tuple(leaf.shape)} "
                    f"for {self._targets[owner].described}, which cannot be divided like its "
                    "shards. Create the variable without variable_partitioner, or use a "
                    "transformation whose state has the variable's shape (optax.adam, ...)."
                )

    # State.

    def _slot(self, index: int, owner: int | None, leaf: jax.ShapeDtypeStruct) -> Any:
        """Makes the object for one leaf of the state, and notes where its pieces are."""
        dtype = np.dtype(leaf.dtype).name
        label = "" if owner is None else f"{self._targets[owner].name.removesuffix(':0')}/"
        name = f"{self._name}/{label}slot_{index}"
        if owner is None:
            specs = [
                ParameterSpec(
                    f"{self._uid}/{index}@{server}", name, tuple(leaf.shape), dtype, server
                )
                for server in self._servers
            ]
            for spec in specs:
                self._by_server[spec.server].append(spec.uid)
            return self._attached(specs, name, tuple(leaf.shape), leaf.dtype)
        shards = []
        for part in self._parts:
            if part.target != owner:
                continue
            whole = len(shards_of(self._targets[owner])) == 1
            shape = tuple(leaf.shape) if whole else part.spec.shape
            uid = f"{self._uid}/{index}/{part.spec.uid}"
            spec = ParameterSpec(uid, name, shape, dtype, part.spec.server)
            self._by_server[spec.server].append(uid)
            shards.append(self._attached([spec], name, shape, leaf.dtype))
        return shards[0] if len(shards) == 1 else self._targets[owner].like(shards, name)

    def _attached(
        self, specs: list[ParameterSpec], name: str, shape: tuple[int, ...], dtype: Any
    ) -> Variable:
        description = {
            "_name": name,
            "_aggregation": VariableAggregation.ONLY_FIRST_REPLICA,
            "_synchronization": VariableSynchronization.AUTO,
            "_trainable": False,
            "_where": "dx.Optimizer",
            "_shape": shape,
            "_dtype": np.dtype(dtype),
        }

        def make() -> Variable:
            placement = Served(self._link, specs=tuple(specs), name=name)
            return Variable.attach(self._strategy, placement, description)

        return named_objects.get_or_create(specs[0].uid, make)

    def _counter_variable(self) -> Variable:
        name = f"{self._name}/iterations"
        dtype = jax.dtypes.canonicalize_dtype(np.int64)
        spec = ParameterSpec(f"{self._uid}/iterations", name, (), dtype.name, self._servers[0])
        self._link.create(spec, np.zeros((), dtype))
        return self._attached([spec], name, (), dtype)

    def _register(self) -> None:
        import cloudpickle  # Comes with the extra that brings the servers.

        self._claim()
        pickled = cloudpickle.dumps(self._transformation)
        counter = self.counter.placement.specs[0]
        for server in self._servers:
            targets = tuple(part.spec.uid for part in self._parts if part.spec.server == server)
            own = counter.uid if counter.server == server else None
            slots = tuple(self._by_server[server])
            spec = OptimizerSpec(self._uid, pickled, targets, slots, own, self._rounds)
            self._link.client.register_optimizer(server, spec)

    def _claim(self) -> None:
        """Notes what the optimizer updates; raises if another process has begun otherwise."""
        names = [shipping_name(target) for target in self._targets]
        note = self._link.client.set_note(note_key(self._uid), json.dumps(names).encode())
        if json.loads(note) != names:
            raise ValueError(
                "dx.Optimizer: another worker has built it for other variables than "
                f"{[target.name for target in self._targets]}, which it is given here. Use one "
                "optimizer for each list of variables."
            )

    # Updating.

    def apply(self, grads: list[Any], extra_args: dict[str, Any]) -> None:
        """Sends the gradients to the servers: now, or when the compiled step has run."""
        frame = frames.current()
        if frame is not None:
            frame.function.deferred.add(self._link, self, (grads, extra_args))
        else:
            self._link.push(self.operations(jax.device_get((grads, extra_args))))

    def operations(self, arrays: Any) -> list[tuple[int, Op]]:
        """Returns what each server is to do with the gradients."""
        grads, extra_args = arrays
        for target, grad in zip(self._targets, grads, strict=True):
            if isinstance(grad, IndexedSlices):
                indices = np.asarray(grad.indices)
                check_ids("apply_gradients", target.shape, target.described, indices)
        pieces = [
            _gradient(piece)
            for target, grad in zip(self._targets, grads, strict=True)
            for piece in _pieces(target, grad)
        ]
        by_server: dict[int, list[Any]] = {server: [] for server in self._servers}
        for part, piece in zip(self._parts, pieces, strict=True):
            by_server[part.spec.server].append(piece)
        operations: list[tuple[int, Op]] = [
            (server, Apply(self._uid, tuple(gradients), dict(extra_args)))
            for server, gradients in by_server.items()
        ]
        counter = self.counter.placement.specs[0]
        if counter.server not in by_server:
            # It was made before the variables were known, and no update runs where it is.
            operations.append((counter.server, AssignAdd(counter.uid, np.ones((), counter.dtype))))
        return operations


def _pieces(target: Any, grad: Any) -> list[Any]:
    """Returns a gradient as one for each shard of its target."""
    if isinstance(target, Variable):
        return [grad]
    return [None] * len(target.variables) if grad is None else target.divide(grad)


def _gradient(piece: Any) -> Any:
    if not isinstance(piece, IndexedSlices):
        return piece
    return Rows(piece.indices, piece.values) if len(piece.indices) else None


def shards_of(target: Any) -> list[Variable]:
    """Returns the variables that a target consists of."""
    return [target] if isinstance(target, Variable) else list(target.variables)


def shipping_name(target: Any) -> list[str]:
    """Returns the names under which other processes know a target's variables."""
    return [variable.placement.specs[0].uid for variable in shards_of(target)]


def note_key(uid: str) -> str:
    """Returns where the servers keep which variables an optimizer updates."""
    return f"optimizer/{uid}"


def check_separable(transformation: Any, kinds: Sequence[tuple[int, Any]]) -> None:
    """Raises if updating variables apart differs from updating them together.

    It is tried with small arrays of the same ranks: several steps, gradients small and large, so
    that limits (clipping) come into play.
    """

    def tried() -> bool:
        rng = np.random.default_rng(0)
        shapes = [((2, 3, 2, 2, 2, 2)[:rank]) for rank, _ in kinds]
        params = [
            jnp.asarray(rng.normal(size=s), d) for s, (_, d) in zip(shapes, kinds, strict=True)
        ]
        together = transformation.init(params)
        apart = [transformation.init([param]) for param in params]
        for scale in (1e-3, 1.0, 1e3):
            grads = [
                jnp.asarray(rng.normal(size=s) * scale, d)
                for s, (_, d) in zip(shapes, kinds, strict=True)
            ]
            updates, together = transformation.update(grads, together, params)
            for index, update in enumerate(updates):
                own, apart[index] = transformation.update(
                    [grads[index]], apart[index], [params[index]]
                )
                if not np.allclose(update, own[0], rtol=1e-3, atol=1e-12):
                    return False
        return True

    if len(kinds) == 1:
        kinds = [*kinds, *kinds]
    if not jax_private.run_outside_trace(tried):
        raise ValueError(
            "dx.Optimizer: the transformation computes a variable's update from other variables' "
            "gradients (optax.clip_by_global_norm does), but the variables live on several "
            "servers, or in several shards, and each is updated where it lives. Do that part in "
            "the worker's function before apply_gradients, for example "
            "grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState()), "
            "or use one server."
        )
