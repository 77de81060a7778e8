"""Updates of variables that live in parameter servers: the gradients go there, and so do the slots.

An optax transformation keeps state: one array for each variable (a slot), and some that belong to
none (a step count). Here a slot lives beside its variable, each server has its own copy of the
rest, and a server runs the transformation over the variables that it has. That is the same as one
update of all variables only if the transformation treats each for itself, which is tried out first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax import jax_private
from distribax.execution import frames, named_objects
from distribax.parameter_server import (
    Apply,
    AssignAdd,
    OptimizerSpec,
    ParameterSpec,
    SparseGradient,
)
from distribax.parameter_server.placement import (
    ParameterSource,
    PushedUpdate,
    Served,
    ServerOp,
    get_spec,
)
from distribax.parameter_server.protocol.operations import Array, Gradient
from distribax.parameter_server.settings import RoundSettings
from distribax.training.gradient_pairs import Grad, Target
from distribax.training.optimizer_host import UpdateSettings
from distribax.types import VariableAggregation, VariableSynchronization
from distribax.values import IndexedSlices
from distribax.variables import ShardedVariable, Variable, VariableDescription
from distribax.variables.sharded.division import check_ids

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class _TargetPart:
    """A variable on one server: a target, or a shard of it."""

    target: int
    spec: ParameterSpec


class ServedUpdate(PushedUpdate):
    """How one optimizer updates one list of served variables.

    Args:
        settings: The optimizer and its variables.
        rounds: How gradients of several workers become one update.
    """

    def __init__(self, settings: UpdateSettings, rounds: RoundSettings) -> None:
        self._uid = settings.uid
        self._transformation = settings.transformation
        self._targets = list(settings.targets)
        self._layout = settings.layout
        self._name = settings.name
        self._strategy = self._targets[0].distribute_strategy
        source = self._targets[0].source
        assert isinstance(source, ParameterSource)
        self._source = source
        self._parts = [
            _TargetPart(index, get_spec(variable))
            for index, target in enumerate(self._targets)
            for variable in list_shards(target)
        ]
        # The places of each server's parts among them.
        self._places: dict[int, list[int]] = {}
        for place, part in enumerate(self._parts):
            self._places.setdefault(part.spec.server, []).append(place)
        self._servers = list(self._places)
        self._check_shapes(settings.state)
        if len(self._servers) > 1 or len(self._parts) > len(self._targets):
            check_separable(self._transformation, self._targets)
        counter = settings.counter
        self.counter = self._create_counter() if counter is None else counter
        self.slots = [
            self._attach_slot(index, owner, leaf)
            for index, (owner, leaf) in enumerate(
                zip(self._layout.owners, settings.state, strict=True)
            )
        ]
        self._rounds = rounds
        self._register()
        self._source.registrations.append(self._register)

    def _check_shapes(self, state: Sequence[jax.ShapeDtypeStruct]) -> None:
        for owner, leaf in zip(self._layout.owners, state, strict=True):
            if owner is None or len(list_shards(self._targets[owner])) == 1:
                continue
            if tuple(leaf.shape) != tuple(self._targets[owner].shape):
                raise ValueError(
                    f"dx.Optimizer: the transformation keeps state of shape {tuple(leaf.shape)} "
                    f"for {self._targets[owner].described}, which cannot be divided like its "
                    "shards. Create the variable without variable_partitioner, or use a "
                    "transformation whose state has the variable's shape (optax.adam, ...)."
                )

    # State.

    def _make_slot_uid(self, index: int, place: _TargetPart | int) -> str:
        """Returns the name of a slot beside a part, or of a server's copy of one of no target."""
        return f"{self._uid}/{index}" + (
            f"@{place}" if isinstance(place, int) else f"/{place.spec.uid}"
        )

    def _attach_slot(self, index: int, owner: int | None, leaf: jax.ShapeDtypeStruct) -> Target:
        """Returns the variable for one leaf of the state."""
        dtype = np.dtype(leaf.dtype).name
        label = "" if owner is None else f"{self._targets[owner].name.removesuffix(':0')}/"
        name = f"{self._name}/{label}slot_{index}"
        if owner is None:
            specs = [
                ParameterSpec(
                    self._make_slot_uid(index, server), name, tuple(leaf.shape), dtype, server
                )
                for server in self._servers
            ]
            return self._attach(specs)
        target = self._targets[owner]
        whole = len(list_shards(target)) == 1
        shards = []
        for part in self._parts:
            if part.target == owner:
                shape = tuple(leaf.shape) if whole else part.spec.shape
                uid = self._make_slot_uid(index, part)
                spec = ParameterSpec(uid, name, shape, dtype, part.spec.server)
                shards.append(self._attach([spec]))
        if whole:
            return shards[0]
        assert isinstance(target, ShardedVariable)
        return target.like(shards, name)

    def _attach(self, specs: list[ParameterSpec]) -> Variable:
        """Returns the variable of these copies: always the same object in this process."""
        spec = specs[0]
        description = VariableDescription(
            spec.name,
            VariableAggregation.ONLY_FIRST_REPLICA,
            VariableSynchronization.AUTO,
            trainable=False,
            where="dx.Optimizer",
            shape=spec.shape,
            dtype=np.dtype(spec.dtype),
        )

        def make() -> Variable:
            placement = Served(self._source, specs=tuple(specs), name=spec.name)
            return Variable.attach(self._strategy, placement, description)

        return named_objects.get_or_create(spec.uid, make)

    def _create_counter(self) -> Variable:
        name = f"{self._name}/iterations"
        dtype = jax.dtypes.canonicalize_dtype(np.int64)
        spec = ParameterSpec(f"{self._uid}/iterations", name, (), dtype.name, self._servers[0])
        self._source.create(spec, np.zeros((), dtype))
        return self._attach([spec])

    def _register(self) -> None:
        import cloudpickle  # Comes with the extra that brings the servers.

        self._claim()
        pickled = cloudpickle.dumps(self._transformation)
        counter, rounds = get_spec(self.counter), self._rounds
        for server, places in self._places.items():
            parts = [self._parts[place] for place in places]
            targets = tuple(part.spec.uid for part in parts)
            own = counter.uid if counter.server == server else None
            slots = tuple(
                self._make_slot_uid(index, server if number is None else parts[number])
                for index, number in self._layout.list_slots([part.target for part in parts])
            )
            spec = OptimizerSpec(
                self._uid, pickled, targets, slots, own, rounds.num_shares, rounds.timeout
            )
            self._source.client.register_optimizer(server, spec)

    def _claim(self) -> None:
        """Notes what the optimizer updates; raises if another process has begun otherwise."""
        names = [list_uids(target) for target in self._targets]
        note = self._source.client.set_note(make_note_key(self._uid), json.dumps(names).encode())
        if json.loads(note) != names:
            raise ValueError(
                "dx.Optimizer: another worker has built it for other variables than "
                f"{[target.name for target in self._targets]}, which it is given here. Use one "
                "optimizer for each list of variables."
            )

    # Updating.

    def apply(self, grads: Sequence[Grad | None], extra_args: Mapping[str, jax.Array]) -> None:
        """Sends the gradients to the servers: now, or when the compiled step has run."""
        frame = frames.current()
        if frame is not None:
            frame.function.deferred.add(self._source, self, (grads, extra_args))
        else:
            self._source.push(self.make_operations(jax.device_get((grads, extra_args))))

    @override
    def make_operations(
        self, arrays: tuple[Sequence[Grad | None], Mapping[str, Array]]
    ) -> list[ServerOp]:
        """Returns what each server is to do with the gradients, and with the extra arguments."""
        grads, extra_args = arrays
        pieces: list[Gradient] = []
        for target, grad in zip(self._targets, grads, strict=True):
            if isinstance(target, Variable) and not isinstance(grad, IndexedSlices):
                pieces.append(grad)
            else:
                pieces += _divide(target, grad)
        operations: list[ServerOp] = [
            (server, Apply(self._uid, tuple([pieces[place] for place in places]), extra_args))
            for server, places in self._places.items()
        ]
        counter = get_spec(self.counter)
        if counter.server not in self._places:
            # It was made before the variables were known, and no update runs where it is.
            operations.append((counter.server, AssignAdd(counter.uid, np.ones((), counter.dtype))))
        return operations


def _divide(target: Target, grad: Grad | None) -> list[Gradient]:
    """Returns a gradient as one for each shard of its target."""
    if isinstance(grad, IndexedSlices):
        indices = np.asarray(grad.indices)
        check_ids("apply_gradients", target.shape, target.described, indices)
    if isinstance(target, Variable):
        return [_encode_gradient(grad)]
    if grad is None:
        return [None] * len(target.variables)
    return [_encode_gradient(piece) for piece in target.divide(cast("jax.Array", grad))]


def _encode_gradient(piece: Grad | None) -> Gradient:
    if not isinstance(piece, IndexedSlices):
        return piece
    return SparseGradient(piece.indices, piece.values) if len(piece.indices) else None


def list_shards(target: Target) -> list[Variable]:
    """Returns the variables that a target consists of."""
    return [target] if isinstance(target, Variable) else list(target.variables)


def list_uids(target: Target) -> list[str]:
    """Returns the names under which other processes know a target's variables."""
    return [get_spec(variable).uid for variable in list_shards(target)]


def make_note_key(uid: str) -> str:
    """Returns where the servers keep which variables an optimizer updates."""
    return f"optimizer/{uid}"


def check_separable(
    transformation: optax.GradientTransformationExtraArgs, targets: Sequence[Target]
) -> None:
    """Raises if updating variables and shards apart differs from updating them together.

    It is tried with small arrays of the same ranks: several steps, gradients small and large, so
    that limits (clipping) come into play.

    Raises:
        ValueError: If it differs, or if the transformation cannot be run for one variable alone.
    """
    try:
        is_separable = jax_private.run_outside_trace(lambda: _try_apart(transformation, targets))
    except Exception as error:
        raise ValueError(
            "dx.Optimizer: the variables live on several servers, or in several shards, and each "
            "is updated where it lives, but the transformation cannot be run for one of them "
            f"alone: {error} Masks and labels have to be functions of the list of parameters, "
            "such as optax.masked(inner, lambda params: jax.tree.map(lambda p: p.ndim > 1, "
            "params)), and no other argument may be required. Or use one server."
        ) from error
    if not is_separable:
        raise ValueError(
            "dx.Optimizer: the transformation computes an update from more than the array that it "
            "is for (optax.clip_by_global_norm from all gradients, optax.lamb from all rows of a "
            "variable), but the variables live on several servers, or in several shards, and each "
            "is updated where it lives. Do that part in the worker's function before "
            "apply_gradients, for example "
            "grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState()), "
            "create the variables without variable_partitioner, or use one server."
        )


def _try_apart(
    transformation: optax.GradientTransformationExtraArgs, targets: Sequence[Target]
) -> bool:
    """Tells whether small arrays like the targets are updated alike together and in pieces."""
    rng = np.random.default_rng(0)
    shapes = [(4, 3, 2, 2, 2, 2)[: len(target.shape)] for target in targets]

    def draw(scale: float) -> list[jax.Array]:
        return [
            jnp.asarray(rng.normal(size=shape) * scale, target.dtype)
            for shape, target in zip(shapes, targets, strict=True)
        ]

    def divide(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            piece
            for array, target in zip(arrays, targets, strict=True)
            for piece in ([array] if len(list_shards(target)) == 1 else jnp.split(array, 2))
        ]

    params = draw(1.0)
    together = transformation.init(params)
    pieces = divide(params)
    apart = [transformation.init([piece]) for piece in pieces]
    for scale in (1e-3, 1.0, 1e3):
        grads = draw(scale)
        updates, together = transformation.update(grads, together, params)
        for index, (grad, update) in enumerate(zip(divide(grads), divide(updates), strict=True)):
            [own], apart[index] = transformation.update([grad], apart[index], [pieces[index]])
            if not np.allclose(update, own, rtol=1e-3, atol=1e-12):
                return False
    return True
