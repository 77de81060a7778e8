"""Waiting for values that devices are still computing."""

from __future__ import annotations

import jax

from distribax.values.leaves import is_wrapped


def group(*inputs: object, name: str | None = None) -> None:
    """Waits until all of `inputs` have been computed, as running `tf.group` does.

    Args:
        *inputs: Arrays, distributed values, variables, or nests of them.
        name: Accepted as in TensorFlow; it changes nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> import distribax as dx
        >>> dx.group(jnp.ones(3) + 1, [jnp.zeros(2)])
    """
    for leaf in jax.tree.leaves(inputs, is_leaf=is_wrapped):
        for value in leaf.values if is_wrapped(leaf) else (leaf,):
            jax.block_until_ready(value)
