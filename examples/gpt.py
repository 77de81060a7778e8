"""Trains a small GPT on characters, and lets it write.

    python examples/gpt.py --devices 2 --steps 300

The model and the recipe are those of nanoGPT: token and position embeddings, blocks of causal
attention and a perceptron with a residual path each, layer normalization first, AdamW with warmup,
cosine decay and clipped gradients. The text is this file; name another one with --text. Training is
data parallel: every device has the whole model and a part of each batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import distribax as dx

GLOBAL_BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 16, 32, 64, 4, 2


class Block(nnx.Module):
    """Causal attention, then a perceptron, each added to what comes in."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, qkv_features=WIDTH, decode=False, rngs=rngs
        )
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(self.norm2(x))))


class GPT(nnx.Module):
    """Gives the logits of the next character at each position."""

    def __init__(self, vocabulary: int, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def train(strategy: dx.Strategy, steps: int, text: str | None = None) -> list[float]:
    """Trains a GPT on a text, prints what it writes, and returns the loss of each step."""
    text = text or Path(__file__).read_text()
    letters = sorted(set(text))
    codes = np.array([letters.index(letter) for letter in text], np.int32)

    def crop(start: np.int64) -> tuple[np.ndarray, np.ndarray]:
        """Returns a piece of the text, and the same piece one character later."""
        return codes[start : start + CONTEXT], codes[start + 1 : start + CONTEXT + 1]

    starts = dx.data.Dataset.range(len(codes) - CONTEXT - 1)
    dataset = starts.shuffle(len(codes), seed=0).map(crop).repeat().batch(GLOBAL_BATCH)

    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(20, steps), max(steps, 21))
    with strategy.scope():
        model = GPT(len(letters), nnx.Rngs(0))
        transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
        optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

    def replica_step(tokens: jax.Array, targets: jax.Array) -> jax.Array:
        def loss_fn(model: GPT) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
            return dx.compute_average_loss(losses.mean(axis=1), global_batch_size=GLOBAL_BATCH)

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    @dx.function
    def train_step(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    losses = [float(train_step(next(batches))) for _ in range(steps)]
    print("".join(letters[code] for code in write(model, codes[:CONTEXT], 60)))
    return losses


def write(model: GPT, prompt: np.ndarray, length: int) -> list[int]:
    """Returns the codes of the most likely continuation; outside of steps a model is plain NNX."""
    logits = nnx.jit(lambda model, tokens: model(tokens)[0, -1])
    codes = list(prompt)
    for _ in range(length):
        codes.append(int(np.argmax(logits(model, np.array([codes[-CONTEXT:]], np.int32)))))
    return codes[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    options = parser.parse_args()
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(options.devices)])
    losses = train(strategy, options.steps, options.text.read_text())
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")


if __name__ == "__main__":
    main()
