"""Classifies sentences by the words and pairs of words in them.

    python examples/text_classifier.py --devices 2 --steps 200

The model and the recipe are those of fastText: words and bigrams are hashed into a table of
vectors, a sentence is the mean of its vectors, a linear layer follows. The sentences are made up:
weather or cooking. Sentences differ in length; they are padded, and the padding is left out of the
mean.
"""

from __future__ import annotations

import argparse
import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

GLOBAL_BATCH, BUCKETS, WIDTH = 32, 512, 16
WORDS = (
    ["rain", "cloud", "wind", "storm", "sun", "cold", "warm", "north", "snow", "sky"],
    ["bread", "salt", "oven", "soup", "warm", "butter", "cold", "pan", "onion", "stir"],
)
COMMON = ["the", "a", "very", "some", "more", "with", "and", "then", "again"]


def make_sentences(count: int) -> tuple[list[str], np.ndarray]:
    """Returns sentences about the weather (0) or cooking (1), and what they are about."""
    rng = np.random.default_rng(0)
    topics = rng.integers(0, 2, count).astype(np.int32)
    sentences = []
    for topic in topics:
        length = rng.integers(3, 12)
        mixed = np.where(rng.random(length) < 0.4, rng.choice(WORDS[topic], length), "")
        sentences.append(" ".join(word or rng.choice(COMMON) for word in mixed))
    return sentences, topics


def encode(sentence: str) -> np.ndarray:
    """Returns the buckets of the words and bigrams of a sentence; 0 is for padding."""
    words = sentence.split()
    features = words + [f"{first} {second}" for first, second in itertools.pairwise(words)]
    codes = [1 + zlib.crc32(feature.encode()) % (BUCKETS - 1) for feature in features]
    return np.array(codes, np.int32)


def train(strategy: dx.Strategy, steps: int) -> list[float]:
    """Trains a classifier and returns the loss of each step."""
    sentences, topics = make_sentences(2_000)
    encoded = [encode(sentence) for sentence in sentences]
    dataset = dx.data.Dataset.from_generator(
        lambda: zip(encoded, topics, strict=True),
        output_signature=(
            dx.data.TensorSpec([None], np.int32),
            dx.data.TensorSpec([], np.int32),
        ),
    )
    dataset = dataset.repeat().padded_batch(GLOBAL_BATCH, padded_shapes=([24], []))

    rng = np.random.default_rng(1)
    with strategy.scope():
        table = dx.Variable(rng.normal(0, 0.1, (BUCKETS, WIDTH)).astype(np.float32), name="table")
        kernel = dx.Variable(jnp.zeros((WIDTH, 2)), name="kernel")
        optimizer = dx.Optimizer(optax.adam(0.02))
        accuracy = dx.metrics.SparseCategoricalAccuracy()

    def replica_step(codes: jax.Array, topics: jax.Array) -> jax.Array:
        def loss_fn() -> Any:
            present = (codes > 0)[..., None]
            vectors = jnp.sum(dx.embedding_lookup(table, codes) * present, axis=1)
            logits = vectors / jnp.sum(present, axis=1) @ kernel
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, topics)
            return dx.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH), logits

        (loss, logits), gradients = dx.value_and_grad(loss_fn, [table, kernel], has_aux=True)()
        optimizer.apply_gradients(zip(gradients, [table, kernel], strict=True))
        accuracy.update_state(topics, logits)
        return loss

    @dx.function
    def train_step(batch: Any) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    losses = [float(train_step(next(batches))) for _ in range(steps)]
    print(f"accuracy while training: {float(accuracy.result()):.3f}")
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
