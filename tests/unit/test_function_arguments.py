"""Arguments and methods that `dx.function` shares with `tf.function`."""

from __future__ import annotations

import collections
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx

Spec = dx.data.TensorSpec


def test_arguments_of_tensorflow_are_accepted() -> None:
    @dx.function(
        autograph=False, jit_compile=True, reduce_retracing=True, experimental_relax_shapes=True
    )
    def double(x: Any) -> Any:
        return 2 * x

    assert float(double(2.0)) == 4.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'static_args'"):
        dx.function(static_args=1)  # type: ignore[call-overload]


def test_an_input_signature_says_what_is_accepted() -> None:
    @dx.function(input_signature=[Spec([None, 2], np.float32), {"n": Spec([], np.int32)}])
    def scale(x: Any, setting: Any) -> Any:
        return x * setting["n"]

    assert scale([[1, 2]], {"n": 3}).tolist() == [[3.0, 6.0]]
    assert scale(np.ones((3, 2), np.float32), {"n": jnp.asarray(2)}).shape == (3, 2)
    with pytest.raises(TypeError, match=r"has 2 argument\(s\), but 1 were given"):
        scale(np.ones((1, 2)))
    with pytest.raises(TypeError, match=r"argument 0 has shape \(2, 3\) .*has shape \(None, 2\)"):
        scale(np.ones((2, 3), np.float32), {"n": 1})
    with pytest.raises(TypeError, match=r"argument 0 has .*int32, but .*float32"):
        scale(np.ones((1, 2), np.int32), {"n": 1})
    with pytest.raises(TypeError, match="argument 1 has the structure"):
        scale(np.ones((1, 2), np.float32), {"m": 1})
    with pytest.raises(TypeError, match=r"argument 1 is 'text'.*: an array"):
        scale(np.ones((1, 2), np.float32), {"n": "text"})


def test_the_signature_of_distributed_input() -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = dx.data.Dataset.from_tensor_slices(np.arange(7.0, dtype=np.float32)).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)

    @dx.function(input_signature=[distributed.element_spec])
    def total(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)

    assert [float(total(batch)) for batch in distributed] == [6.0, 15.0]
    with pytest.raises(TypeError, match="a distributed value"):
        total(np.ones(4, np.float32))
    with pytest.raises(TypeError, match="data type int32"):
        total(dx.PerReplica([jnp.arange(2), jnp.arange(2)]))


def test_a_concrete_function_is_lowered_and_not_run() -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        count = dx.Variable(0.0, aggregation="SUM")

    @dx.function
    def step(x: Any) -> Any:
        strategy.run(lambda: count.assign_add(jnp.asarray(1.0)))
        return x @ x

    concrete = step.get_concrete_function(Spec([8, 8], np.float32))
    assert float(count) == 0.0
    assert "dot_general" in concrete.as_text()
    assert concrete.cost_analysis()["flops"] >= 2 * 8 * 8 * 7
    assert isinstance(concrete.lower(), jax.stages.Lowered)
    assert concrete.name.endswith("step")
    assert concrete.structured_input_signature == ((Spec([8, 8], np.float32),), {})
    assert "step" in repr(concrete)
    assert concrete(jnp.eye(8)).tolist() == np.eye(8).tolist()
    assert float(count) == 2.0
    # The program is the one that calls use.
    assert step.trace_count == 1
    with pytest.raises(ValueError, match=r"step=TensorSpec\(shape=\(None,\).* does not tell"):
        step.get_concrete_function(Spec([None], np.float32))


def test_a_concrete_function_of_its_own_signature_and_of_input() -> None:
    fixed = dx.function(lambda x: x + 1, input_signature=[Spec([2], np.float32)])
    assert "add" in fixed.get_concrete_function().as_text()

    iterator = iter(dx.data.Dataset.range(3))

    @dx.function
    def take(it: Any) -> Any:
        return next(it) + 0

    assert take.get_concrete_function(iterator).as_text()
    # What the trace has fetched is not lost.
    assert [int(take(iterator)) for _ in range(3)] == [0, 1, 2]

    @dx.function
    def loop(dataset: Any) -> Any:
        return sum(dataset)

    with pytest.raises(ValueError, match="loop is not one program"):
        loop.get_concrete_function(dx.data.Dataset.range(3))


def test_a_signature_takes_arguments_by_name() -> None:
    @dx.function(input_signature=[Spec([2], np.float32), Spec([], np.float32)])
    def scale(x: Any, by: Any, *, sign: int = 1) -> Any:
        return sign * x * by

    assert scale(by=3, x=[1, 2]).tolist() == scale([1, 2], by=3).tolist() == [3.0, 6.0]
    assert scale.trace_count == 1
    with pytest.raises(TypeError, match=r"\['sign'\] can be given by name only"):
        scale([1, 2], 3, sign=-1)
    with pytest.raises(TypeError, match="missing a required argument: 'by'"):
        scale([1, 2], bye=3)


def test_class_methods_and_static_methods() -> None:
    class Scaler:
        factor = 2.0

        @classmethod
        @dx.function
        def scale(cls, x: Any) -> Any:
            return x * cls.factor

        @staticmethod
        @dx.function
        def double(x: Any) -> Any:
            return 2 * x

    class Other(Scaler):
        factor = 3.0

    for _ in range(2):
        assert [float(each.scale(1.0)) for each in (Scaler, Other, Other())] == [2.0, 3.0, 3.0]
        assert float(Scaler.double(2.0)) == float(Other().double(2.0)) == 4.0
    assert Scaler.scale is Scaler.scale and Scaler.scale.trace_count == 1


def test_generators_and_coroutines_are_refused() -> None:
    def count(x: Any) -> Any:
        yield x

    async def wait(x: Any) -> Any:
        return x

    class Counter:
        def __call__(self, x: Any) -> Any:
            yield x

    for fn in (count, Counter()):
        with pytest.raises(TypeError, match=r"is a generator, .*return a list"):
            dx.function(fn)
    with pytest.raises(TypeError, match=r"wait is a coroutine, .*call it from the coroutine"):
        dx.function(wait)


def test_static_arguments_that_do_not_exist() -> None:
    def repeat(x: Any, n: int = 2) -> Any:
        return [x] * n

    with pytest.raises(ValueError, match=r"static_argnames has \['m'\], but .* are \['x', 'n'\]"):
        dx.function(repeat, static_argnames="m")
    with pytest.raises(ValueError, match=r"has \[2\], but .*\['x', 'n'\].*`self`.* not counted"):
        dx.function(repeat, static_argnums=2)(1.0)
    assert dx.function(lambda *xs: xs[2], static_argnums=2)(1, 2, "c") == "c"
    assert dx.function(lambda **named: named["n"], static_argnames="n")(n="c") == "c"
    assert dx.function(max, static_argnums=(0, 1), static_argnames="n")(1, 2) == 2


@pytest.mark.parametrize("make", [types.MappingProxyType, collections.UserDict, dict])
def test_static_arguments_after_containers(make: Any) -> None:
    @dx.function(static_argnums=1, donate_argnums=2)
    def repeat(x: Any, n: int, last: Any) -> Any:
        return [x["a"] + x["b"] + last] * n

    last = jnp.ones(())
    held = make({"a": jnp.ones(()), "b": jnp.zeros(())})
    assert [float(each) for each in repeat(held, 2, last)] == [2.0, 2.0]
    assert last.is_deleted() and not held["b"].is_deleted()
