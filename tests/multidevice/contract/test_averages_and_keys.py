"""Averages of variables, and random keys, in replicas and outside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close, replica_number


@pytest.mark.parametrize("in_replica", [True, False])
def test_moving_average(case: Case, in_replica: bool) -> None:
    with case.strategy.scope():
        v = dx.Variable([1.0, 2.0], name="v")
        own = dx.Variable(2.0, synchronization="ON_READ", aggregation="MEAN")
        small = dx.Variable(jnp.ones(2, jnp.bfloat16))
        count = dx.Variable(0, trainable=False)
    ema = dx.experimental.ExponentialMovingAverage(0.5)
    early = dx.train.ExponentialMovingAverage(0.5, num_updates=count, name="early")

    def update() -> None:
        ema.apply([v, own, small])
        early.apply([v])

    run = case.run if in_replica else case.across
    run(update)
    v.assign([3.0, 3.0])
    count.assign(1)
    case.run(lambda: own.assign(replica_number()))
    run(update)
    close(ema.average(v), [2.0, 2.5])
    # TensorFlow's: with one update, the decay is 2 / 11.
    close(early.average(v), np.array([1.0, 2.0]) * 2 / 11 + 3 * 9 / 11)
    assert ema.average(own) is not None and ema.average(count) is None
    close(ema.average(own), (2 + (case.num_replicas + 1) / 2) / 2)
    assert ema.average(small).dtype == jnp.bfloat16
    assert [each.name for each in ema.variables[:1]] == ["v/ExponentialMovingAverage:0"]
    assert early.average_name(v) == "v/early" and not ema.average(v).trainable


def test_wrong_variables(eager: Case) -> None:
    ema = dx.train.ExponentialMovingAverage(0.5)
    with pytest.raises(TypeError, match=r"var_list has 1\.0, which is not a variable"):
        ema.apply([1.0])  # type: ignore[list-item]
    with eager.strategy.scope(), pytest.raises(TypeError, match="has the data type int32"):
        ema.apply([dx.Variable(1)])


def _draw(case: Case, seed: Any) -> list[Any]:
    """Returns what the replicas draw in two runs: keys by step, and of a generator."""
    with case.strategy.scope():
        generator = dx.random.Generator(seed)

    def replica_fn(step: Any) -> Any:
        own = jax.random.normal(dx.random.replica_key(seed, step))
        return own, generator.normal(), generator.uniform((2,), maxval=9, dtype=jnp.int32)

    drawn = []
    for step in range(2):
        results = case.strategy.experimental_local_results(case.run(replica_fn, jnp.asarray(step)))
        drawn += [jax.tree.map(np.asarray, part) for part in results]
    close(generator.variables[1], 4)
    return drawn


def test_keys_differ_by_replica_and_repeat_by_seed(case: Case) -> None:
    first, again = _draw(case, 3), _draw(case, jax.random.PRNGKey(3))
    for index in range(2):
        numbers = [float(part[index]) for part in first]
        assert len(set(numbers)) == len(numbers) == 2 * len(case.replicas)
        assert numbers == [float(part[index]) for part in again]
    assert all((part[2] < 9).all() and part[2].dtype == np.int32 for part in first)
    assert float(_draw(case, jax.random.key(4))[0][0]) != float(first[0][0])
    if 0 in case.replicas:
        expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), 0)
        close(first[0][0], jax.random.normal(expected))


def test_generators_go_back_and_forth(case: Case) -> None:
    with case.strategy.scope():
        generator = dx.random.Generator.from_seed(3)

    def draw(drawing: dx.random.Generator) -> list[np.ndarray]:
        drawn = case.run(lambda: (drawing.normal((2,)), drawing.normal((2,))))
        return [np.asarray(part) for each in drawn for part in case.parts(each)]

    begin = case.across(lambda: generator.state)
    first = draw(generator)
    with case.strategy.scope():
        again, new = dx.random.Generator.from_state(begin), generator.split(2)
        new.append(dx.random.Generator.from_non_deterministic_state())
    close(draw(again), first)
    numbers = [float(each[0]) for each in (*first, *(part for g in new for part in draw(g)))]
    assert len(set(numbers)) == len(numbers)
    half = len(first) // 2
    generator.reset(begin)
    case.run(lambda: generator.skip(1))
    close(draw(generator)[:half], first[half:])
    generator.reset_from_seed(3)
    close(draw(generator), first)


def test_distributions_of_a_generator() -> None:
    generator = dx.random.Generator(5)
    normal = generator.truncated_normal((500,), 10.0, 2.0)
    assert normal.min() >= 6 and normal.max() <= 14 and abs(normal.mean() - 10) < 0.5
    binomial = generator.binomial((500, 2), jnp.asarray([10, 1000]), 0.5)
    assert binomial.dtype == jnp.int32 and binomial[:, 0].max() <= 10
    close(binomial.mean(axis=0) / np.array([10, 1000]), [0.5, 0.5], 0.05)
    full = generator.uniform_full_int((500,), jnp.int8)
    assert full.dtype == jnp.int8 and full.min() < -100 and full.max() > 100
    assert len({*np.asarray(jax.random.key_data(generator.make_seeds(3))[:, 0]).tolist()}) == 3


def test_what_a_generator_cannot_draw_or_go_back_to() -> None:
    generator = dx.random.Generator(0)
    with pytest.raises(ValueError, match=r"dtype=int32 needs maxval.*uniform_full_int"):
        generator.uniform((2,), dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"a state of shape \(2,\) .*shape \(3,\) and uint32"):
        generator.reset(jnp.zeros(2, jnp.uint32))
    with pytest.raises(ValueError, match=r"a state of shape \(5,\)"):
        generator.reset_from_seed(jax.random.key(0, impl="rbg"))


@pytest.mark.parametrize("seed", ["3", 1.5, True, np.ones(2)])
def test_wrong_seeds(seed: Any) -> None:
    with pytest.raises(TypeError, match=r"dx.random: seed=.*Expected an integer, or a key"):
        dx.random.replica_key(seed)
