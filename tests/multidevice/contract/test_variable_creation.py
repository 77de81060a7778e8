"""Variables are created anywhere: in scope, in replicas, in a function's first call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import (
    Case,
    device,
    make_strategy,
    replica_number,
    replicas_of,
)

LABELS = {
    ("default", "AUTO"): "<dx.Variable",
    ("one_device", "AUTO"): "<dx.Variable",
    ("mirrored", "AUTO"): "MirroredVariable:{",
    ("multi_worker", "AUTO"): "MirroredVariable:{",
    ("central", "AUTO"): "CentralVariable:{",
    ("default", "ON_READ"): "<dx.Variable",
    ("one_device", "ON_READ"): "<dx.Variable",
    ("mirrored", "ON_READ"): "SyncOnReadVariable:{",
    ("multi_worker", "ON_READ"): "SyncOnReadVariable:{",
    ("served", "AUTO"): "ServedVariable:{",
    ("served", "ON_READ"): "ServedVariable:{",
    ("central", "ON_READ"): "SyncOnReadVariable:{",
}


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_in_scope(case: Case, synchronization: str) -> None:
    variable = case.variable(
        [1.0, 2.0], name="w", synchronization=synchronization, aggregation="SUM"
    )
    assert repr(variable).startswith(LABELS[case.kind, synchronization])
    assert str(variable) == repr(variable)
    assert variable.distribute_strategy is case.strategy
    assert case.strategy.extended.variable_created_in_scope(variable)
    assert case.numbers(variable) == [[1.0, 2.0]] * case.num_replicas
    settled = "ON_WRITE" if synchronization == "AUTO" and case.mirrors else synchronization
    assert variable.synchronization is dx.VariableSynchronization[settled]
    assert variable.aggregation is dx.VariableAggregation.SUM


def test_the_repr_shows_every_copy() -> None:
    variable = Case("mirrored", 2, False).variable(1.0)
    assert repr(variable) == (
        "MirroredVariable:{\n"
        "  0: <dx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,\n"
        "  1: <dx.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>\n"
        "}"
    )


def test_copies_live_on_their_devices(case: Case) -> None:
    job = "ps" if case.kind == "served" else "localhost"
    prefix = f"/job:{job}/replica:0/task:{jax.process_index()}/device:CPU:"
    mirrored, own = case.variable(1.0), case.variable(1.0, synchronization="ON_READ")
    first = {"one_device": 1, "central": 5}.get(case.kind, 0)
    count = len(case.replicas) if case.mirrors else 1
    copies = case.strategy.experimental_local_results(mirrored)
    assert [copy.device for copy in copies] == [f"{prefix}{first + i}" for i in range(count)]
    assert mirrored.device == f"{prefix}{first}"
    start = 1 if case.kind == "one_device" else 0
    copies = case.strategy.experimental_local_results(own)
    assert [copy.device for copy in copies] == [
        f"{prefix}{start + index}" for index in range(len(case.replicas))
    ]
    case.run(lambda: own.assign_add(1.0))
    case.across(lambda: mirrored.assign_add(1.0))
    again = case.strategy.experimental_local_results(mirrored)
    assert [copy.device for copy in again] == [f"{prefix}{first + i}" for i in range(count)]


def test_a_replica_sees_its_own_device() -> None:
    strategy = make_strategy("mirrored", 2)
    variable = Case("mirrored", 2, False).variable(1.0)
    names = strategy.experimental_local_results(strategy.run(lambda: variable.device))
    assert [name[-5:] for name in names] == ["CPU:0", "CPU:1"]


def test_inside_replicas_it_is_one_variable(case: Case) -> None:
    calls: list[int] = []

    def initial() -> Any:
        calls.append(1)
        return jnp.asarray([1.0, 2.0])

    made: list[Any] = []

    def replica_fn() -> Any:
        if not made:
            made.append(dx.Variable(initial, aggregation="SUM"))
        return made[0]

    variable = case.run(replica_fn)
    assert isinstance(variable, dx.Variable)
    assert len(calls) == 1
    assert variable.distribute_strategy is case.strategy
    case.run(lambda: variable.assign_add(jnp.ones(2)))
    n = case.num_replicas
    assert variable.numpy().tolist() == [1.0 + n, 2.0 + n]


def test_replicas_that_all_create_it_get_one_variable(strategy: Any) -> None:
    calls: list[int] = []
    made: list[Any] = []

    def replica_fn() -> Any:
        made.append(dx.Variable(lambda: calls.append(1) or 1.0))
        return made[-1]

    variable = strategy.run(replica_fn)
    assert len(calls) == 1
    assert len(made) == len(replicas_of(strategy))
    assert all(other is variable for other in made)


def test_variables_kept_and_not_kept_are_not_confused(strategy: Any) -> None:
    kept: list[dx.Variable] = []

    def replica_fn() -> Any:
        if not kept:
            kept.append(dx.Variable(1.0))
        fresh = dx.Variable(2.0, aggregation="SUM")
        return kept[0].read_value(), fresh.read_value()

    first, second = strategy.run(replica_fn)
    local = strategy.experimental_local_results
    count = len(replicas_of(strategy))
    assert [float(value) for value in local(first)] == [1.0] * count
    assert [float(value) for value in local(second)] == [2.0] * count


def test_random_initial_values_are_the_same_everywhere(case: Case) -> None:
    made: list[dx.Variable] = []
    random = np.random.default_rng(0)

    def replica_fn() -> Any:
        if len(made) < 2:
            made.append(dx.Variable(lambda: random.normal(size=3)))
            made.append(dx.Variable(lambda: jax.random.normal(jax.random.key(1), (3,))))
        return made[0].read_value(), made[1].read_value()

    for values in case.run(replica_fn):
        parts = case.parts(values)
        assert len({part.tobytes() for part in parts}) == 1
    assert np.ptp(made[0].numpy()) > 0


def test_the_first_replicas_initial_value_counts(case: Case) -> None:
    made: list[dx.Variable] = []

    def replica_fn() -> Any:
        number = replica_number() * 5
        if not made:
            made.append(dx.Variable(number))
        return made[0].read_value()

    values = case.run(replica_fn)
    assert case.numbers(values) == [5.0] * case.num_replicas


def test_a_function_creates_variables_on_its_first_call(case: Case) -> None:
    made: list[dx.Variable] = []

    def across(x: Any) -> Any:
        if not made:
            made.append(dx.Variable(jnp.ones(2), aggregation="SUM"))
        case.strategy.run(lambda: made[0].assign_add(x + 0))
        return made[0].read_value()

    n = case.num_replicas
    with case.strategy.scope():
        step = case.step(across)
        assert np.asarray(step(jnp.ones(2))).tolist() == [1.0 + n] * 2
        assert np.asarray(step(jnp.ones(2))).tolist() == [1.0 + 2 * n] * 2
    assert len(made) == 1


def test_a_function_computes_initial_values(case: Case) -> None:
    """The initial value may depend on the function's arguments."""
    made: list[dx.Variable] = []

    def across(x: Any) -> Any:
        if not made:
            made.append(dx.Variable(x * 2, aggregation="MEAN"))
        return made[0].read_value() + x

    with case.strategy.scope():
        step = case.step(across)
        assert np.asarray(step(jnp.ones(2))).tolist() == [3.0, 3.0]
        assert np.asarray(step(jnp.zeros(2))).tolist() == [2.0, 2.0]


def test_a_later_call_creates_no_variables(strategy: Any) -> None:
    def across() -> Any:
        return dx.Variable(1.0, name="again").read_value()

    expected = pytest.raises(ValueError, match=r"'again'.*run before.*first call only.*is None")
    with strategy.scope(), expected:
        dx.function(across)()


def test_colocated_variables_share_the_place(case: Case) -> None:
    strategy, extended = case.strategy, case.strategy.extended
    with strategy.scope():
        first = dx.Variable(1.0)
        with extended.colocate_vars_with(first):
            second = dx.Variable(2.0)
        with extended.colocate_vars_with(extended.non_slot_devices([first])):
            third = dx.Variable(3.0)
    assert first.devices == second.devices == third.devices
    result = case.across(
        lambda: extended.update(first, lambda v: v.assign_add(second + third).read_value())
    )
    assert float(first) == 6.0
    assert case.numbers(result) == [6.0] * case.num_replicas


def test_colocated_with_one_device(case: Case) -> None:
    name = f"CPU:{jax.local_devices().index(device(2))}"
    with case.strategy.scope(), case.strategy.extended.colocate_vars_with(name):
        variable = dx.Variable(1.0)
    assert variable.device.endswith(name)
    total = case.run(lambda: variable + replica_number())
    assert case.numbers(total) == [2.0 + index for index in range(case.num_replicas)]
    with case.strategy.scope():
        case.strategy.extended.update(variable, lambda v: v.assign_add(1.0))
    assert float(variable) == 2.0  # There is one copy to update, however many devices there are.


def test_colocating_wants_the_strategys_scope_and_variable(pair: Any) -> None:
    outside = dx.Variable(1.0, name="outside")
    with (
        pytest.raises(RuntimeError, match=r"colocate_vars_with: .*scope\(\).*DefaultStrategy"),
        pair.extended.colocate_vars_with(outside),
    ):
        pytest.fail("entered")
    with (
        pair.scope(),
        pytest.raises(ValueError, match=r"colocate_vars_with: variable 'outside'.*not a variable"),
        pair.extended.colocate_vars_with(outside),
    ):
        pytest.fail("entered")


def test_a_plain_variable_was_not_created_in_scope(pair: Any) -> None:
    assert not pair.extended.variable_created_in_scope(dx.Variable(1.0))


def test_non_slot_devices(case: Case) -> None:
    extended = case.strategy.extended
    first, second = case.variable(1.0, name="b"), case.variable(1.0, name="a")
    devices = extended.non_slot_devices([first, second])
    if case.kind in ("default", "served"):
        assert devices is second
        with pytest.raises(ValueError, match=r"non_slot_devices: var_list is empty"):
            extended.non_slot_devices([])
    else:
        assert devices == extended.parameter_devices


def test_a_variable_needs_an_initial_value(strategy: Any) -> None:
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"initial_value of 'w' is missing.*lambda"),
    ):
        dx.Variable(name="w")


def test_a_variable_has_the_shape_it_says(strategy: Any) -> None:
    with strategy.scope():
        assert dx.Variable([1.0, 2.0], shape=(2,)).shape == (2,)
        with pytest.raises(
            ValueError, match=r"'w' has shape=\(3,\).*initial value has shape \(2,\)"
        ):
            dx.Variable([1.0, 2.0], shape=(3,), name="w")


def test_integers_have_no_mean(strategy: Any) -> None:
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"'n' has aggregation=MEAN.*int32.*float32.*SUM"),
    ):
        dx.Variable(1, aggregation="MEAN", name="n")


def test_synchronization_none_is_not_supported(strategy: Any) -> None:
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"'w' has synchronization=NONE.*ON_WRITE"),
    ):
        dx.Variable(1.0, synchronization="NONE", name="w")


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"aggregation='MAX' is not a VariableAggregation.*SUM"):
        dx.Variable(1.0, aggregation="MAX")
    with pytest.raises(ValueError, match=r"synchronization=3 is not a VariableSynchronization"):
        dx.Variable(1.0, synchronization=3)  # type: ignore[arg-type]


def test_a_variable_is_not_created_inside_jit(strategy: Any) -> None:
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"inside a JAX transformation.*dx.function instead"),
    ):
        jax.jit(lambda x: dx.Variable(x).read_value())(1.0)


def test_replicas_must_create_the_same_variables(pair: Any) -> None:
    own = replicas_of(pair)
    if len(own) == 1:
        pytest.skip("each worker has one replica, with no other one here to differ from")

    def replica_fn() -> None:
        if dx.get_replica_context().replica_id_in_sync_group == own[1]:
            dx.Variable(1.0)

    with pytest.raises(RuntimeError, match=r"replica 1 creates variable number 1 at .*replica 0"):
        pair.run(replica_fn)


def test_variables_made_from_one_array_are_apart(case: Case) -> None:
    array = jnp.zeros(2)
    first, second = case.variable(array), case.variable(array)
    case.across(lambda: first.assign_add([1.0, 1.0]))
    assert second.numpy().tolist() == array.tolist() == [0.0, 0.0]
    assert first.numpy().tolist() == [1.0, 1.0]


def test_random_keys_are_kept_as_numbers(strategy: Any) -> None:
    key = jax.random.key(3)
    with strategy.scope():
        with pytest.raises(ValueError, match=r"'k' is an array of random keys.*key_data\(key\)"):
            dx.Variable(key, name="k")
        variable = dx.Variable(jax.random.key_data(key))
    again = jax.random.wrap_key_data(jnp.asarray(variable.numpy()))
    assert jax.random.uniform(again) == jax.random.uniform(key)
