"""Mistakes: each message names the argument, its value, what was expected and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import distribax as dx
from distribax.contrib import distribute
from distribax.contrib.distribute import get_variable, variable_scope
from tests.multidevice.tower_api.cases import tower, tower_number

_D = distribute.DistributionStrategy
_CROSS_TOWER: dict[str, Callable[[_D], Any]] = {
    "call_for_each_tower": lambda d: d.call_for_each_tower(lambda: 1),
    "distribute_dataset": lambda d: d.distribute_dataset(dx.data.Dataset.range(4)),
    "broadcast": lambda d: d.broadcast(1.0),
    "reduce": lambda d: d.reduce("sum", 1.0),
    "batch_reduce": lambda d: d.batch_reduce("sum", [(1.0, None)]),
    "update": lambda d: d.update(None, lambda v: v),  # type: ignore[arg-type]
    "update_non_slot": lambda d: d.update_non_slot(["CPU:0"], lambda: 1),
}
_LOOKING: dict[str, Callable[[_D], Any]] = {
    "fetch": lambda d: d.fetch(1.0),
    "unwrap": lambda d: d.unwrap(1.0),
    "group": lambda d: d.group(1.0),
}


@pytest.mark.parametrize("what", _CROSS_TOWER)
def test_cross_tower_methods_need_the_cross_tower_context(
    what: str, pair: distribute.MirroredStrategy
) -> None:
    use = _CROSS_TOWER[what]
    default = distribute.get_distribution_strategy()
    for d in (pair, default):
        # By default code is in a tower.
        with pytest.raises(RuntimeError, match=rf"^{what}: .*with distribution\.scope\(\)"):
            use(d)
    with pair.scope():
        with pytest.raises(RuntimeError, match=rf"^{what}: .* in a tower of .*merge_call"):
            pair.call_for_each_tower(lambda: use(pair))
        with pytest.raises(RuntimeError, match=rf"^{what}: .* inside the scope of <Mirrored"):
            use(distribute.OneDeviceStrategy("CPU:0"))


@pytest.mark.parametrize("what", _LOOKING)
def test_results_are_looked_at_outside_of_towers(
    what: str, pair: distribute.MirroredStrategy
) -> None:
    use = _LOOKING[what]
    use(pair)
    with pair.scope():
        use(pair)
        with pytest.raises(RuntimeError, match=rf"^{what}: .* inside a replica"):
            pair.call_for_each_tower(lambda: use(pair))
        with pytest.raises(RuntimeError, match=rf"^{what}: .* inside the scope of"):
            use(distribute.OneDeviceStrategy("CPU:0"))


def test_scopes_for_variables_need_the_strategy_in_scope(
    pair: distribute.MirroredStrategy,
) -> None:
    with pair.scope():
        v = get_variable("v", initializer=0.0)
    with pytest.raises(RuntimeError, match="colocate_vars_with"), pair.colocate_vars_with(v):
        pass
    with (
        pytest.raises(RuntimeError, match=r"tower_local_var_scope: .*distribution\.scope\(\)"),
        pair.tower_local_var_scope("sum"),
    ):
        pass


@pytest.mark.parametrize("method", ["max", None, 1])
def test_ways_to_combine(method: Any, pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        t = pair.call_for_each_tower(tower_number)
        for use in (
            lambda: pair.reduce(method, t),
            lambda: pair.batch_reduce(method, [(t, None)]),
            lambda: pair.tower_local_var_scope(method).__enter__(),
        ):
            with pytest.raises(ValueError, match=rf"method.*={method!r}.*'sum' or 'mean'"):
                use()
        assert float(pair.reduce(dx.ReduceOp.SUM, t)) == float(pair.reduce("SUM", t)) == 3.0  # type: ignore[arg-type]


def test_functions_are_given_as_functions(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        v = get_variable("v", initializer=0.0)
        wrong: Any = 7
        for use in (
            lambda: pair.call_for_each_tower(wrong),
            lambda: pair.update(v, wrong),
            lambda: pair.update_non_slot(pair.non_slot_devices([v]), wrong),
            lambda: pair.fetch(v, fn=wrong),
            lambda: pair.call_for_each_tower(lambda: tower().merge_call(wrong)),
        ):
            with pytest.raises(TypeError, match="fn=7 is not callable"):
                use()


def test_values_that_cannot_be_combined_or_copied(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        t = pair.call_for_each_tower(tower_number)
        with pytest.raises(ValueError, match=r"(?s)^broadcast: tensor=PerReplica.*reduce\('sum'"):
            pair.broadcast(t)
        with pytest.raises(ValueError, match=r"one value that all 2 replicas share"):
            pair.reduce("sum", 3.0)
        with pytest.raises(ValueError, match=r"value_destination_pairs\[1\]=3.0 is not a pair"):
            pair.batch_reduce("sum", [(t, None), 3.0])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"fetch: destination=\['CPU:0'\] is a list"):
            pair.fetch(t, ["CPU:0"])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="does not exist"):
            pair.fetch(t, "CPU:99")


def test_variables_of_another_strategy(pair: distribute.MirroredStrategy) -> None:
    foreign = dx.Variable(0.0)
    with pair.scope():
        with pytest.raises(ValueError, match=r"^update: .*is not a variable that was created"):
            pair.update(foreign, lambda v: v)
        with pytest.raises(ValueError, match=r"^colocate_vars_with: .*not a variable"):
            pair.colocate_vars_with(foreign).__enter__()


def test_making_a_strategy() -> None:
    with pytest.raises(TypeError, match=r"strategy='CPU:0' is not a dx\.Strategy"):
        distribute.DistributionStrategy("CPU:0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"both devices=\['CPU:0'\] and num_gpus=1"):
        distribute.MirroredStrategy(["CPU:0"], num_gpus=1)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=rf"num_gpus={wrong!r} is not a count"):
            distribute.MirroredStrategy(num_gpus=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cross_device_ops='nccl' is not a"):
        distribute.MirroredStrategy(["CPU:0"], cross_tower_ops="nccl")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"replica_context=1 is not .*get_tower_context\(\)"):
        distribute.TowerContext(1)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:There is no GPU on this machine")
def test_gpus_are_asked_for_by_their_number() -> None:
    # No machine has that many; the message shows that GPUs were asked for.
    in_use = jnp.ones(3)  # Otherwise JAX would be started again, with as many CPU devices.
    with pytest.raises(ValueError, match=r"device='GPU:\d+' does not exist"):
        distribute.MirroredStrategy(num_gpus=99)
    del in_use


def test_algorithms_have_their_old_names() -> None:
    ops = distribute.ReductionToOneDeviceCrossTowerOps(reduce_to_device="CPU:2")
    d = distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_tower_ops=ops)
    assert isinstance(ops, distribute.CrossTowerOps)
    assert isinstance(distribute.AllReduceCrossTowerOps(), distribute.CrossTowerOps)
    assert d.strategy.extended.cross_device_ops is ops
    with d.scope():
        assert float(d.reduce("sum", d.call_for_each_tower(tower_number))) == 3.0


def test_data_sets(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        with pytest.raises(ValueError, match="dataset_fn returned None"):
            pair.distribute_dataset(lambda: None)
        with pytest.raises(TypeError, match="a data set cannot be made of 3"):
            pair.distribute_dataset(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name='' is not a name"),
        ({"name": 3}, "name=3 is not a name"),
        ({}, r"'w' is new and its shape is not known.*shape=\(\.\.\.\)"),
        ({"shape": (2,), "initializer": [1.0, 2.0]}, r"both shape=\(2,\) and an initial value"),
        ({"shape": (2, None)}, r"shape=\(2, None\) of 'w' is not a shape"),
        ({"shape": 1.5}, "shape=1.5 of 'w' is not a shape"),
        ({"shape": -1}, "shape=-1 of 'w' is not a shape"),
        ({"shape": (2,), "dtype": jnp.complex64}, "complex64 has no default initial value"),
        ({"shape": (2,), "initializer": lambda shape, dtype: jnp.ones(3)}, r"shape \(3,\)"),
        ({"shape": (2,), "reuse": "yes"}, "get_variable: reuse='yes' is not a mode"),
    ],
)
def test_get_variable(
    arguments: dict[str, Any], message: str, pair: distribute.MirroredStrategy
) -> None:
    with pair.scope():
        with pytest.raises(ValueError, match=message):
            get_variable(**({"name": "w"} | arguments))
        # Nothing is left of a variable that could not be made.
        assert get_variable("w", (2,), initializer=jnp.zeros).shape == (2,)


def test_a_variable_that_exists_must_fit(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        v = get_variable("v", (2, 3))
        with variable_scope("", reuse=True):
            assert get_variable("v", (2, 3), jnp.float32) is v
            with pytest.raises(ValueError, match=r"shape=\(3, 2\) .*'v' exists with shape \(2, 3"):
                get_variable("v", (3, 2))
            with pytest.raises(ValueError, match=r"shape=\(2,\) was asked for"):
                get_variable("v", initializer=[1.0, 2.0])
            with pytest.raises(ValueError, match=r"dtype=int32 .* exists with data type float32"):
                get_variable("v", (2, 3), jnp.int32)


def test_scopes_of_names() -> None:
    with pytest.raises(TypeError, match="name_or_scope=None is a NoneType"), variable_scope(None):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="variable_scope: reuse=1 is not a mode"):
        variable_scope("a", reuse=1).__enter__()
