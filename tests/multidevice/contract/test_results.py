"""How the replicas' results become one, how they are taken apart, and how they look."""

from __future__ import annotations

import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import (
    BATCH,
    Case,
    device,
    make_strategy,
    replica_number,
    replicas_of,
)
from tests.multidevice.contract.other_workers import TOGETHER

Point = namedtuple("Point", ["x", "y"])


# Merging.


def test_the_same_object_comes_back_as_itself(case: Case) -> None:
    array, token = jnp.arange(3.0), object()
    result = case.run(lambda: (array, token, "text", 7, None))
    if TOGETHER and not case.compiled:
        # An array of this worker may be another one in the next worker.
        assert len(result[0].values) == len(case.replicas)
    else:
        assert result[0] is array
    assert result[1:] == (token, "text", 7, None)
    assert case.strategy.experimental_local_results(array) == (array,)


def test_values_of_each_replica_come_back_wrapped(case: Case) -> None:
    result = case.run(replica_number)
    assert isinstance(result, dx.PerReplica) == case.wraps
    assert case.numbers(result) == [index + 1.0 for index in range(case.num_replicas)]


def test_nests_keep_their_form(case: Case) -> None:
    def replica_fn() -> Any:
        number = replica_number()
        return {"a": (number, [number * 2, None]), "b": Point(number * 3, "text")}

    result = case.run(replica_fn)
    first, (second, nothing) = result["a"]
    assert nothing is None
    assert isinstance(result["b"], Point)
    assert result["b"].y == "text"
    n = case.num_replicas
    for leaf, factor in ((first, 1), (second, 2), (result["b"].x, 3)):
        assert case.numbers(leaf) == [factor * (index + 1.0) for index in range(n)]


def test_a_variable_comes_back_as_the_variable(case: Case) -> None:
    mirrored = case.variable(1.0)
    own = case.variable(1.0, synchronization="ON_READ", aggregation="SUM")
    assert case.run(lambda: [mirrored, own]) == [mirrored, own]
    assert case.run(lambda: own.assign_add(replica_number())) is own


def test_a_shared_argument_comes_back_unwrapped(case: Case) -> None:
    result = case.run(lambda x: x, jnp.arange(3.0))
    assert isinstance(result, jax.Array)
    assert result.tolist() == [0.0, 1.0, 2.0]


def test_a_wrapped_argument_comes_back_wrapped(case: Case) -> None:
    given = case.split(BATCH)
    result = case.run(lambda x: x, given)
    assert isinstance(result, dx.PerReplica) == case.wraps
    assert np.concatenate(case.parts(result)).tolist() == BATCH.tolist()


def test_an_all_reduced_value_comes_back_mirrored(case: Case) -> None:
    result = case.run(lambda: dx.get_replica_context().all_reduce("SUM", replica_number()))
    assert isinstance(result, dx.Mirrored) == case.wraps
    n = case.num_replicas
    assert float(result) == n * (n + 1) / 2


def test_a_mirrored_value_stays_mirrored(case: Case) -> None:
    mirrored = case.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(2)))
    result = case.run(lambda x: x, mirrored)
    assert isinstance(result, type(mirrored))
    assert np.asarray(result).tolist() == [case.num_replicas] * 2


def test_fresh_constants_are_values_of_each_replica(case: Case) -> None:
    result = case.run(lambda: jnp.ones(2))
    assert len(case.strategy.experimental_local_results(result)) == len(case.replicas)
    assert case.strategy.reduce("SUM", result, axis=None).tolist() == [case.num_replicas] * 2


def test_replicas_must_return_the_same_structure(pair: Any) -> None:
    first = replicas_of(pair)[0]
    if len(replicas_of(pair)) == 1:
        pytest.skip("each worker has one replica, with no other one here to differ from")

    def replica_fn() -> Any:
        context = dx.get_replica_context()
        return [1] if context.replica_id_in_sync_group == first else [1, 2]

    with pytest.raises(ValueError, match=r"different structure.*replica 1.*same nest"):
        pair.run(replica_fn)


def test_results_of_replicas_live_on_their_devices(case: Case) -> None:
    result = case.run(lambda x: x * 2, case.split(BATCH))
    parts = case.strategy.experimental_local_results(result)
    devices = [next(iter(part.devices())) for part in parts]
    first = 1 if case.kind == "one_device" else 0
    assert devices == [device(first + index) for index in range(len(case.replicas))]


# Taking apart.


def test_local_results_of_a_nest_are_nests(case: Case) -> None:
    value = case.each(lambda index: jnp.asarray(float(index)))
    parts = case.strategy.experimental_local_results({"a": value, "b": (1, None)})
    for index, part in zip(case.replicas, parts, strict=True):
        assert float(part["a"]) == index
        assert part["b"] == (1, None)


def test_local_results_of_a_plain_value_are_the_value(case: Case) -> None:
    assert case.strategy.experimental_local_results(3) == (3,)
    assert case.strategy.experimental_local_results({"a": (1, 2)}) == ({"a": (1, 2)},)


def test_local_results_of_a_variable_are_its_copies(case: Case) -> None:
    variable = case.variable([1.0, 2.0])
    copies = case.strategy.experimental_local_results(variable)
    assert len(copies) == (len(case.replicas) if case.mirrors else 1)
    assert all(np.asarray(copy).tolist() == [1.0, 2.0] for copy in copies)


def test_local_results_in_a_step(case: Case) -> None:
    def across(x: Any) -> Any:
        return [part * 2 for part in case.strategy.experimental_local_results(x)]

    parts = case.across(across, case.each(lambda index: jnp.asarray(float(index))))
    assert [float(part) for part in parts] == [index * 2.0 for index in case.replicas]


def test_older_names(case: Case) -> None:
    strategy = case.strategy
    value = case.each(lambda index: jnp.asarray(float(index)))
    numbers = [float(index) for index in range(case.num_replicas)]
    assert (
        case.numbers(case.step(lambda v: strategy.experimental_run_v2(abs, (v,)))(value)) == numbers
    )
    assert case.numbers(strategy.experimental_run(abs, iter([value]))) == numbers
    assert strategy.experimental_run(lambda: 5) == 5
    assert [float(part) for part in strategy.unwrap(value)] == [float(i) for i in case.replicas]
    assert strategy.group(value) is None


# Making.


def test_values_from_a_function_know_their_replica(case: Case) -> None:
    contexts: list[Any] = []

    def value_fn(context: dx.ValueContext) -> Any:
        contexts.append(context)
        return {"x": jnp.asarray(context.replica_id_in_sync_group), "y": "text"}

    value = case.strategy.experimental_distribute_values_from_function(value_fn)
    n = case.num_replicas
    assert contexts == [dx.ValueContext(index, n) for index in case.replicas]
    assert case.numbers(value["x"]) == list(range(n))
    assert isinstance(value["y"], dx.PerReplica) != case.single


def test_values_from_a_function_are_wrapped_even_if_shared(case: Case) -> None:
    shared = jnp.asarray(2.0)
    value = case.strategy.experimental_distribute_values_from_function(lambda context: shared)
    assert isinstance(value, dx.PerReplica) != case.single
    total = case.step(lambda v: case.strategy.reduce("SUM", v, axis=None))(value)
    assert float(total) == 2.0 * case.num_replicas


def test_host_arrays_and_numbers_are_distributed(case: Case) -> None:
    arrays = case.each(lambda index: np.full((2,), index, np.float32))
    numbers = case.each(lambda index: index)
    result = case.run(lambda a, b: a + b, arrays, numbers)
    assert case.numbers(result) == [[2.0 * index] * 2 for index in range(case.num_replicas)]


def test_a_value_of_another_strategy_is_refused(compiled: bool) -> None:
    value = Case("mirrored", 2, compiled).each(lambda index: jnp.asarray(1.0))
    with pytest.raises(ValueError, match=r"replica 2 has no part.*made for 2 replica"):
        Case("mirrored", 3, compiled).run(lambda x: x, value)


def test_a_value_for_more_replicas_is_refused(compiled: bool) -> None:
    value = Case("mirrored", 3, compiled).each(lambda index: jnp.asarray(1.0))
    with pytest.raises(ValueError, match=r"(?s)made for 3 replicas.*strategy with 2.*gather"):
        Case("mirrored", 2, compiled).run(lambda x: x, value)


def test_a_distributed_value_has_values() -> None:
    with pytest.raises(ValueError, match=r"PerReplica: values is empty.*one value for each"):
        dx.PerReplica([])


# Looking at.


def test_reprs_have_a_line_for_each_replica(several: Case) -> None:
    text = repr(several.run(replica_number))
    lines = text.splitlines()
    assert lines[0] == "PerReplica:{"
    assert lines[-1] == "}"
    assert [line.strip()[:2] for line in lines[1:-1]] == [
        f"{index}:" for index in range(len(several.replicas))
    ]
    mirrored = several.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(())))
    assert repr(mirrored).startswith("Mirrored:{\n  0: ")


def test_reprs_inside_a_compiled_step(pair: Any) -> None:
    texts: list[str] = []

    @dx.function
    def step(x: Any) -> None:
        texts.append(repr(x))
        merge = lambda strategy, y: texts.append(repr(y))  # noqa: E731
        pair.run(lambda y: dx.get_replica_context().merge_call(merge, (y,)), args=(x,))

    step(pair.experimental_distribute_values_from_function(lambda context: jnp.ones(2)))
    assert all(text.startswith("PerReplica:{traced: ") for text in texts)


def test_per_replica_values_convert_for_logging(several: Case) -> None:
    numbers = several.run(replica_number)
    assert np.asarray(numbers).tolist() == [index + 1.0 for index in several.replicas]
    assert np.asarray(numbers, dtype=np.int64).dtype == np.int64
    same = several.each(lambda index: jnp.asarray(3.0))
    assert (float(same), int(same)) == (3.0, 3)
    assert f"{same}".startswith("PerReplica:{")


def test_different_values_are_no_one_number(several: Case) -> None:
    if len(several.replicas) == 1:
        # A worker logs what it has.
        assert float(several.run(replica_number)) == several.replicas[0] + 1.0
        return
    with pytest.raises(ValueError, match=r"float\(PerReplica\).*different values.*reduce"):
        float(several.run(replica_number))
    with pytest.raises(ValueError, match=r"int\(PerReplica\)"):
        int(several.run(replica_number))


def test_different_shapes_are_no_one_array(several: Case) -> None:
    uneven = several.each(lambda index: jnp.zeros(index + 1))
    if len(several.replicas) == 1:
        assert np.asarray(uneven).shape == (1, several.replicas[0] + 1)
        return
    with pytest.raises(ValueError, match=r"np.asarray\(PerReplica\): the replicas' shapes differ"):
        np.asarray(uneven)


def test_a_per_replica_value_is_no_array(several: Case) -> None:
    with pytest.raises(TypeError, match=r"used as an array outside a replica.*strategy.run"):
        jnp.asarray(several.run(replica_number))


def test_a_mirrored_value_is_used_like_its_array(several: Case) -> None:
    n = several.num_replicas
    value = several.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(2)))
    assert (value.shape, value.dtype, value.ndim) == ((2,), jnp.float32, 1)
    assert (value + 1).tolist() == [n + 1.0] * 2
    assert (jnp.asarray([1.0, 2.0]) * value).tolist() == [n, 2.0 * n]
    assert (np.asarray([1.0, 2.0], np.float32) * value).tolist() == [n, 2.0 * n]
    assert jnp.sum(jnp.asarray(value)) == value.sum() == 2 * n
    scalar = several.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(())))
    assert (float(scalar), int(scalar), f"{scalar:.1f}") == (n, n, f"{n}.0")
    assert scalar.item() == n


# What `run` accepts.


def test_run_wants_a_function_and_a_tuple(strategy: Any) -> None:
    with pytest.raises(TypeError, match=r"strategy.run: fn=3 is not callable.*args=\(x,\)"):
        strategy.run(3)
    with pytest.raises(TypeError, match=r"args=5 is not a tuple.*with the comma"):
        strategy.run(abs, args=5)


def test_run_takes_options_and_compiled_functions(case: Case) -> None:
    double = dx.function(lambda x: x * 2)
    value = case.split(BATCH)
    run = case.step(lambda v: case.strategy.run(double, args=(v,), options=dx.RunOptions()))
    assert np.concatenate(case.parts(run(value))).tolist() == (BATCH * 2).tolist()


def test_a_strategy_needs_its_extended() -> None:
    with pytest.raises(TypeError, match=r"extended=None is not a StrategyExtended"):
        dx.Strategy(None)


def test_a_strategy_of_ones_own_says_what_it_must_override() -> None:
    extended = dx.StrategyExtended((), (), dx.ReductionToOneDevice())
    strategy = dx.Strategy(extended)
    distribute = strategy.experimental_distribute_values_from_function
    uses: dict[str, Callable[[], Any]] = {
        "_run_replicas": lambda: strategy.run(abs, (1,)),
        "_placement": lambda: dx.Variable(1.0),
        "_update_copies": lambda: extended.update_non_slot(["CPU:0"], lambda: None),
        "distribute_values": lambda: distribute(lambda context: 1.0),
    }
    with strategy.scope():
        for name, use in uses.items():
            with pytest.raises(NotImplementedError, match=rf"does not define {name}\(self, "):
                use()
    assert make_strategy("default", 1) is dx.get_strategy()


def test_objects_that_hide_computed_values_are_refused(any_strategy: Any) -> None:
    def replica(x: Any) -> Any:
        return types.SimpleNamespace(name="a", loss=x * 2)

    steps = [lambda x: any_strategy.run(replica, args=(x,)), replica]
    for step in steps:
        with pytest.raises(TypeError, match=r"class SimpleNamespace, .*'loss'.*dict.*register"):
            dx.function(step)(jnp.ones(()))
    eager = any_strategy.experimental_local_results(any_strategy.run(replica, args=(1.0,)))
    assert eager[0].loss == 2.0
    plain = types.SimpleNamespace(name="a")
    assert dx.function(lambda: plain)() is plain
