"""Pieces of different sizes, as of a last batch: compiled like others, and exact.

An empty piece counts for nothing: what its replica computes does not spoil what the others do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close

X = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
"""Seven examples: of 2, 3 and 4 replicas, the last one has fewer than the others."""
FEW = X[:4]
"""Four examples: the last of 3 replicas has none."""
ONE = X[:1]


def _pieces(case: Case, batch: np.ndarray) -> list[np.ndarray]:
    size = -(-len(batch) // case.num_replicas)
    return [batch[index * size : (index + 1) * size] for index in range(case.num_replicas)]


@pytest.mark.parametrize("batch", [X, FEW], ids=["uneven", "empty"])
def test_a_step_does_with_uneven_pieces_what_it_does_with_even_ones(
    several: Case, batch: np.ndarray
) -> None:
    strategy = several.strategy
    w = several.variable(jnp.ones(3))
    seen = several.variable(0.0, aggregation="SUM")
    largest = several.variable(0.0, synchronization="ON_READ", aggregation="SUM")
    with strategy.scope():
        optimizer = dx.Optimizer(optax.sgd(0.1))
        mean = dx.metrics.Mean()

    def merge(strategy: Any, rows: Any, total: Any) -> Any:
        joined = strategy.gather(rows, axis=0)
        return strategy.reduce("MEAN", rows, axis=0), strategy.reduce("SUM", total), joined

    def replica_step(x: Any) -> Any:
        context = dx.get_replica_context()

        def loss_of() -> Any:
            return dx.compute_average_loss((x @ w) ** 2, global_batch_size=len(batch))

        loss, grads = dx.value_and_grad(loss_of, [w])()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        rows = jnp.tanh(x).sum(axis=1)
        seen.assign_add(jnp.asarray(x.shape[0], jnp.float32))
        largest.assign_add(jnp.sum(rows))
        mean.update_state(rows)
        merged = context.merge_call(merge, args=(rows, rows.sum()))
        everyone = context.all_gather(rows, axis=0)
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), x.shape[0]), x.shape)
        return loss, rows, x.shape[0], merged, everyone, noise

    @several.step
    def step(x: Any) -> Any:
        loss, rows, size, merged, everyone, noise = strategy.run(replica_step, args=(x,))
        again = strategy.run(lambda rows, loss: rows * 2 + loss, args=(rows, loss))
        found = [
            strategy.reduce("SUM", loss, axis=None),
            strategy.reduce("MEAN", rows, axis=0),
            strategy.gather(rows, axis=0),
            strategy.reduce("SUM", again, axis=0),
        ]
        return found, rows, size, merged, everyone, noise

    rows = np.tanh(batch).sum(axis=1)
    weights = np.ones(3, np.float32)
    pieces = _pieces(several, rows)
    for count in range(1, 3):
        errors = batch @ weights
        losses = [(np.sum((piece @ weights) ** 2)) for piece in _pieces(several, batch)]
        found, own, size, merged, everyone, noise = step(several.split(batch))
        weights = weights - 0.1 * 2 * (batch.T @ errors) / len(batch)
        close(found[:3], [np.mean(errors**2), rows.mean(), rows], 1e-5)
        extra = sum(p.size * loss for p, loss in zip(pieces, losses, strict=True)) / len(batch)
        close(found[3], 2 * rows.sum() + extra, 1e-4)
        close([w.numpy(), mean.result()], [weights, rows.mean()], 1e-5)
        close([seen.read_value(), largest.read_value()], [len(rows) * count, rows.sum() * count])
        for part, expected in zip(several.parts(own), pieces, strict=True):
            close(part, expected, 1e-5)
        assert several.numbers(size) == [len(piece) for piece in pieces]
        close([merged[0], merged[1]], [rows.mean(), rows.sum()], 1e-5)
        close([merged[2], everyone], [rows, rows], 1e-5)
        for part, piece in zip(several.parts(noise), _pieces(several, batch), strict=True):
            key = jax.random.fold_in(jax.random.key(0), len(piece))
            close(part, jax.random.normal(key, piece.shape), 1e-5)
        # What a function returns enters the next one.
        close(strategy.gather(own, axis=0), rows, 1e-5)
        doubled = several.run(lambda x: x * 2, own)
        close(strategy.reduce("MEAN", doubled, axis=0), 2 * rows.mean(), 1e-5)
    if several.compiled:
        assert step.trace_count == 1  # type: ignore[attr-defined]


def test_means_of_small_types_without_idle_replicas(several: Case) -> None:
    pieces = several.split(np.full(several.num_replicas - 1, 40_000, np.float16))

    def replica_fn(x: Any) -> Any:
        return jnp.mean(x), dx.get_replica_context().all_reduce("MEAN", jnp.mean(x))

    means = several.run(replica_fn, pieces)
    mean = several.across(lambda value: several.strategy.reduce("MEAN", value, None), means[0])
    close([mean, means[1]], [40_000.0] * 2)


def test_replicas_without_examples_count_for_nothing(several: Case) -> None:
    """A mean over no examples is NaN, and would make everything NaN."""
    strategy = several.strategy
    w = several.variable(jnp.ones(3))
    mirrored = several.variable(0.0, aggregation="MEAN")
    total = several.variable(0.0, aggregation="SUM")
    own = several.variable(0.0, synchronization="ON_READ", aggregation="SUM")
    runs = several.variable(0, synchronization="ON_READ", aggregation="SUM")
    with strategy.scope():
        optimizer = dx.Optimizer(optax.sgd(0.1))
        mean, accuracy = dx.metrics.Mean(), dx.metrics.Accuracy()

    def replica_step(x: Any) -> Any:
        # Its gradient is NaN too, as that of a model which divides by a batch's deviation may be.
        loss, grads = dx.value_and_grad(lambda: jnp.mean(x @ w) * jnp.sum(w.value()) / 3, [w])()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        for variable in (mirrored, total, own):
            variable.assign(loss)
        runs.assign_add(1)
        mean.update_state(loss)
        accuracy.update_state(x[:, 0], x[:, 0])
        context = dx.get_replica_context()
        return loss, context.all_reduce("MEAN", loss), context.all_reduce("SUM", {"a": loss})["a"]

    @several.step
    def step(x: Any) -> Any:
        losses, *reduced = strategy.run(replica_step, args=(x,))
        inside = [strategy.reduce(op, losses, axis=None) for op in ("MEAN", "SUM")]
        return losses, [*inside, *reduced]

    expected = np.mean(ONE)
    losses, reduced = step(several.split(ONE))
    close([np.asarray(value).ravel()[0] for value in reduced], [ONE.sum()] * 4, 1e-5)
    outside = [strategy.reduce(op, losses, axis=None) for op in ("MEAN", "SUM")]
    close(outside, [ONE.sum()] * 2, 1e-5)
    values = [variable.read_value() for variable in (mirrored, total, own)]
    close([*values, mean.result()], [ONE.sum()] * 4, 1e-5)
    close([accuracy.result(), runs.read_value()], [1.0, several.num_replicas])
    close(w.numpy(), 1.0 - 0.1 * (ONE[0] + expected), 1e-5)
    # With a value that is not NaN they take part, as replicas that run.
    ones = several.run(lambda x: jnp.float32(x.shape[0] + 1), several.split(ONE))
    close(strategy.reduce("SUM", ones, axis=None), several.num_replicas + 1.0)


@dataclass
class Result:
    """What JAX takes for a leaf."""

    loss: Any


def test_an_object_with_a_value_of_no_examples_counts_for_nothing() -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    rows = dx.data.Dataset.from_tensor_slices(ONE).batch(3)
    piece = next(iter(strategy.experimental_distribute_dataset(rows)))
    result = strategy.run(lambda x: Result(jnp.mean(x)), args=(piece,))
    close(strategy.reduce("MEAN", result.loss, axis=None), ONE.mean(), 1e-5)


def test_pieces_are_taken_apart_inside_a_step(several: Case) -> None:
    def across(x: Any) -> Any:
        rows = several.strategy.run(lambda x: x[:, 0] * 2, args=(x,))
        own = several.strategy.experimental_local_results(rows)
        merged = several.strategy.run(
            lambda rows: dx.get_replica_context().merge_call(
                lambda strategy, rows: sum(
                    jnp.sum(piece) for piece in strategy.experimental_local_results(rows)
                ),
                args=(rows,),
            ),
            args=(rows,),
        )
        return own, merged

    own, merged = several.across(across, several.split(X))
    pieces = [2 * piece[:, 0] for piece in _pieces(several, X)]
    local = [pieces[index] for index in several.replicas]
    for piece, expected in zip(own, local, strict=True):
        close(piece, expected, 1e-5)
    close(np.asarray(merged), sum(piece.sum() for piece in local), 1e-5)


def test_a_replica_without_any_example_has_no_say_if_nobody_has(several: Case) -> None:
    """If all pieces are empty, they are as even as others, and NaN is what there is."""
    loss = several.run(jnp.mean, several.split(X[:0, 0]))
    assert np.isnan(several.strategy.reduce("MEAN", loss, axis=None))


def test_what_cannot_be_one_program_for_all_sizes_runs_all_the_same(several: Case) -> None:
    rows, n = X[:, 0], several.num_replicas

    def more_often(x: Any) -> Any:
        context = dx.get_replica_context()
        total = context.all_reduce("SUM", jnp.sum(x))
        return context.all_reduce("SUM", total) if x.shape[0] == 100 else total

    def other_kinds(x: Any) -> Any:
        return jnp.sum(x) if x.shape[0] > 1 else 1.0

    close(several.parts(several.run(more_often, several.split(rows))), [rows.sum()] * n, 1e-5)
    sizes = [len(piece) for piece in _pieces(several, rows)]
    if min(sizes) <= 1:
        found = several.parts(several.run(other_kinds, several.split(rows)))
        assert [float(each) for each in found][-1] == 1.0
    with pytest.raises(ValueError, match=r"different shapes"):
        several.run(lambda x: dx.get_replica_context().all_reduce("SUM", x), several.split(rows))
