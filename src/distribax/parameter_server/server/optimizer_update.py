"""An optimizer's update as compiled programs: whole parameters, or only the rows that are touched.

For a sparse gradient, the touched rows of the parameter and of those slots that have its form are
gathered, the transformation runs on them as if they were the parameter, and they are written back.
Their number is padded to a power of two, so that few programs are compiled and a step's time does
not depend on the size of the table.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from distribax import jax_private
from distribax.parameter_server.protocol.operations import Array, Gradient, SparseGradient
from distribax.parameter_server.protocol.parameter_spec import OptimizerSpec
from distribax.parameter_server.server.sparse import RowSet, gather_rows, pad_rows, sum_rows
from distribax.parameter_server.server.stored_parameter import Change, ParameterForm
from distribax.training.optimizer_state import StateLayout, apply_transformation

_NO_CHANGE: Final = contextlib.nullcontext()


class ReadableValues(Protocol):
    """The values that an update works on, by uid."""

    def read(self, uid: str) -> Array | jax.Array:
        """Returns a value as it is kept, a NumPy or a JAX array."""
        ...

    def consume(self, uid: str) -> Array | jax.Array:
        """Like `read`, for a program that may overwrite the value if it is a JAX array."""
        ...

    def read_host(self, uid: str) -> Array:
        """Returns a value as a NumPy array."""
        ...


@dataclass(frozen=True)
class _CompiledUpdate:
    """The compiled update for gradients of some of the targets.

    Attributes:
        call: The program; it returns new values of `moving` and of `changing`.
        moving: The targets that have a gradient.
        resting: The others.
        changing: The slots that get new values.
    """

    call: Callable[..., tuple[list[jax.Array], list[jax.Array]]]
    moving: list[int]
    resting: list[int]
    changing: list[int]


class Update:
    """The update of one optimizer; it reads values, and returns what is to be written."""

    def __init__(self, spec: OptimizerSpec, targets: Sequence[ParameterForm]) -> None:
        self.spec = spec
        self.targets = tuple(targets)
        loaded = pickle.loads(spec.transformation)
        self._transformation = optax.with_extra_args_support(loaded)
        self._is_foreign = jax.default_backend() != "cpu"
        self._wide = any(np.dtype(form.dtype).itemsize > 4 for form in targets)
        with self._enter_settings():
            state = jax.eval_shape(
                self._transformation.init,
                [jax.ShapeDtypeStruct(form.shape, form.dtype) for form in targets],
            )
        self._layout = StateLayout.describe(state, len(targets))
        self._owners = self._layout.owners
        self.slots = tuple(self._describe_slot(*pair) for pair in enumerate(jax.tree.leaves(state)))
        self.slot_uids = frozenset(spec.slots)
        self._programs: dict[tuple[bool, ...], _CompiledUpdate] = {}

    def _describe_slot(self, number: int, leaf: jax.ShapeDtypeStruct) -> ParameterForm:
        owner = self._owners[number]
        of = self.spec.uid if owner is None else self.targets[owner].name
        return ParameterForm(f"{of}/slot_{number}", tuple(leaf.shape), np.dtype(leaf.dtype).name)

    def check_slots(self, known: Mapping[str, ParameterForm]) -> None:
        """Raises a ValueError if the slots are not one for each leaf of the state, and alike.

        `known` are those that exist already.
        """
        expected = [(form.shape, form.dtype) for form in self.slots]
        given = [
            (known[uid].shape, known[uid].dtype) if uid in known else None
            for uid in self.spec.slots
        ]
        fits = len(given) == len(expected) and all(
            own in (None, form) for own, form in zip(given, expected, strict=True)
        )
        if not fits:
            raise ValueError(
                f"slots of optimizer {self.spec.uid!r}: there are {len(given)} of the forms "
                f"{given}, but the transformation's state has {len(expected)} leaves: {expected}. "
                "Name one slot for each leaf of jax.tree.leaves(transformation.init([value of "
                "each target])); those that do not exist are created here."
            )

    def make_initial_state(self, values: Sequence[Array]) -> list[Array]:
        """Returns the leaves of the state for these values of the targets."""
        with self._enter_settings():
            state = jax.jit(self._transformation.init)(list(values))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    def _enter_settings(self) -> contextlib.AbstractContextManager[object]:
        """Has JAX compute on the CPU, and with 64 bits if a parameter has them.

        Workers may have chosen 64 bits; the server's own setting does not matter.
        """
        # A server's process usually is as it has to be; a change costs as much as a small update.
        elsewhere = self._is_foreign or jax_private.get_default_device() is not None
        if not elsewhere and jax_private.has_64_bits() == self._wide:
            return _NO_CHANGE
        stack = contextlib.ExitStack()
        if elsewhere:
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.enable_x64(self._wide))
        return stack

    def __call__(
        self, store: ReadableValues, gradients: Sequence[Gradient], extra_args: Mapping[str, object]
    ) -> dict[str, Change]:
        """Returns the changes by uid."""
        # Of targets with a sparse gradient, and of their slots, only the rows that it touches take
        # part.
        touched = {
            number: sum_rows(gradient.indices, gradient.rows)
            for number, gradient in enumerate(gradients)
            if isinstance(gradient, SparseGradient)
        }
        of_slots = self._find_slot_rows(touched) if touched else {}

        def gather(uid: str, of: RowSet) -> Array:
            return gather_rows(store.read_host(uid), of.indices)

        targets, slots = self.spec.targets, self.spec.slots
        program = self._get_program(tuple([gradient is not None for gradient in gradients]))
        own = [
            gather(targets[i], touched[i]) if i in touched else store.consume(targets[i])
            for i in program.moving
        ]
        resting = [store.read(targets[i]) for i in program.resting]
        state = [
            gather(uid, of_slots[i]) if i in of_slots else store.read(uid)
            for i, uid in enumerate(slots)
        ]
        dense = [
            pad_rows(touched[i].rows) if i in touched else gradient
            for i, gradient in enumerate(gradients)
        ]
        with self._enter_settings():
            new, new_state = program.call(own, resting, state, dense, dict(extra_args))
            for array in (*new, *new_state):
                array.block_until_ready()
        changes: dict[str, Change] = {}
        for i, value in zip(program.moving, new, strict=True):
            changes[targets[i]] = _keep_rows(value, touched[i]) if i in touched else value
        for i, value in zip(program.changing, new_state, strict=True):
            changes[slots[i]] = _keep_rows(value, of_slots[i]) if i in of_slots else value
        return changes

    def _get_program(self, active: tuple[bool, ...]) -> _CompiledUpdate:
        """Returns the program for gradients of these targets."""
        program = self._programs.get(active)
        if program is None:
            owners = enumerate(self._owners)
            program = _CompiledUpdate(
                # What it updates it overwrites; see `StoredParameter`.
                jax.jit(functools.partial(self._run, active), donate_argnums=0),
                moving=[i for i, moves in enumerate(active) if moves],
                resting=[i for i, moves in enumerate(active) if not moves],
                changing=[i for i, owner in owners if owner is None or active[owner]],
            )
            self._programs[active] = program
        return program

    def check_rows(self, target: int) -> None:
        """Raises a ValueError if the target's slots cannot be updated by rows."""
        form = self.targets[target]
        for number, owner in enumerate(self._owners):
            slot = self.slots[number]
            if owner == target and slot.shape not in ((), form.shape):
                raise ValueError(
                    f"Parameter {form.name!r} of shape {form.shape} has a slot of shape "
                    f"{slot.shape}: its rows cannot be updated alone. Use an optimizer whose "
                    "slots have the parameter's shape, or a dense gradient."
                )

    def _find_slot_rows(self, touched: Mapping[int, RowSet]) -> dict[int, RowSet]:
        """Returns which rows of slots, by number, go with the touched rows of the targets."""
        return {
            number: touched[owner]
            for number, owner in enumerate(self._owners)
            if owner is not None
            and owner in touched
            and self.slots[number].shape == self.targets[owner].shape
        }

    def _run(
        self,
        active: tuple[bool, ...],
        own: list[jax.Array],
        resting: list[jax.Array],
        leaves: list[jax.Array],
        gradients: list[jax.Array | None],
        extra_args: dict[str, object],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        program = self._get_program(active)
        kinds = {True: iter(own), False: iter(resting)}
        values = [next(kinds[moves]) for moves in active]
        cast = [
            None if gradient is None else gradient.astype(value.dtype)
            for value, gradient in zip(values, gradients, strict=True)
        ]
        values, new_leaves = apply_transformation(
            self._transformation, self._layout, cast, leaves, values, extra_args
        )
        return (
            [values[i] for i in program.moving],
            # Copied, as JAX hands out an input as it is, and the memory of ours is used again.
            [jnp.copy(new_leaves[i].astype(leaves[i].dtype)) for i in program.changing],
        )


def _keep_rows(value: jax.Array, touched: RowSet) -> RowSet:
    return RowSet(touched.indices, np.asarray(value)[: len(touched.indices)])
