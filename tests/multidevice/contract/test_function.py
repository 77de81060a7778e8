"""`dx.function`: calls, replicas, data and results, on every strategy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close, make_strategy, replica_number


def test_results_keep_their_form(case: Case) -> None:
    token = object()

    def across(x: Any) -> Any:
        number = case.strategy.run(replica_number)
        return {"x": x, "n": number, "list": [None, token, "text", 3]}, (x + 1,)

    result, (added,) = case.across(across, jnp.ones(2))
    assert result["list"] == [None, token, "text", 3]
    assert isinstance(result["n"], dx.PerReplica) == case.wraps
    assert result["x"].tolist() == [1.0, 1.0]
    assert added.tolist() == [2.0, 2.0]


def test_distributed_arguments_in_nests(case: Case) -> None:
    step = case.step(
        lambda batch, *, scale: case.strategy.run(
            lambda b: b["x"] * scale + b["y"][0], args=(batch,)
        )
    )
    batch = case.split({"x": BATCH, "y": (BATCH,)})
    for scale in (1.0, 3.0):
        result = step(batch, scale=scale)
        assert np.concatenate(case.parts(result)).tolist() == (BATCH * (scale + 1)).tolist()


def test_functions_call_functions(strategy: Any) -> None:
    with strategy.scope():
        variable = dx.Variable(1.0)

    @dx.function
    def inner(x: Any) -> Any:
        variable.assign_add(x)
        return variable.read_value()

    @dx.function
    def outer(x: Any) -> Any:
        return inner(x) + inner(x)

    with strategy.scope():
        assert float(outer(1.0)) == 5.0
        assert float(variable) == 3.0
        assert float(inner(1.0)) == 4.0
    assert (outer.trace_count, inner.trace_count) == (1, 1)


def test_a_function_runs_in_replicas(case: Case) -> None:
    variable = case.variable(0.0, aggregation="SUM")

    @dx.function
    def inner(x: Any) -> Any:
        variable.assign_add(x * replica_number())
        return dx.get_replica_context().all_reduce("SUM", x * replica_number())

    n = case.num_replicas
    result = case.run(lambda: inner(jnp.asarray(2.0)))
    close(case.parts(result), [n * (n + 1)] * n)
    assert float(variable) == n * (n + 1)


def test_run_compiles_a_function_by_itself(strategy: Any) -> None:
    counts: list[int] = []

    @dx.function
    def step(x: Any) -> Any:
        counts.append(1)
        return dx.get_replica_context().all_reduce("SUM", x)

    strategy.run(step, args=(jnp.asarray(1.0),))
    traces = len(counts)
    for _ in range(3):
        result = strategy.run(step, args=(jnp.asarray(1.0),))
    assert float(result) == strategy.num_replicas_in_sync
    assert (len(counts), step.trace_count) == (traces, 1)


def test_a_function_works_in_and_out_of_scope(strategy: Any) -> None:
    @dx.function
    def step(x: Any) -> Any:
        return x * dx.get_strategy().num_replicas_in_sync

    assert float(step(1.0)) == 1.0
    with strategy.scope():
        assert float(step(1.0)) == strategy.num_replicas_in_sync
    assert float(step(1.0)) == 1.0


def test_a_function_serves_several_strategies() -> None:
    strategies = [
        make_strategy(*setup) for setup in (("mirrored", 2), ("mirrored", 3), ("central", 2))
    ]
    variables = []
    for strategy in strategies:
        with strategy.scope():
            variables.append(dx.Variable(1.0))

    @dx.function
    def step(index: Any, static: str) -> Any:
        strategy, variable = strategies[int(static)], variables[int(static)]
        number = strategy.reduce("SUM", strategy.run(replica_number), axis=None)
        return variable.assign(number).read_value()

    results = [float(step(0, str(index))) for index in (0, 1, 2, 0)]
    assert results == [3.0, 6.0, 3.0, 3.0]
    assert step.trace_count == 3


def test_variables_are_arguments_too(case: Case) -> None:
    variable = case.variable(1.0)
    step = dx.function(lambda v, x: v.assign_add(x).read_value())
    with case.strategy.scope():
        assert [float(step(variable, 1.0)), float(step(variable, 2.0))] == [2.0, 4.0]
    assert step.trace_count == 1


def test_uneven_pieces_are_compiled_once(several: Case) -> None:
    strategy = several.strategy
    traces: list[int] = []

    @dx.function
    def step(x: Any) -> Any:
        traces.append(1)
        return strategy.reduce("MEAN", strategy.run(lambda x: x * 2, args=(x,)), axis=0)

    assert float(step(several.split(BATCH))) == pytest.approx(2 * BATCH.mean())
    assert step.trace_count == 1
    uneven = np.arange(7, dtype=np.float32)
    for _ in range(2):
        assert float(step(several.split(uneven))) == pytest.approx(2 * uneven.mean())
    assert step.trace_count == 2
    assert len(traces) == 2


def test_pieces_that_become_uneven_in_a_step(several: Case) -> None:
    """A value made inside the function may have pieces of different shape too."""
    strategy = several.strategy

    @dx.function
    def step() -> Any:
        made = strategy.experimental_distribute_values_from_function(
            lambda context: np.ones(context.replica_id_in_sync_group + 1, np.float32)
        )
        return strategy.reduce("SUM", strategy.run(lambda x: x * 2, args=(made,)), axis=0)

    n = several.num_replicas
    assert [float(step()), float(step())] == [n * (n + 1.0)] * 2


def test_values_made_in_a_step(case: Case) -> None:
    def across(x: Any) -> Any:
        made = case.strategy.experimental_distribute_values_from_function(
            lambda context: x * (context.replica_id_in_sync_group + 1)
        )
        doubled = case.strategy.run(lambda y: y * 2, args=(made,))
        return case.strategy.reduce("SUM", doubled, axis=None)

    n = case.num_replicas
    assert case.across(across, jnp.ones(2)).tolist() == [n * (n + 1.0)] * 2
    assert float(case.across(across, jnp.ones(()))) == n * (n + 1.0)


def test_a_function_inside_other_transformations(any_strategy: Any) -> None:
    strategy = any_strategy
    step = dx.function(lambda x: x * x)
    with strategy.scope():
        assert float(jax.grad(step)(3.0)) == 6.0
        assert jax.vmap(step)(jnp.arange(3.0)).tolist() == [0.0, 1.0, 4.0]
        assert float(jax.jit(step)(3.0)) == 9.0


def test_results_that_the_code_wraps(several: Case) -> None:
    """Pieces that the function itself wraps come back wrapped, even or not."""
    own = len(several.replicas)

    def across(x: Any) -> Any:
        even = dx.PerReplica([x * index for index in range(own)])
        return even, dx.Mirrored([x + 1] * own)

    def uneven(x: Any) -> Any:
        return dx.PerReplica([x[: index + 1] for index in range(own)])

    with several.strategy.scope():
        even, mirrored = dx.function(across)(jnp.ones(2))
        pieces = dx.function(uneven)(jnp.ones(own))
    n, workers = several.num_replicas, several.num_replicas // own
    assert several.numbers(even) == [[float(index)] * 2 for index in range(own)] * workers
    assert several.numbers(mirrored) == [[2.0, 2.0]] * n
    shapes = [part.shape for part in several.parts(pieces)]
    assert shapes == [(index + 1,) for index in range(own)] * workers


def test_the_next_element_is_an_input(case: Case) -> None:
    dataset = dx.data.Dataset.from_tensor_slices(BATCH).batch(4)
    iterator = iter(case.strategy.experimental_distribute_dataset(dataset))

    def across() -> Any:
        total = case.strategy.run(jnp.sum, args=(next(iterator),))
        return case.strategy.reduce("SUM", total, axis=None)

    step = case.step(across)
    assert [float(step()) for _ in range(3)] == [6.0, 22.0, 38.0]
    with pytest.raises(StopIteration):
        step()


def test_a_loop_over_a_data_set_runs_on_the_host(case: Case) -> None:
    dataset = dx.data.Dataset.from_tensor_slices(BATCH).batch(4)
    distributed = case.strategy.experimental_distribute_dataset(dataset)

    def epoch(data: Any) -> Any:
        total = 0.0
        for x in data:
            losses = case.strategy.run(jnp.sum, args=(x,))
            total += case.strategy.reduce("SUM", losses, axis=None)
        return total

    step = case.step(epoch)
    for _ in range(2):
        assert float(step(distributed)) == BATCH.sum()


def test_a_distributed_data_set_is_reduced(case: Case) -> None:
    dataset = dx.data.Dataset.from_tensor_slices(BATCH).batch(4)
    distributed = case.strategy.experimental_distribute_dataset(dataset)

    def add(total: Any, x: Any) -> Any:
        losses = case.strategy.run(jnp.sum, args=(x,))
        return total + case.strategy.reduce("SUM", losses, axis=None)

    assert float(case.step(lambda: distributed.reduce(0.0, add))()) == BATCH.sum()


def test_a_replica_reads_no_distributed_input(case: Case) -> None:
    dataset = dx.data.Dataset.from_tensor_slices(BATCH).batch(4)
    distributed = case.strategy.experimental_distribute_dataset(dataset)
    iterator = iter(distributed)
    ways = [
        ("next", lambda: next(iterator)),
        ("next", iterator.get_next),
        ("get_next_as_optional", lambda: iterator.get_next_as_optional().get_value()),
        ("a loop over a distributed data set", lambda: list(distributed)),
        ("a loop over a distributed data set", lambda: next(iter(distributed))),
        ("a loop over a distributed iterator", lambda: list(iterator)),
    ]
    if case.kind == "default":
        ways = []  # Code without a strategy is a replica already, and the one that reads.
    for what, read in ways:
        with pytest.raises(dx.ReplicaInputError, match=what) as caught:
            case.run(read)
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, ValueError)
    # Nothing was taken by the attempts.
    assert np.concatenate(case.parts(next(iterator))).tolist() == BATCH[:4].tolist()
    iterator.close()


def test_replicas_loop_over_data_of_their_own(case: Case) -> None:
    dataset = dx.data.Dataset.range(4)

    def loop() -> Any:
        total = jnp.zeros((), jnp.int32)
        for x in dataset:
            total = total + x
        return total

    assert [int(part) for part in case.parts(case.run(loop))] == [6] * case.num_replicas
