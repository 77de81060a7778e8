"""Metrics and losses are right whatever the number of replicas."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close

UNEVEN = np.arange(7, dtype=np.float32)
WEIGHTS = np.linspace(0.0, 1.0, 12, dtype=np.float32)
LABELS = np.arange(12, dtype=np.int32) % 3
SCORES = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)


def _metric(case: Case, make: Any, *args: Any) -> Any:
    with case.strategy.scope():
        return make(*args)


def test_the_mean_of_all_examples(case: Case) -> None:
    mean = _metric(case, dx.metrics.Mean)
    step = case.step(lambda x: case.strategy.run(mean.update_state, args=(x,)))
    assert float(mean.result()) == 0.0
    step(case.split(BATCH))
    step(case.split(UNEVEN))
    close(mean.result(), np.concatenate([BATCH, UNEVEN]).mean())
    close(case.across(mean.result), np.concatenate([BATCH, UNEVEN]).mean())
    mean.reset_state()
    assert float(mean.result()) == 0.0


def test_weighted_means_and_sums(case: Case) -> None:
    mean, total = _metric(case, dx.metrics.Mean, "m"), _metric(case, dx.metrics.Sum, "s")

    def replica_fn(x: Any, w: Any) -> Any:
        mean.update_state(x, w)
        total.update_state(x, sample_weight=w)
        total.update_state(jnp.stack([x, x], axis=1), w)
        return mean(x, 0.0), total.result()

    inside = case.run(replica_fn, *case.split((BATCH, WEIGHTS)))
    close(mean.result(), np.average(BATCH, weights=WEIGHTS), 1e-5)
    close(total.result(), 3 * (BATCH * WEIGHTS).sum(), 1e-5)
    for value, metric in zip(inside, (mean, total), strict=True):
        close(case.parts(value), [np.asarray(metric.result())] * case.num_replicas, 1e-5)
    assert [v.name for v in mean.variables] == ["m/total:0", "m/count:0"]
    assert all(not v.trainable for v in mean.variables)


def test_the_accuracy_of_all_examples(case: Case) -> None:
    accuracy = _metric(case, dx.metrics.Accuracy)
    case.run(accuracy.update_state, *case.split((LABELS, SCORES)))
    close(accuracy.result(), (SCORES.argmax(axis=1) == LABELS).mean())
    accuracy.reset_states()
    case.run(accuracy.update_state, *case.split((LABELS, np.zeros(12, np.int32))))
    close(accuracy.result(), 1 / 3)


def test_metrics_are_reset_in_a_step(case: Case) -> None:
    total = _metric(case, dx.metrics.Sum)

    def across(x: Any) -> Any:
        total.reset_state()
        case.strategy.run(total.update_state, args=(x,))
        return total.result()

    step = case.step(across)
    for _ in range(2):
        close(step(case.split(BATCH)), BATCH.sum())


def test_a_metric_of_ones_own(case: Case) -> None:
    class Largest(dx.metrics.Metric):
        def __init__(self) -> None:
            super().__init__("largest")
            self.squares = self.add_variable("squares", shape=(2,))

        def update_state(self, x: Any) -> None:
            self.squares.assign_add(jnp.stack([jnp.sum(x), jnp.sum(x * x)]))

        def result(self) -> Any:
            return self.squares.read_value()

    metric = _metric(case, Largest)
    case.run(metric.update_state, case.split(BATCH))
    close(metric.result(), [BATCH.sum(), (BATCH**2).sum()])


def test_the_base_class_computes_nothing() -> None:
    metric = dx.metrics.Metric("empty")
    with pytest.raises(NotImplementedError, match=r"Override update_state\(self, \.\.\.\)"):
        metric.update_state()
    with pytest.raises(NotImplementedError, match=r"Override result\(self\)"):
        metric.result()


@pytest.mark.parametrize("metric", [dx.metrics.Mean, dx.metrics.Sum])
def test_weights_must_fit(metric: Any) -> None:
    with pytest.raises(ValueError, match=r"sample_weight of shape \(3,\) does not fit.*\(2,\)"):
        metric().update_state([1.0, 2.0], [1.0, 1.0, 1.0])


def test_predictions_must_fit() -> None:
    with pytest.raises(
        ValueError, match=r"Accuracy: y_pred of shape \(3,\).*y_true of shape \(2,\)"
    ):
        dx.metrics.Accuracy().update_state([1, 0], [1, 0, 1])


# Losses.


def test_the_average_loss_adds_up_to_the_mean(case: Case) -> None:
    def replica_fn(x: Any) -> Any:
        return (
            dx.compute_average_loss(x, global_batch_size=12),
            dx.compute_average_loss(x),
            dx.compute_average_loss(x, sample_weight=x),
            dx.compute_average_loss(jnp.stack([x, x], axis=1), sample_weight=x),
            dx.compute_average_loss(x, sample_weight=2.0, global_batch_size=jnp.asarray(12)),
        )

    losses = case.run(replica_fn, case.split(BATCH))
    totals = [case.strategy.reduce("SUM", loss, axis=None) for loss in losses]
    squares = (BATCH**2).mean()
    close(totals, [BATCH.mean(), BATCH.mean(), squares, 2 * squares, 2 * BATCH.mean()], 1e-5)


def test_the_average_loss_of_an_uneven_batch(case: Case) -> None:
    losses = case.run(lambda x: dx.compute_average_loss(x, global_batch_size=7), case.split(UNEVEN))
    close(case.strategy.reduce("SUM", losses, axis=None), UNEVEN.mean())


def test_an_empty_batch_has_no_loss(case: Case) -> None:
    loss = case.run(lambda: dx.compute_average_loss(jnp.zeros(0), global_batch_size=0))
    assert case.numbers(loss) == [0.0] * case.num_replicas


def test_a_regularization_loss_is_counted_once(case: Case) -> None:
    def replica_fn() -> Any:
        return dx.scale_regularization_loss(3.0), dx.scale_regularization_loss(jnp.ones(3))

    for loss in case.run(replica_fn):
        close(case.strategy.reduce("SUM", loss, axis=None), 3.0)


def test_losses_are_of_single_examples() -> None:
    with pytest.raises(ValueError, match=r"per_example_loss is a scalar.*one loss for each"):
        dx.compute_average_loss(1.0)
    with pytest.raises(
        ValueError, match=r"sample_weight of shape \(3,\).*per_example_loss .*\(2,\)"
    ):
        dx.compute_average_loss(jnp.ones(2), sample_weight=jnp.ones(3))
    with pytest.raises(ValueError, match=r"global_batch_size=-1 is negative"):
        dx.compute_average_loss(jnp.ones(2), global_batch_size=-1)
    with pytest.raises(ValueError, match=r"global_batch_size has the shape \(2,\).*one number"):
        dx.compute_average_loss(jnp.ones(2), global_batch_size=jnp.ones(2))


def test_the_average_loss_of_small_types() -> None:
    half = jnp.full(2, 60_000, jnp.float16)
    loss = dx.compute_average_loss(half, global_batch_size=2)
    assert (float(loss), loss.dtype) == (60_000.0, jnp.float16)
    assert float(dx.compute_average_loss(half, global_batch_size=120_000)) == 1.0
    short = dx.compute_average_loss(jnp.full(2, 257, jnp.bfloat16), global_batch_size=257)
    assert (float(short), short.dtype) == (float(jnp.bfloat16(512 / 257)), jnp.bfloat16)


def test_the_average_loss_may_be_over_a_sum_of_weights() -> None:
    assert float(dx.compute_average_loss(jnp.ones(2), global_batch_size=jnp.asarray(0.5))) == 4.0


def test_weights_of_examples_may_be_a_column() -> None:
    """As data sets give them, and as TensorFlow takes them."""
    weights = jnp.asarray([[1.0], [3.0]])
    for loss in (jnp.ones(2), jnp.ones((2, 1))):
        assert float(dx.compute_average_loss(loss, weights, global_batch_size=2)) == 2.0
    assert float(dx.compute_average_loss(jnp.ones((2, 3)), weights, global_batch_size=2)) == 6.0
    for wrong in (jnp.ones((1, 2)), jnp.ones((2, 2)), jnp.ones(1)):
        with pytest.raises(ValueError, match="sample_weight of shape"):
            dx.compute_average_loss(jnp.ones((2, 3)), wrong, global_batch_size=2)


def test_losses_belong_to_replicas(strategy: Any) -> None:
    with strategy.scope():
        if not dx.in_cross_replica_context():
            # The default strategy has no other context than its replica's.
            close(dx.compute_average_loss(jnp.ones(2)), 1.0)
            return
        with pytest.raises(RuntimeError, match=r"compute_average_loss: needs a replica"):
            dx.compute_average_loss(jnp.ones(2))
        with pytest.raises(RuntimeError, match=r"scale_regularization_loss: needs a replica"):
            dx.scale_regularization_loss(1.0)
        close(dx.compute_average_loss(jnp.ones(2), global_batch_size=4), 0.5)
