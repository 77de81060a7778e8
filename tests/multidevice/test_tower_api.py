"""The tower API: its rules of locality and context, on 1 to 4 towers, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.contrib import distribute

SETUPS = [
    ("default", 1),
    ("one_device", 1),
    *(("mirrored", count) for count in (1, 2, 3, 4)),
    ("central", 2),
]


def _make(kind: str, num_towers: int) -> distribute.DistributionStrategy:
    devices = [f"CPU:{index}" for index in range(num_towers)]
    if kind == "mirrored":
        return distribute.MirroredStrategy(devices)
    if kind == "central":
        # Worker and parameter devices differ, so that M and V(v) do.
        return distribute.DistributionStrategy(
            dx.CentralStorageStrategy(devices, parameter_device="CPU:5")
        )
    if kind == "one_device":
        return distribute.OneDeviceStrategy("CPU:1")
    return distribute.get_distribution_strategy()


@dataclass(frozen=True)
class Case:
    """A strategy, and whether cross-tower code runs inside `dx.function`."""

    kind: str
    d: distribute.DistributionStrategy
    compiled: bool

    def across(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in the strategy's cross-tower context."""
        with self.d.scope():
            return (dx.function(fn) if self.compiled else fn)(*args)

    def variable(self, value: Any, **kwargs: Any) -> dx.Variable:
        with self.d.scope():
            return distribute.get_variable("v", initializer=value, **kwargs)

    @property
    def wraps(self) -> bool:
        return self.d.num_towers > 1

    def expect(self, value: Any, wrapper: type, expected: list[float]) -> None:
        """Asserts that there is one value for each tower, wrapped if there are several towers."""
        with self.d.scope():
            parts = self.d.unwrap(value)
        assert [float(part) for part in parts] == expected
        assert isinstance(value, dx.DistributedValues) == self.wraps
        if self.wraps:
            assert type(value) is wrapper

    @property
    def ids(self) -> list[int]:
        return list(range(self.d.num_towers))


@pytest.fixture(params=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return request.param == "compiled"


@pytest.fixture(params=SETUPS, ids=lambda setup: f"{setup[0]}{setup[1]}")
def case(request: pytest.FixtureRequest, compiled: bool) -> Iterator[Case]:
    made = Case(request.param[0], _make(*request.param), compiled)
    yield made
    with made.d.scope():
        # The default strategy outlives the test.
        distribute.reset_variable_store()


def _number(scale: float = 1.0) -> Any:
    """1.0 in the first tower, 2.0 in the second, and so on: a value of locality T."""
    tower = distribute.get_tower_context()
    assert tower is not None
    return (jnp.asarray(tower.tower_id, jnp.float32) + 1.0) * scale


def _names(variable: dx.Variable) -> list[str]:
    return [dx.topology.device_name(device) for device in variable.devices]


def _devices(value: Any) -> list[Any]:
    parts = value.values if isinstance(value, dx.DistributedValues) else [value]
    return [next(iter(part.devices())) for part in parts]


# with d.scope()


def test_scope_leads_from_the_default_tower_to_the_cross_tower_context(case: Case) -> None:
    before = distribute.get_tower_context()
    assert before is not None and before.is_single_tower
    assert distribute.get_cross_tower_context() is None
    seen = []

    def look() -> None:
        seen.append(distribute.get_cross_tower_context())
        assert distribute.get_tower_context() is None
        assert distribute.get_distribution_strategy() is case.d
        assert distribute.has_distribution_strategy() == (case.kind != "default")

    case.across(look)
    assert seen and all(found is case.d for found in seen)
    assert distribute.get_tower_context() == before
    assert not distribute.has_distribution_strategy()


def test_scope_gives_the_strategy_and_nests(case: Case) -> None:
    with case.d.scope() as outer, case.d.scope() as inner:
        assert outer is inner is case.d


# Variables: V(v), N, and tower-local ones.


def _made_everywhere(case: Case, make: Callable[[str], Any]) -> list[dx.Variable]:
    """Makes a variable in the cross-tower context, one in a tower, and one in a merge call."""

    def tower_fn() -> Any:
        tower = distribute.get_tower_context()
        assert tower is not None
        merged = tower.merge_call(lambda distribution: make("in_merge"))
        return make("in_tower"), merged

    def step() -> None:
        make("across")
        case.d.call_for_each_tower(tower_fn)

    case.across(step)
    with case.d.scope(), distribute.variable_scope("", reuse=True):
        return [distribute.get_variable(name) for name in ("across", "in_tower", "in_merge")]


def test_get_variable_places_by_the_strategy_in_both_contexts(case: Case) -> None:
    made = _made_everywhere(
        case, lambda name: distribute.get_variable(name, shape=(2,), initializer=jnp.ones)
    )
    for variable in made:
        assert _names(variable) == case.d.parameter_devices
        with case.d.scope():
            copies = [np.asarray(copy).tolist() for copy in case.d.unwrap(variable)]
        assert copies == [[1.0, 1.0]] * len(case.d.parameter_devices)


def test_colocate_vars_with_a_variable_in_both_contexts(case: Case) -> None:
    v1 = case.variable(0.0)

    def make(name: str) -> Any:
        with case.d.colocate_vars_with(v1):
            return distribute.get_variable(name, initializer=1.0)

    for v2 in _made_everywhere(case, make):
        assert v2.devices == v1.devices


def test_colocate_vars_with_a_tower_local_variable_makes_a_mirrored_one(case: Case) -> None:
    with case.d.scope():
        with case.d.tower_local_var_scope("sum"):
            local = distribute.get_variable("local", initializer=0.0)
        with case.d.colocate_vars_with(local):
            beside = distribute.get_variable("beside", initializer=0.0)
    assert beside.trainable and not beside.per_replica
    assert beside.synchronization is not dx.VariableSynchronization.ON_READ


def test_colocate_vars_with_non_slot_devices_in_both_contexts(case: Case) -> None:
    v = case.variable(0.0)

    def make(name: str) -> Any:
        with case.d.colocate_vars_with(case.d.non_slot_devices([v])):
            return distribute.get_variable(name, initializer=1.0)

    for beta in _made_everywhere(case, make):
        assert _names(beta) == case.d.parameter_devices


def test_non_slot_devices(case: Case) -> None:
    v = case.variable(0.0)
    expected = v if case.kind == "default" else case.d.parameter_devices
    assert case.d.non_slot_devices([v]) == expected


@pytest.mark.parametrize("method", ["sum", "mean"])
def test_tower_local_variables_differ_by_tower_and_are_combined_when_fetched(
    case: Case, method: str
) -> None:
    with case.d.scope(), case.d.tower_local_var_scope(method):
        named = distribute.get_variable("local", initializer=0.0)
        # Whoever makes it: a variable of a library is tower-local here too, and not trainable.
        plain = dx.Variable(0.0, True)
    total = sum(index + 1.0 for index in case.ids)
    expected = total if method == "sum" else total / len(case.ids)

    def tower_fn() -> Any:
        for local in (named, plain):
            local.assign_add(_number())
        return named.read_value()

    result = case.across(lambda: case.d.call_for_each_tower(tower_fn))
    case.expect(result, distribute.PerDevice, [index + 1.0 for index in case.ids])
    for local in (named, plain):
        assert not local.trainable
        assert float(case.across(lambda v=local: case.d.fetch(v))) == expected
        with case.d.scope():
            assert [float(copy) for copy in case.d.unwrap(local)] == [i + 1.0 for i in case.ids]


def test_tower_local_scopes_end(case: Case) -> None:
    with case.d.scope():
        with case.d.tower_local_var_scope("mean"):
            local = distribute.get_variable("local", initializer=0.0)
        after = distribute.get_variable("after", initializer=0.0)
    assert not local.trainable and after.trainable
    assert after.aggregation is dx.VariableAggregation.NONE


def test_tower_local_variables_start_the_same_in_all_towers(case: Case) -> None:
    rng = np.random.default_rng(1)

    def tower_fn() -> Any:
        with case.d.tower_local_var_scope("mean"):
            v = distribute.get_variable("v", shape=(), initializer=lambda s, t: rng.normal(size=s))
        return v

    case.across(lambda: case.d.call_for_each_tower(tower_fn))
    with case.d.scope():
        copies = case.d.unwrap(distribute.get_variable("v", reuse=True))
    assert len(copies) == case.d.num_towers
    assert len({float(copy) for copy in copies}) == 1


# Input: locality T.


def test_iterators_have_locality_t(case: Case) -> None:
    def dataset_fn() -> dx.data.Dataset:
        return dx.data.Dataset.range(2 * case.d.num_towers)

    with case.d.scope():
        iterator = case.d.distribute_dataset(dataset_fn).make_one_shot_iterator()

    def step() -> Any:
        return case.d.call_for_each_tower(lambda x: x * 10, iterator.get_next())

    for start in (0, case.d.num_towers):
        result = case.across(step)
        case.expect(result, distribute.PerDevice, [10.0 * (start + i) for i in case.ids])
    with pytest.raises(StopIteration):
        case.across(step)
    iterator.close()


def test_initializable_iterators_start_again(case: Case) -> None:
    with case.d.scope():
        dataset = case.d.distribute_dataset(dx.data.Dataset.range(case.d.num_towers))
        iterator = dataset.make_initializable_iterator()
        with pytest.raises(RuntimeError, match=r"not been initialized .* iterator\.initialize\(\)"):
            iterator.get_next()

    def step() -> Any:
        return case.d.call_for_each_tower(lambda x: x + 1, iterator.get_next())

    for start in (iterator.initialize, iterator.initializer):
        start()
        case.expect(case.across(step), distribute.PerDevice, [i + 1.0 for i in case.ids])
        with pytest.raises(dx.OutOfRangeError):
            case.across(step)
    iterator.close()
    with pytest.raises(RuntimeError, match="was closed"):
        iterator.get_next()


# broadcast: M and V(v).


def test_broadcast_is_mirrored_to_the_worker_devices(case: Case) -> None:
    mirrored = case.across(lambda: case.d.broadcast(jnp.asarray(2.0)))
    case.expect(mirrored, distribute.Mirrored, [2.0] * case.d.num_towers)
    if case.wraps:
        assert _devices(mirrored) == jax.devices()[: case.d.num_towers]


def test_broadcast_to_a_variable_has_its_locality(case: Case) -> None:
    v = case.variable(1.0)

    def step() -> Any:
        mirrored = case.d.broadcast(jnp.asarray(2.0), v)
        case.d.update(v, lambda v, x: v.assign_add(x), mirrored)
        return mirrored

    mirrored = case.across(step)
    assert float(v) == 3.0
    if not case.compiled and case.kind in ("mirrored", "central"):
        assert tuple(_devices(mirrored)) == v.devices


# call_for_each_tower.


def test_call_for_each_tower_runs_once_for_each_in_a_tower_context(case: Case) -> None:
    contexts: list[Any] = []

    def tower_fn() -> Any:
        tower = distribute.get_tower_context()
        assert tower is not None and tower == distribute.get_tower_context()
        assert distribute.get_cross_tower_context() is None
        assert tower.distribution_strategy is distribute.get_distribution_strategy() is case.d
        assert tower.num_towers == case.d.num_towers
        assert tower.is_single_tower == case.d.is_single_tower == (case.d.num_towers == 1)
        contexts.append(tower)
        return jnp.asarray(tower.tower_id)

    result = case.across(lambda: case.d.call_for_each_tower(tower_fn, run_concurrently=False))
    case.expect(result, distribute.PerDevice, [float(index) for index in case.ids])
    if not case.compiled:
        assert len({id(context) for context in contexts}) == case.d.num_towers


def test_call_for_each_tower_may_use_t_and_m_and_any_variable(case: Case) -> None:
    outside = dx.Variable(1000.0)
    v = case.variable(100.0)

    def step() -> Any:
        t = case.d.call_for_each_tower(_number)
        m = case.d.broadcast(jnp.asarray(10.0))
        return case.d.call_for_each_tower(
            lambda t, m, *, plain: t + m + v + outside + plain, t, m, plain=0.5
        )

    expected = [1111.5 + index for index in case.ids]
    case.expect(case.across(step), distribute.PerDevice, expected)


def test_worker_device_index(case: Case) -> None:
    result = case.across(
        lambda: case.d.call_for_each_tower(lambda i: jnp.asarray(i), case.d.worker_device_index)
    )
    case.expect(result, distribute.PerDevice, [float(index) for index in case.ids])
    if case.d.is_single_tower:
        assert case.d.worker_device_index == 0


def test_the_device_of_a_tower(case: Case) -> None:
    def tower_fn() -> str:
        tower = distribute.get_tower_context()
        assert tower is not None
        return tower.device

    def step() -> Any:
        return case.d.call_for_each_tower(tower_fn)

    if case.compiled and case.wraps:
        with pytest.raises(RuntimeError, match=r"one program for all towers.*Use tower_id"):
            case.across(step)
        return
    with case.d.scope():
        assert case.d.unwrap(case.across(step)) == case.d.worker_devices


def test_merge_call_goes_to_the_cross_tower_context_and_back(case: Case) -> None:
    def merge_fn(distribution: Any, x: Any, *, scale: float) -> Any:
        assert distribution is case.d
        assert distribute.get_tower_context() is None
        assert distribute.get_cross_tower_context() is case.d
        return sum(distribution.unwrap(x)) * scale

    def tower_fn() -> Any:
        tower = distribute.get_tower_context()
        assert tower is not None
        x = _number()
        total = tower.merge_call(merge_fn, x, scale=10.0)
        assert distribute.get_tower_context() == tower
        return total + x

    total = 10.0 * sum(index + 1.0 for index in case.ids)
    result = case.across(lambda: case.d.call_for_each_tower(tower_fn))
    case.expect(result, distribute.PerDevice, [total + index + 1.0 for index in case.ids])
