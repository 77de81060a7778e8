"""Foreign variables: variables of other libraries whose values strategies place.

Outside of steps they give plain arrays of one device, as the library expects them; in between
the value is wherever the strategy's steps want it, and it is moved only when somebody else asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.execution import frames
from distribax.topology import launch_lock
from distribax.types import VariableAggregation, VariableSynchronization

Arrays: TypeAlias = "jax.Array | object"
"""An array, or a nest of arrays as a library keeps them in one variable."""


@dataclass(frozen=True)
class Rule:
    """How replicas share a variable: how their values become one, and what each of them sees.

    MEAN is for numbers that have one, others are taken from the first replica; NONE is for values
    that are the same in every replica because of how they are computed.
    `view` makes a replica's own value out of the shared one and the replica's id.
    """

    aggregation: VariableAggregation
    view: Callable[[Any, int | jax.Array], Any] | None = None


def _take_own_part(value: Arrays, replica_id: int | jax.Array) -> Any:
    """Returns a replica's part of a sum: the first one continues from what there is."""
    return jax.tree.map(lambda x: jnp.where(replica_id == 0, x, jnp.zeros_like(x)), value)


SUM: Final = Rule(VariableAggregation.SUM, _take_own_part)
"""For variables in which the replicas add up what they see."""


class ForeignVariable:
    """A variable of another library; the value is an array, or a nest of arrays."""

    def __init__(self, name: str, rule: Rule, value: Arrays) -> None:
        self.name = name
        self.rule = rule
        # The strategy whose steps have used the variable last.
        self.owner: contracts.Strategy | None = None
        self._value: Any = value
        # None as long as the value is as the library's own code has set it.
        self._placement: contracts.Placement | None = None
        # Whether somebody outside may hold the arrays, so that they must not be overwritten.
        self._shared = True
        self._host: Any = None
        # Whether the workers have been given one value to begin with.
        self._is_agreed = False
        self._handles: dict[Any, Handle] = {}

    def read(self) -> Any:
        """Returns the value as code outside of steps sees it."""
        if self._placement is None:
            return self._value
        if self._host is None:
            self._host = self.get_piece(0)
        return self._host

    def get_types(self) -> Any:
        """Returns the types of the arrays, which are the same wherever they are placed."""
        return jax.tree.map(jax_private.get_array_type, self._value)

    def write(self, value: Arrays) -> None:
        """Replaces the value by one that code outside of steps has set, in any form."""
        self._value, self._placement, self._shared, self._host = value, None, True, None

    def get_piece(self, index: int) -> Any:
        """Returns the copy of the device with this index, or the only one there is."""
        placement = self._placement
        assert placement is not None
        local = index if len(placement.devices) > 1 else 0
        # A program that another thread starts either copies the arrays or has replaced them.
        with launch_lock:
            self._shared = True
            return _map_arrays(lambda array: placement.split(array)[local], self._value)

    def keep_pieces(self, pieces: list[Arrays], placement: contracts.Placement) -> None:
        """Replaces the value by copies that are on their devices already."""
        flat = [jax.tree.leaves(piece) for piece in pieces]
        tree = jax.tree.structure(pieces[0])
        joined = [_join(copies, placement) for copies in zip(*flat, strict=True)]
        self.write(jax.tree.unflatten(tree, joined))
        self._placement = placement

    def keep(self, value: Arrays, placement: contracts.Placement) -> None:
        """Replaces the value by what a compiled program has returned."""
        self._value, self._placement, self._shared, self._host = value, placement, False, None

    def place(self, placement: contracts.Placement) -> Any:
        """Returns the value as `placement` stores it, after moving it there if need be."""
        if self._placement is not placement:
            host = self.read()
            store = placement.store
            if not self._is_agreed and placement.spans_processes:
                # As for `dx.Variable`: all workers begin with the value of the first one.
                store, self._is_agreed = placement.store_initial, True
            # A trace may be under way, which must not see the move.
            self._value = jax_private.run_outside_trace(lambda: _store(host, store))
            self._placement, self._shared, self._host = placement, True, None
        return self._value

    def take(self, placement: contracts.Placement) -> Any:
        """Returns the placed value as one that may be overwritten."""
        value = self.place(placement)
        if self._shared:
            self._value = value = _map_arrays(jax_private.copy_array, value)
            self._shared, self._host = False, None
        return value

    def find_handle(self, strategy: contracts.Strategy) -> Handle:
        """Returns what the engine takes for a variable of `strategy`."""
        handle = self._handles.get(strategy)
        if handle is None:
            placement = strategy.extended.variable_placement(
                VariableSynchronization.AUTO, self.name
            )
            handle = self._handles[strategy] = Handle(self, strategy, placement)
        return handle

    def find_handle_in(
        self, frame: frames.Frame, strategy: contracts.Strategy | None = None
    ) -> Handle:
        """Returns the one handle that stands for this variable while a function is traced.

        A `strategy` that runs replicas takes the variable over from code outside of replicas.
        """
        function = frame.function
        used = next((h for h in self._handles.values() if h in function.touched), None)
        if strategy is None:
            return used or self.find_handle(self.owner or context.get_strategy())
        self.owner = strategy
        handle = self.find_handle(strategy)
        if used is not None and used is not handle:
            function.rename(used, handle)
        return handle

    @override
    def __repr__(self) -> str:
        return f"<ForeignVariable {self.name}>"


@dataclass(eq=False)
class Handle:
    """A foreign variable under one strategy, which is what compiled programs take and return."""

    per_replica = False
    source = None

    variable: ForeignVariable
    strategy: contracts.Strategy
    placement: contracts.Placement

    @property
    def described(self) -> str:
        """The variable as error messages name it."""
        return self.variable.name

    @property
    def program_sharding(self) -> Any:
        """The sharding of the value inside a compiled program, or None."""
        return self.placement.sharding

    def program_type(self) -> Any:
        """Returns the type of the value that a compiled program reads."""
        return self.variable.get_types()

    def program_value(self) -> Any:
        """Returns the value that a compiled program reads."""
        return _map_arrays(self.placement.to_program, self.variable.place(self.placement))

    def take_program_value(self) -> Any:
        """Returns a value that a compiled program may overwrite."""
        return _map_arrays(self.placement.to_program, self.variable.take(self.placement))

    def store_program_value(self, value: Arrays) -> None:
        """Keeps what a compiled program has returned."""
        self.variable.keep(_map_arrays(self.placement.from_program, value), self.placement)


def refuse_replacement(new: object) -> None:
    """Stands in for what puts another variable in the place of one that a checkpoint restores."""
    raise AssertionError("variables are changed, not replaced")


def _map_arrays(fn: Callable[[jax.Array], jax.Array], value: Any) -> Any:
    """Applies `fn`, which moves arrays, to every array of `value`."""
    if jax_private.is_concrete_array(value):
        return fn(value)
    return jax.tree.map(lambda leaf: _move(fn, leaf), value)


def _move(fn: Callable[[jax.Array], jax.Array], leaf: jax.Array) -> jax.Array:
    return jax_private.apply_to_key_data(fn, leaf) if jax_private.is_key(leaf) else fn(leaf)


def _store(value: Arrays, store: Callable[[jax.Array], jax.Array]) -> Any:
    arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), value)
    return _map_arrays(store, arrays)


def _join(copies: tuple[jax.Array, ...], placement: contracts.Placement) -> jax.Array:
    if not jax_private.is_key(copies[0]):
        return placement.join(copies, copies[0])
    data = [jax.random.key_data(copy) for copy in copies]
    return jax.random.wrap_key_data(
        placement.join(data, data[0]), impl=jax.random.key_impl(copies[0])
    )
