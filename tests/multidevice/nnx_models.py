"""Flax NNX models and plain training of them, which the tests of the integration compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import distribax as dx
from tests.multidevice.contract.cases import Case

_RANDOM = np.random.default_rng(0)
NUM_STEPS = 3
BATCH_SIZE = 12
INPUTS = _RANDOM.normal(size=(NUM_STEPS, BATCH_SIZE, 5)).astype(np.float32)
LABELS = _RANDOM.normal(size=(NUM_STEPS, BATCH_SIZE, 3)).astype(np.float32)

Step = Callable[..., Any]


class MLP(nnx.Module):
    """Two layers, and nothing that is random or depends on the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(5, 8, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


class Noisy(nnx.Module):
    """Batch normalisation and dropout, whose variables replicas write as they run."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # Without a bias, as batch normalisation takes its gradient away but for rounding.
        self.hidden = nnx.Linear(5, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        return self.out(self.dropout(nnx.tanh(self.norm(self.hidden(x)))))


def mean_loss(model: Any, x: Any, y: Any, size: int = BATCH_SIZE) -> jax.Array:
    """Returns the part of a mean loss that the examples of a batch of `size` contribute."""
    losses = jnp.sum((model(x) - y) ** 2, axis=-1)
    return dx.compute_average_loss(losses, global_batch_size=size)


def train(model: Any, optimizer: Any, x: Any, y: Any, size: int = BATCH_SIZE) -> jax.Array:
    """Takes one step, as a user of NNX writes it."""
    loss, grads = nnx.value_and_grad(lambda model: mean_loss(model, x, y, size))(model)
    optimizer.update(model, grads)
    return loss


def make(
    kind: type[Any] = MLP, transformation: optax.GradientTransformation | None = None
) -> tuple[Any, Any]:
    """Returns a model, always with the same parameters, and its optimizer."""
    model = kind(nnx.Rngs(0))
    return model, nnx.Optimizer(model, transformation or optax.sgd(0.1, 0.9), wrt=nnx.Param)


@cache
def trained(
    sizes: tuple[int, ...] = (BATCH_SIZE,) * NUM_STEPS,
    transformation: optax.GradientTransformation | None = None,
) -> tuple[Any, Any, list[float]]:
    """Returns the model, the optimizer and the losses of plain training, for all who compare."""
    model, optimizer = make(transformation=transformation)
    losses = [
        float(train(model, optimizer, INPUTS[i, :size], LABELS[i, :size], size))
        for i, size in enumerate(sizes)
    ]
    return model, optimizer, losses


def batches(case: Case) -> list[tuple[Any, Any]]:
    """Returns the batches of all steps, split over the replicas."""
    return [(case.split(x), case.split(y)) for x, y in zip(INPUTS, LABELS, strict=True)]


def numbers(*nodes: Any) -> list[Any]:
    """Returns the state of modules, and of optimizers, as nested dicts of arrays."""
    return [jax.tree.map(_plain, nnx.to_pure_dict(nnx.state(node))) for node in nodes]


def _plain(array: Any) -> Any:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array
