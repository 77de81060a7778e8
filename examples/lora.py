"""Fine-tunes a frozen network with LoRA: two thin matrices for each dense layer.

    python examples/lora.py --devices 2 --steps 200

The recipe is that of the LoRA paper and Microsoft's loralib: the pretrained weights stay as they
are, `W x + B A x` replaces `W x`, A is random and B is zero at first, and only A, B and the new
last layer are trained. `optax.multi_transform` gives the frozen part no optimizer state at all.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

GLOBAL_BATCH, WIDTH, RANK = 64, 64, 4


class AdaptedLayer:
    """A dense layer that is frozen, with a low-rank correction that is trained."""

    def __init__(self, weights: np.ndarray, rng: np.random.Generator, name: str) -> None:
        rows, columns = weights.shape
        self.frozen = dx.Variable(weights, name=f"{name}/frozen")
        down = rng.normal(0, rows**-0.5, (rows, RANK)).astype(np.float32)
        self.down = dx.Variable(down, name=f"{name}/down")
        self.up = dx.Variable(jnp.zeros((RANK, columns)), name=f"{name}/up")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.frozen + x @ self.down @ self.up


class Model:
    """Two adapted layers of a pretrained network, and a new layer for the new task."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        pretrained = [rng.normal(0, size**-0.5, (size, WIDTH)) for size in (8, WIDTH)]
        self.layers = [
            AdaptedLayer(weights.astype(np.float32), rng, f"layer{index}")
            for index, weights in enumerate(pretrained)
        ]
        self.head = dx.Variable(jnp.zeros((WIDTH, 2)), name="head")

    @property
    def variables(self) -> list[Any]:
        parts = [[layer.frozen, layer.down, layer.up] for layer in self.layers]
        return [variable for part in parts for variable in part] + [self.head]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.tanh(layer(x))
        return x @ self.head


def train(strategy: dx.Strategy, steps: int) -> list[float]:
    """Fine-tunes the model and returns the loss of each step."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2_000, 8)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] ** 2 > 0.7).astype(np.int32)
    dataset = dx.data.Dataset.from_tensor_slices((x, y)).repeat().batch(GLOBAL_BATCH)

    with strategy.scope():
        model = Model()
        labels = ["frozen" if "frozen" in v.name else "trained" for v in model.variables]
        parts = {"frozen": optax.set_to_zero(), "trained": optax.adam(5e-3)}
        optimizer = dx.Optimizer(optax.multi_transform(parts, labels))
        optimizer.build(model.variables)
    before = [layer.frozen.numpy() for layer in model.layers]

    def replica_step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return dx.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)

        loss, gradients = dx.value_and_grad(loss_fn, model.variables)()
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        return loss

    @dx.function
    def train_step(batch: Any) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    losses = [float(train_step(next(batches))) for _ in range(steps)]

    same = all(
        np.array_equal(layer.frozen, b) for layer, b in zip(model.layers, before, strict=True)
    )
    sizes = [
        v.numpy().size
        for v, label in zip(model.variables, labels, strict=True)
        if label == "trained"
    ]
    total = sum(v.numpy().size for v in model.variables)
    print(f"frozen weights unchanged: {same}; {sum(sizes)} of {total} numbers are trained")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    losses = train(strategy, options.steps)
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")


if __name__ == "__main__":
    main()
