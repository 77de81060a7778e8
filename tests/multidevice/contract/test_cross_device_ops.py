"""The algorithms that combine values of different devices give one answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.environment import COMPLETE
from tests.multidevice.contract.cases import Case, close, replica_number


class Tree(dx.CrossDeviceOps):
    """What a user may write: add all values, and copy the sum to where it is wanted."""

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        values = [
            jax.device_put(value, jax.devices()[0]) if _concrete(value) else value
            for value in per_replica_value.values
        ]
        total = sum(values[1:], start=values[0])
        if reduce_op == dx.ReduceOp.MEAN:
            total = total / len(values)
        return self.broadcast(total, destinations)


def _concrete(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


OPS = {
    "all_reduce": dx.AllReduce,
    "one_by_one": lambda: dx.AllReduce(num_packs=0),
    "packs": lambda: dx.NcclAllReduce(num_packs=2),
    "hierarchical": dx.HierarchicalCopyAllReduce,
    "one_device": dx.ReductionToOneDevice,
    "to_the_last": lambda: dx.ReductionToOneDevice(reduce_to_device="CPU:1"),
    "elsewhere": lambda: dx.ReductionToOneDevice("CPU:7", accumulation_fn=jnp.add),
    "users": Tree,
}


@pytest.fixture(params=OPS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def _strategy(name: str, num_replicas: int) -> dx.MirroredStrategy:
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return dx.MirroredStrategy(devices, cross_device_ops=OPS[name]())


@pytest.mark.parametrize("num_replicas", [2, 3, 4] if COMPLETE else [3])
def test_every_algorithm_gives_the_same_answer(
    name: str, num_replicas: int, compiled: bool
) -> None:
    strategy = _strategy(name, num_replicas)
    with strategy.scope():
        variable = dx.Variable([[0.0, 0.0, 0.0]], aggregation="MEAN")

    def replica_fn() -> Any:
        number = replica_number()
        matrix = jnp.full((1, 3), number)
        context = dx.get_replica_context()
        variable.assign(matrix)
        reduced = context.all_reduce("SUM", {"a": number, "b": matrix})
        gathered = context.all_gather(matrix, axis=0)
        gradient = jax.grad(lambda w: context.all_reduce("SUM", w * number))(jnp.asarray(1.0))
        return number, matrix, reduced, gathered, gradient

    def step() -> Any:
        number, matrix, *rest = strategy.run(replica_fn)
        return [
            *rest,
            strategy.reduce("SUM", number, axis=None),
            strategy.reduce("MEAN", matrix, axis=0),
            strategy.gather(matrix, axis=0),
        ]

    results = (dx.function(step) if compiled else step)()
    reduced, gathered, gradient, total, mean, joined = results
    n = num_replicas
    local = strategy.experimental_local_results
    numbers = np.arange(1.0, n + 1)
    rows = np.repeat(numbers[:, None], 3, axis=1)
    for part in local(reduced["a"]):
        close(part, numbers.sum())
    for part in local(reduced["b"]):
        close(part, [[numbers.sum()] * 3])
    for part in local(gathered):
        close(part, rows)
    close([np.asarray(part) for part in local(gradient)], list(numbers * n))
    close(total, numbers.sum())
    close(mean, rows.mean(axis=0))
    close(joined, rows)
    close(variable, rows.mean(axis=0)[None])


@pytest.mark.parametrize("op", ["SUM", dx.ReduceOp.MEAN])
def test_an_algorithm_is_called_by_itself(name: str, op: Any) -> None:
    ops = OPS[name]()
    value = dx.PerReplica([jax.device_put(jnp.asarray(float(i)), jax.devices()[i]) for i in (0, 1)])
    expected = 1.0 if op == "SUM" else 0.5
    single = ops.reduce(op, value, ["CPU:0", "CPU:1"])
    assert isinstance(single, dx.Mirrored)
    assert [float(part) for part in single.values] == [expected] * 2
    plain, copies = ops.batch_reduce(op, [(value, "CPU:2"), (value, value)])
    assert (plain.devices(), float(plain)) == ({jax.devices()[2]}, expected)
    assert [float(part) for part in copies.values] == [expected] * 2
    assert isinstance(ops.reduce(op, value, ["CPU:2"]), jax.Array)
    assert ops.batch_reduce(op, []) == []
    copies = ops.broadcast(jnp.asarray(3.0), ["CPU:1", "CPU:3"])
    assert [float(part) for part in copies.values] == [3.0, 3.0]
    rows = dx.PerReplica([jnp.zeros((1, 2)), jnp.ones((2, 2))])
    assert ops.gather(rows, ["CPU:0"], axis=0).shape == (3, 2)


def test_a_mean_without_an_idle_replica_stays_on_all_devices() -> None:
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    strategy = dx.MirroredStrategy(devices, cross_device_ops=dx.ReductionToOneDevice())
    rows = dx.data.Dataset.from_tensor_slices(np.float32([1, 3])).batch(3)
    piece = next(iter(strategy.experimental_distribute_dataset(rows)))
    means = strategy.run(jnp.mean, args=(piece,))
    mean = strategy.extended.reduce_to("MEAN", means, devices)
    assert [float(copy) for copy in mean.values] == [2.0] * 3
    assert [device.rpartition("device:")[2] for device in mean.devices] == devices


def test_the_accumulation_is_the_users() -> None:
    calls: list[int] = []

    def add_all(values: Any) -> Any:
        calls.append(len(values))
        return sum(values)

    ops = dx.ReductionToOneDevice(accumulation_fn=add_all)
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    step = lambda: strategy.reduce("SUM", strategy.run(replica_number), axis=None)  # noqa: E731
    assert float(step()) == 3.0
    assert calls == [2]
    assert float(dx.function(step)()) == 3.0
    assert set(calls) == {2}


def test_gradients_are_packed(compiled: bool) -> None:
    case = Case("mirrored", 2, compiled)
    options = dx.CommunicationOptions(bytes_per_pack=12)
    shapes = [(), (2,), (1, 2), (5,), (), ()]

    def replica_fn() -> Any:
        number = replica_number()
        values = [jnp.full(shape, number) for shape in shapes]
        values.append(jnp.full((2,), number).astype(jnp.int32))
        return dx.get_replica_context().all_reduce("SUM", values, options)

    *floats, whole = case.run(replica_fn)
    for result, shape in zip(floats, shapes, strict=True):
        close(np.asarray(result), np.full(shape, 3.0))
    assert np.asarray(whole).tolist() == [3, 3]


def test_an_algorithm_must_say_how_to_reduce() -> None:
    class Empty(dx.CrossDeviceOps):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty does not say how.*reduce_implementation"):
        Empty().reduce("SUM", dx.PerReplica([1.0, 2.0]), None)


def test_algorithms_want_values_of_replicas() -> None:
    ops = dx.AllReduce()
    with pytest.raises(ValueError, match=r"reduce: per_replica_value=3.0 is not a PerReplica"):
        ops.reduce("SUM", 3.0, None)
    with pytest.raises(ValueError, match=r"value_destination_pairs\[1\]\[0\]=3.0 is not"):
        ops.batch_reduce("SUM", [(dx.PerReplica([1.0]), None), (3.0, None)])
    with pytest.raises(ValueError, match=r"gather: per_replica_value=3.0 is not"):
        ops.gather(3.0, None, axis=0)


def test_numbers_are_reduced_without_devices() -> None:
    result = dx.AllReduce().reduce("MEAN", dx.PerReplica([1.0, 2.0]), None)
    assert float(result) == 1.5


@pytest.mark.parametrize("num_packs", [-1, True, 1.5, "2"])
def test_packs_are_counted(num_packs: Any) -> None:
    with pytest.raises(ValueError, match=rf"num_packs={num_packs!r} is not a count"):
        dx.AllReduce(num_packs)


def test_the_accumulation_must_be_callable() -> None:
    with pytest.raises(TypeError, match=r"accumulation_fn=3 is not callable.*jnp.add"):
        dx.ReductionToOneDevice(accumulation_fn=3)  # type: ignore[arg-type]


def test_a_strategy_wants_an_algorithm() -> None:
    with pytest.raises(TypeError, match=r"cross_device_ops='nccl' is not a CrossDeviceOps"):
        dx.MirroredStrategy(["CPU:0"], cross_device_ops="nccl")  # type: ignore[arg-type]


def test_names_of_one_algorithm() -> None:
    assert dx.NcclAllReduce is dx.AllReduce
    assert dx.AllReduce() == dx.AllReduce()
    assert dx.AllReduce() != dx.HierarchicalCopyAllReduce()
    assert len({dx.AllReduce(), dx.AllReduce(), dx.AllReduce(2)}) == 2


@pytest.mark.parametrize(
    "ops", [dx.AllReduce, dx.HierarchicalCopyAllReduce, dx.ReductionToOneDevice], ids=str
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_small_types_are_counted_and_averaged(ops: Any, compiled: bool) -> None:
    strategy = dx.MirroredStrategy([f"CPU:{index}" for index in range(4)], ops())
    numbers = dx.PerReplica([jnp.asarray([200, 4 * index], jnp.uint8) for index in range(4)])
    seen = dx.PerReplica([jnp.asarray([True, False])] * 4)

    def combine() -> Any:
        def replica() -> Any:
            own = dx.get_replica_context()
            return own.all_reduce("MEAN", numbers), own.all_reduce("SUM", seen)

        outside = strategy.reduce("MEAN", numbers, axis=None), strategy.reduce("SUM", seen, None)
        return outside, strategy.run(replica)

    for mean, count in (dx.function(combine) if compiled else combine)():
        assert np.asarray(mean).ravel()[:2].tolist() == [200.0, 6.0]
        assert np.asarray(count).ravel()[:2].tolist() == [4, 0]
