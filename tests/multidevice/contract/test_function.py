"""`dx.function`: traced once for each signature, whatever the strategy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close, make_strategy, replica_number


class Counted:
    """A step that counts how often Python runs it."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.traces = 0

    def __call__(self, x: Any, *rest: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self.strategy.run(lambda x: x * 2, args=(x,))


def test_one_signature_is_traced_once(strategy: Any) -> None:
    counted = Counted(strategy)
    step = dx.function(counted)
    step(jnp.ones(2))
    traces = counted.traces
    for value in (1.0, 2.0, 3.0):
        assert np.asarray(step(jnp.ones(2) * value)).ravel()[0] == 2 * value
    assert (step.trace_count, counted.traces) == (1, traces)


def test_new_shapes_types_and_forms_are_traced_again(strategy: Any) -> None:
    step = dx.function(Counted(strategy))
    calls = [
        (jnp.ones(2),),
        (jnp.ones(3),),
        (jnp.ones(2, jnp.int32),),
        (np.ones(2, np.float32), None),
        (jnp.ones(2), [1.0]),
        (jnp.ones(2), (1.0,)),
        (jnp.ones(2), {"a": 1.0}),
    ]
    for count, args in enumerate(calls, start=1):
        step(*args)
        assert step.trace_count == count
    for args in calls:
        step(*args)
    assert step.trace_count == step.experimental_get_tracing_count() == len(calls)


def test_numbers_are_inputs_and_other_objects_are_not(strategy: Any) -> None:
    step = dx.function(Counted(strategy))
    for number in (1, 2, 3):
        step(jnp.ones(2), number, number * 1.5)
    assert step.trace_count == 1
    for text in ("a", "b", "a"):
        step(jnp.ones(2), text)
    assert step.trace_count == 3
    unhashable = [object(), {"x"}]
    for thing in unhashable * 2:
        step(jnp.ones(2), thing)
    assert step.trace_count == 5


def test_truth_values_choose_a_branch(strategy: Any) -> None:
    @dx.function
    def step(x: Any, double: bool) -> Any:
        return strategy.run(lambda: x * 2 if double else x)

    results = [float(np.asarray(step(3.0, double)).ravel()[0]) for double in (True, False, True)]
    assert results == [6.0, 3.0, 6.0]
    assert step.trace_count == 2


def test_python_numbers_keep_their_kind(strategy: Any) -> None:
    kinds = dx.function(lambda *numbers: [jnp.asarray(number).dtype.name for number in numbers])
    with strategy.scope():
        assert kinds(1, 1.0, 1j, np.float16(1), np.int8(1)) == [
            "int32",
            "float32",
            "complex64",
            "float16",
            "int8",
        ]


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1},
        {"static_argnums": (1,)},
        {"static_argnums": -1},
        {"static_argnames": "n"},
    ],
)
def test_static_arguments_are_python_values(strategy: Any, options: Any) -> None:
    @dx.function(**options)
    def step(x: Any, n: int) -> Any:
        return strategy.run(lambda: jnp.sum(jnp.stack([x] * n)))

    assert [float(np.asarray(step(jnp.ones(()), n)).ravel()[0]) for n in (2, 3, 2)] == [
        2.0,
        3.0,
        2.0,
    ]
    assert step.trace_count == 2


def test_static_arguments_by_name() -> None:
    @dx.function(static_argnames=("n", "unit"))
    def step(x: Any, n: int = 1, *, unit: str = "m") -> Any:
        return sum([x] * n), f"{n}{unit}"

    assert step(jnp.ones(()), n=2, unit="s")[1] == "2s"
    assert step(jnp.ones(()), 3)[1] == "3m"
    assert step(x=jnp.ones(()))[1] == "1m"
    assert step.trace_count == 3


def test_negative_numbers_of_missing_arguments() -> None:
    step = dx.function(lambda x=1.0: x, static_argnums=-1)
    assert step() == 1.0


def test_decorators_with_and_without_arguments(strategy: Any) -> None:
    @dx.function
    def plain(x: Any) -> Any:
        """Doubles."""
        return x * 2

    @dx.function()
    def called(x: Any) -> Any:
        return x * 2

    with strategy.scope():
        assert (
            float(plain(2.0)) == float(called(2.0)) == float(dx.function(lambda x: x * 2)(2.0)) == 4
        )
    assert (plain.__name__, plain.__doc__) == ("plain", "Doubles.")
    assert plain.python_function(3) == 6
    assert repr(plain).endswith("plain, 1 compiled>")
    assert dx.function(plain) is plain


def test_a_function_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"dx.function: fn=3 is not callable.*@dx.function"):
        dx.function(3)  # type: ignore[call-overload]


def test_methods_belong_to_their_object(strategy: Any) -> None:
    class Model:
        def __init__(self, value: float) -> None:
            self.weight = dx.Variable(value)

        @dx.function
        def step(self, x: Any) -> Any:
            self.weight.assign_add(x)
            return self.weight.read_value()

        @dx.function(static_argnums=0)
        def repeat(self, n: int) -> Any:
            return jnp.stack([self.weight.value()] * n)

    with strategy.scope():
        one, two = Model(1.0), Model(10.0)
        assert [float(one.step(1.0)), float(one.step(1.0)), float(two.step(1.0))] == [
            2.0,
            3.0,
            11.0,
        ]
        assert one.repeat(3).shape == (3,)
    assert (one.step.trace_count, two.step.trace_count) == (1, 1)
    assert isinstance(Model.step, type(one.step))


def test_methods_of_objects_without_a_dict() -> None:
    class Slotted:
        __slots__ = ()

        @dx.function
        def double(self, x: Any) -> Any:
            return x * 2

    assert float(Slotted().double(2.0)) == 4.0


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
        assert np.concatenate(case.local(result)).tolist() == (BATCH * (scale + 1)).tolist()


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
    close(case.local(result), [n * (n + 1)] * n)
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


def test_uneven_pieces_run_eagerly(several: Case) -> None:
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
    assert step.trace_count == 1
    assert len(traces) == 3


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


def test_donated_arguments_are_used_up(strategy: Any) -> None:
    step = dx.function(lambda x, y: x + y, donate_argnums=0)
    with strategy.scope():
        first, second = jnp.ones(2), jnp.ones(2)
        assert step(first, second).tolist() == [2.0, 2.0]
        assert second.tolist() == [1.0, 1.0]
        assert first.is_deleted()


def test_a_function_inside_other_transformations(strategy: Any) -> None:
    step = dx.function(lambda x: x * x)
    with strategy.scope():
        assert float(jax.grad(step)(3.0)) == 6.0
        assert jax.vmap(step)(jnp.arange(3.0)).tolist() == [0.0, 1.0, 4.0]
        assert float(jax.jit(step)(3.0)) == 9.0


def test_a_function_that_never_settles_is_refused() -> None:
    variables = iter([dx.Variable(float(index)) for index in range(100)])

    @dx.function
    def step() -> Any:
        return next(variables).read_value()

    with pytest.raises(RuntimeError, match=r"step uses other variables each time it is traced"):
        step()
