"""The state of an optax transformation as a list of slots, and the step that updates them.

The parameters of an optimizer are a list. A transformation keeps arrays for each of them (momentum)
and arrays that belong to none (a step count), in a tree of its own making; we keep each of these
arrays, a slot, as a variable of its own, beside the parameter that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax import jax_private

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class StateLayout:
    """How the slots make up a transformation's state.

    Attributes:
        structure: The tree whose leaves the slots are.
        owners: For each slot the index of the parameter that it belongs to; None if it belongs to
            the transformation as a whole.
        num_params: How many parameters there are.
        keys: The slots that are random keys. A variable holds the numbers that they are made of.
    """

    structure: jax.tree_util.PyTreeDef
    owners: tuple[int | None, ...]
    num_params: int
    keys: frozenset[int]

    @classmethod
    def describe(cls, state: optax.OptState, num_params: int) -> StateLayout:
        """Returns the layout of a state, whose leaves are arrays or their shapes and types.

        Args:
            state: What the transformation's `init` has returned for a list of parameters.
            num_params: How many parameters there are.

        Raises:
            ValueError: If the transformation cannot be used with a list of variables.
        """
        import optax  # Imported on use, as it makes `import distribax` slower.

        def is_lookahead(node: object) -> bool:
            return isinstance(node, optax.LookaheadState)

        if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
            raise ValueError(
                "dx.Optimizer: optax.lookahead keeps two sets of parameters, slow and fast, but a "
                "dx.Variable has one value. Use the fast optimizer alone, and keep the slow "
                "values in variables of your own: slow.assign_add(step_size * (fast - slow))."
            )
        leaves, structure = jax.tree.flatten(state)
        keys = frozenset(
            index
            for index, leaf in enumerate(leaves)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        )
        return cls(structure, find_owners(state, num_params), num_params, keys)

    def list_slots(self, parts: Sequence[int]) -> Iterator[tuple[int, int | None]]:
        """Yields the slots of a state for parts of the parameters.

        Args:
            parts: For each part the index of the parameter that it is a part of.

        Yields:
            For each leaf of that state the slot that it is a part of, and the number of the part
            that it belongs to; None if it belongs to none.
        """
        slots = jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        return _list_leaves(slots, self.num_params, parts)

    def flatten(self, state: optax.OptState) -> list[jax.Array]:
        """Returns the slots of a state, keys as the numbers that they are made of.

        Raises:
            ValueError: If the state has another structure than the first one.
        """
        leaves, structure = jax.tree.flatten(state)
        if structure != self.structure:
            raise ValueError(
                "dx.Optimizer: an update of the transformation has changed the structure of its "
                f"state, which was {self.structure}, to {structure}, but each array of it is kept "
                "in a variable. Leave out the part that does so (optax.monitor does)."
            )
        return [
            jax.random.key_data(leaf) if index in self.keys else leaf
            for index, leaf in enumerate(leaves)
        ]

    def unflatten(self, slots: Sequence[jax.Array]) -> optax.OptState:
        """Returns the state that the slots make up."""
        leaves = [
            jax.random.wrap_key_data(slot) if index in self.keys else slot
            for index, slot in enumerate(slots)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def init_state(
    transformation: optax.GradientTransformation, params: Sequence[np.ndarray]
) -> optax.OptState:
    """Returns the first state of a transformation, without compiling anything if it can.

    Args:
        transformation: The optax transformation.
        params: The values of the parameters.

    Returns:
        The state; nearly all of them begin with zeros.
    """
    program, form = jax.make_jaxpr(transformation.init, return_shape=True)(params)
    leaves = jax_private.compute_on_host(program, params)
    if leaves is not None:
        return jax.tree.unflatten(jax.tree.structure(form), leaves)
    # Compiling one program is faster than one for each operation and shape.
    return jax.jit(transformation.init)(params)


def find_owners(state: optax.OptState, num_params: int) -> tuple[int | None, ...]:
    """Returns for each leaf of a state the index of the parameter that it belongs to, or None.

    The parameters are given as a list, so a transformation that maps over them keeps a list of that
    length, whose items are arrays of any shape (`optax.adafactor`), several (`optax.sm3`) or none
    (`optax.masked`). Optax itself uses tuples and dictionaries for everything else.

    Args:
        state: What the transformation's `init` has returned for a list of parameters.
        num_params: How many parameters there are.

    Returns:
        An index or None for each of `jax.tree.leaves(state)`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = [jnp.ones((2, 3)), jnp.ones(3)]
        >>> find_owners(optax.trace(0.9).init(params), 2)
        (0, 1)
        >>> find_owners(optax.scale_by_sm3().init(params), 2)
        (0, 0, 1, 0, 1)
        >>> find_owners(optax.masked(optax.scale_by_adam(), [False, True]).init(params), 2)
        (None, 1, 1)
    """
    return tuple(owner for _, owner in _list_leaves(state, num_params, range(num_params)))


def _list_leaves(
    state: optax.OptState, num_params: int, parts: Sequence[int]
) -> Iterator[tuple[Any, int | None]]:
    """Yields the leaves of a state whose lists of parameters are replaced by lists of parts."""

    def is_per_param(node: object) -> bool:
        return type(node) is list and len(node) == num_params

    for node in jax.tree.leaves(state, is_leaf=is_per_param):
        if is_per_param(node):
            for number, param in enumerate(parts):
                for leaf in jax.tree.leaves(node[param]):
                    yield leaf, number
        else:
            yield node, None


def apply_transformation(
    transformation: optax.GradientTransformationExtraArgs,
    layout: StateLayout,
    grads: Sequence[jax.Array | None],
    slots: Sequence[jax.Array],
    params: Sequence[jax.Array],
    extra_args: Mapping[str, object],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the parameters and the slots after one update.

    A parameter without a gradient takes part as one whose gradient is zero, as a transformation
    may look at all of them; it and its slots keep their values.

    Args:
        transformation: The optax transformation.
        layout: The layout of its state.
        grads: The gradients, or None, in the order of the parameters.
        slots: The values of the slots.
        params: The values of the parameters.
        extra_args: What the transformation takes beside them.

    Raises:
        ValueError: If the updates do not fit the parameters, or the state changes its structure.
    """
    import optax  # Imported on use, as it makes `import distribax` slower.

    given = [
        jnp.zeros_like(param) if grad is None else grad
        for grad, param in zip(grads, params, strict=True)
    ]
    state = layout.unflatten(slots)
    updates, state = transformation.update(given, state, list(params), **extra_args)
    jax.tree.map(_check_update, list(params), updates)
    new_params = optax.apply_updates(list(params), updates)
    is_kept = [grad is None for grad in grads]
    return (
        [old if kept else new for kept, old, new in zip(is_kept, params, new_params, strict=True)],
        [
            old if owner is not None and is_kept[owner] else new
            for owner, old, new in zip(layout.owners, slots, layout.flatten(state), strict=True)
        ],
    )


def _check_update(param: jax.Array, update: jax.Array) -> None:
    if jnp.shape(param) != jnp.shape(update):
        raise ValueError(
            f"dx.Optimizer: the transformation makes an update of shape {jnp.shape(update)} for a "
            f"variable of shape {jnp.shape(param)}. Transformations that take one gradient per "
            "example (optax.contrib.dpsgd) cannot be used here: clip and sum those gradients in "
            "the replica's function, for example with optax.per_example_global_norm_clip."
        )


def accumulate(
    transformation: optax.GradientTransformation, num_steps: int
) -> optax.GradientTransformation:
    """Returns a transformation that applies the mean of so many calls' gradients at once.

    Raises:
        ValueError: If the number is less than 1.
    """
    if num_steps < 1:
        raise ValueError(
            f"dx.Optimizer: gradient_accumulation_steps={num_steps} is less than 1. Expected how "
            "many calls' gradients make one update."
        )
    if num_steps == 1:
        return transformation
    import optax  # Imported on use, as it makes `import distribax` slower.

    steps = optax.MultiSteps(transformation, every_k_schedule=num_steps)
    return steps.gradient_transformation()
