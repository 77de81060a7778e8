"""Which devices a strategy uses, in which order, makes no difference to a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import close, replica_number

STRATEGIES: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "out_of_order": (lambda: dx.MirroredStrategy(["CPU:3", "CPU:1"]), [3, 1]),
    "devices": (lambda: dx.MirroredStrategy([jax.devices()[6], jax.devices()[2]]), [6, 2]),
    "all_there_are": (dx.MirroredStrategy, list(range(8))),
    "long_name": (lambda: dx.MirroredStrategy(["/job:localhost/task:0/device:CPU:4"]), [4]),
    "central_on_a_worker": (
        lambda: dx.CentralStorageStrategy(["CPU:2", "CPU:0"], parameter_device="CPU:0"),
        [2, 0],
    ),
    "central_by_default": (lambda: dx.CentralStorageStrategy(["CPU:4", "CPU:3"]), [4, 3]),
    "central_alone": (lambda: dx.CentralStorageStrategy(["CPU:4"]), [4]),
    "one_device": (lambda: dx.OneDeviceStrategy("/device:CPU:7"), [7]),
}


@pytest.fixture(params=STRATEGIES)
def named(request: pytest.FixtureRequest) -> tuple[Any, list[int]]:
    make, ids = STRATEGIES[request.param]
    return make(), ids


def test_replicas_are_numbered_in_the_given_order(named: Any, compiled: bool) -> None:
    strategy, ids = named
    n = len(ids)
    with strategy.scope():
        mirrored = dx.Variable([1.0, 2.0], aggregation="SUM")
        own = dx.Variable([0.0, 0.0], synchronization="ON_READ", aggregation="SUM")

    def replica_fn(x: Any) -> Any:
        number = replica_number()
        own.assign_add(jnp.full((2,), number))
        mirrored.assign_add(x)
        context = dx.get_replica_context()
        return number + x[0] * 0, context.all_gather(number[None], axis=0), mirrored * number

    def step(x: Any) -> Any:
        numbers, joined, products = strategy.run(replica_fn, args=(x,))
        return numbers, joined, products, strategy.reduce("SUM", products, axis=0)

    value = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full((2,), context.replica_id_in_sync_group + 1.0)
    )
    step = dx.function(step) if compiled else step
    total = n * (n + 1) / 2
    before = mirrored.read_value()
    for count in (1, 2):
        numbers, joined, products, summed = step(value)
        local = strategy.experimental_local_results
        assert [float(part) for part in local(numbers)] == [index + 1.0 for index in range(n)]
        for part in local(joined):
            close(part, np.arange(1.0, n + 1))
        expected = np.asarray([1.0, 2.0]) + total * count
        close(mirrored, expected)
        close(own, [total * count] * 2)
        close(summed, expected.sum() * total)
        assert [next(iter(part.devices())).id for part in local(products)] == ids
    assert before.tolist() == [1.0, 2.0]
    own_parts = strategy.experimental_local_results(own)
    assert [float(part[0]) for part in own_parts] == [2.0 * (index + 1) for index in range(n)]
    assert [part.device[-1] for part in own_parts] == [str(index) for index in ids]


def test_values_move_between_strategies() -> None:
    """What one strategy has computed is an input of another."""
    first = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    second = dx.MirroredStrategy(["CPU:2", "CPU:3", "CPU:4"])
    total = first.reduce("SUM", first.run(replica_number), axis=None)
    numbers = second.run(lambda: total * replica_number())
    assert float(second.reduce("SUM", numbers, axis=None)) == 18.0
    mirrored = first.run(lambda: dx.get_replica_context().all_reduce("SUM", jnp.ones(2)))
    result = second.run(lambda x: x + 1, args=(mirrored,))
    assert len(second.experimental_local_results(result)) == 3


def test_arrays_bound_to_a_device_are_inputs(compiled: bool) -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    bound = jax.device_put(jnp.ones(2), jax.devices()[5])
    run = lambda x: strategy.run(lambda x: x * replica_number(), args=(x,))  # noqa: E731
    result = (dx.function(run) if compiled else run)(bound)
    assert [part.tolist() for part in strategy.experimental_local_results(result)] == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]


@pytest.mark.parametrize("devices", ["CPU:0", ["CPU:0", "CPU:0"], ["CPU:99"], ["TPU:0"], [3]])
def test_bad_devices_are_refused(devices: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"CPU:|device"):
        dx.MirroredStrategy(devices)
    with pytest.raises((ValueError, TypeError), match=r"CPU:|device"):
        dx.CentralStorageStrategy(devices)


def test_values_come_from_a_function(strategy: Any) -> None:
    with pytest.raises(TypeError, match=r"from_function: value_fn=3 is not callable"):
        strategy.experimental_distribute_values_from_function(3)
