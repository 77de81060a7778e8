"""`get_variable`: placement in both contexts, tower-local variables, and TensorFlow 1's reuse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from distribax.contrib import distribute
from distribax.contrib.distribute import AUTO_REUSE, get_variable, variable_scope
from tests.multidevice.tower_api.cases import Case, names, tower, tower_number

# V(v) and N: in tower and cross-tower context.


def _made_everywhere(case: Case, make: Callable[[str], Any]) -> list[dx.Variable]:
    """Makes a variable in the cross-tower context, one in a tower, and one in a merge call."""

    def tower_fn() -> Any:
        return make("in_tower"), tower().merge_call(lambda distribution: make("in_merge"))

    def step() -> None:
        make("across")
        case.d.call_for_each_tower(tower_fn)

    case.across(step)
    with case.d.scope(), variable_scope("", reuse=True):
        return [get_variable(name) for name in ("across", "in_tower", "in_merge")]


def test_get_variable_places_by_the_strategy_in_both_contexts(case: Case) -> None:
    made = _made_everywhere(case, lambda name: get_variable(name, (2,), initializer=jnp.ones))
    for variable in made:
        assert names(variable) == case.d.parameter_devices
        with case.d.scope():
            copies = [np.asarray(copy).tolist() for copy in case.d.unwrap(variable)]
        assert copies == [[1.0, 1.0]] * len(case.d.parameter_devices)


def test_colocate_vars_with_a_variable_in_both_contexts(case: Case) -> None:
    v1 = case.variable(0.0)

    def make(name: str) -> Any:
        with case.d.colocate_vars_with(v1):
            return get_variable(name, initializer=1.0)

    for v2 in _made_everywhere(case, make):
        assert v2.devices == v1.devices


def test_colocate_vars_with_non_slot_devices_in_both_contexts(case: Case) -> None:
    v = case.variable(0.0)
    expected = v if case.kind == "default" else case.d.parameter_devices
    assert case.d.non_slot_devices([v]) == expected

    def make(name: str) -> Any:
        with case.d.colocate_vars_with(case.d.non_slot_devices([v])):
            return get_variable(name, initializer=1.0)

    for beta in _made_everywhere(case, make):
        assert names(beta) == case.d.parameter_devices


def test_colocate_vars_with_a_tower_local_variable_makes_a_mirrored_one(small: Case) -> None:
    with small.d.scope():
        with small.d.tower_local_var_scope("sum"):
            local = get_variable("local", initializer=0.0)
        with small.d.colocate_vars_with(local):
            beside = get_variable("beside", initializer=0.0)
    assert beside.trainable
    assert not beside.per_replica


# tower_local_var_scope


@pytest.mark.parametrize("method", ["sum", "mean"])
def test_tower_local_variables_differ_by_tower_and_are_combined_when_fetched(
    case: Case, method: str
) -> None:
    with case.d.scope(), case.d.tower_local_var_scope(method):
        named = get_variable("local", initializer=0.0)
        # Whoever makes it: a variable of a library is tower-local here too, and not trainable.
        plain = dx.Variable(0.0, True)
    total = sum(case.numbers)
    expected = total if method == "sum" else total / len(case.ids)

    def tower_fn() -> Any:
        for local in (named, plain):
            local.assign_add(tower_number())
        return named.read_value()

    case.expect(case.towers(tower_fn), distribute.PerDevice, case.numbers)
    for local in (named, plain):
        assert not local.trainable
        assert float(case.across(lambda v=local: case.d.fetch(v))) == expected
        assert float(case.across(lambda v=local: case.d.fetch(v, fn=jnp.negative))) == -expected
        assert case.unwrap(local) == case.numbers


def test_tower_local_scopes_end(small: Case) -> None:
    with small.d.scope():
        with small.d.tower_local_var_scope("mean"):
            local = get_variable("local", initializer=0.0)
        after = get_variable("after", initializer=0.0)
    assert not local.trainable
    assert after.trainable
    assert after.aggregation is dx.VariableAggregation.NONE


def test_variables_made_in_towers_start_the_same_in_all_of_them(case: Case) -> None:
    rng = np.random.default_rng(1)

    def tower_fn() -> Any:
        with case.d.tower_local_var_scope("mean"):
            return get_variable("v", (), initializer=lambda shape, dtype: rng.normal(size=shape))

    case.towers(tower_fn)
    with case.d.scope():
        copies = case.unwrap(get_variable("v", reuse=True))
    assert len(copies) == case.d.num_towers
    assert len(set(copies)) == 1


# Reuse.


def test_a_step_that_runs_again_finds_its_variables(small: Case) -> None:
    """As in a graph that is built once: no word of reuse is needed, eager or compiled."""

    def tower_fn(x: Any) -> Any:
        with variable_scope("layer"):
            w = get_variable("w", initializer=1.0, aggregation="MEAN")
        w.assign_add(x)
        return w.read_value()

    with small.d.scope():
        step = small.step(lambda x: small.d.call_for_each_tower(tower_fn, x))
        results = [step(x) for x in (jnp.asarray(1.0), jnp.asarray(2.0))]
        # Another signature traces a compiled step again.
        step(np.float16(4.0))
        assert float(get_variable("layer/w", reuse=True)) == 8.0
    assert [small.unwrap(result)[0] for result in results] == [2.0, 4.0]


def test_a_step_that_makes_variables_across_towers(small: Case) -> None:
    def step(x: Any) -> Any:
        v = get_variable("v", initializer=1.0, reuse=AUTO_REUSE)
        v.assign_add(x)
        return v.read_value()

    with small.d.scope():
        run = small.step(step)
        assert [float(run(x)) for x in (1.0, 2.0, np.ones((), np.float16))] == [2.0, 4.0, 5.0]


def test_a_compiled_step_needs_no_word_of_reuse(pair: distribute.MirroredStrategy) -> None:
    """It is traced more than once, and may be run by the host after it has made a variable."""

    @dx.function
    def step(x: Any) -> Any:
        return get_variable("v", initializer=1.0) + x

    @dx.function
    def epoch(dataset: Any) -> Any:
        total = get_variable("total", initializer=0.0)
        for x in dataset:
            total.assign_add(pair.strategy.reduce("SUM", x, axis=0))
        return total

    with pair.scope():
        assert float(step(1.0)) == 2.0
        assert np.asarray(step(np.ones(2, np.float32))).tolist() == [2.0, 2.0]
        dataset = dx.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)
        distributed = pair.strategy.experimental_distribute_dataset(dataset)
        assert float(epoch(distributed)) == 10.0
        assert float(epoch(distributed)) == 20.0


def test_within_a_run_a_name_must_be_new(small: Case) -> None:
    """The accident that reuse guards against: a layer that is called twice by mistake."""

    def layer(x: Any) -> Any:
        return x * get_variable("w", initializer=2.0)

    with pytest.raises(ValueError, match=r"'w' exists already.*reuse=AUTO_REUSE"):
        small.towers(lambda: layer(layer(1.0)))


def test_a_tower_function_that_compiles_by_itself(pair: distribute.MirroredStrategy) -> None:
    @dx.function
    def layer(x: Any) -> Any:
        return x * get_variable("w", initializer=2.0)

    with pair.scope():
        for x in (1.0, 2.0, np.float16(3.0)):
            result = pair.call_for_each_tower(layer, x)
            assert [float(part) for part in pair.unwrap(result)] == [2.0 * x] * 2
        assert layer.trace_count > 1
        distribute.reset_variable_store()
        with pytest.raises(ValueError, match="'w' exists already"):
            pair.call_for_each_tower(dx.function(lambda: layer(layer(1.0))))


def test_functions_do_not_take_each_others_names(small: Case) -> None:
    class Model:
        def tower_fn(self) -> Any:
            return get_variable("w", initializer=1.0) + 0

    model, other = Model(), Model()
    small.towers(model.tower_fn)
    small.towers(functools.partial(model.tower_fn))
    with pytest.raises(ValueError, match="'w' exists already"):
        small.towers(other.tower_fn)
    with pytest.raises(ValueError, match="'w' exists already"):
        small.across(lambda: small.d.call_for_each_tower(lambda: get_variable("w") + 0))
    with small.d.scope(), variable_scope("other"):
        small.d.call_for_each_tower(other.tower_fn)
        assert get_variable("w", reuse=True).name == "other/w:0"


def test_a_name_of_the_cross_tower_context_is_not_new_in_a_tower(small: Case) -> None:
    def step() -> None:
        get_variable("w", initializer=1.0)
        small.d.call_for_each_tower(lambda: get_variable("w"))

    with pytest.raises(ValueError, match="'w' exists already"):
        small.across(step)


def test_code_that_runs_once_must_say_that_it_reuses(small: Case) -> None:
    with small.d.scope():
        v = get_variable("v", initializer=1.0)
        with pytest.raises(ValueError, match=r"'v' exists already: variable 'v' \(shape \(\)"):
            get_variable("v", initializer=1.0)
        with pytest.raises(ValueError, match=r"'w' does not exist, but reuse=True.*: 'v'\."):
            get_variable("w", reuse=True)
        assert get_variable("v", reuse=True) is v
        assert get_variable("v", reuse=AUTO_REUSE) is v
        with variable_scope("", reuse=True):
            assert get_variable("v") is v
            with pytest.raises(ValueError, match="'v' exists already"):
                get_variable("v", reuse=False)


def test_towers_share_what_the_first_has_made(pair: distribute.MirroredStrategy) -> None:
    def tower_fn() -> Any:
        if tower().tower_id > 0:
            get_variable("v" if shared else "only_here", initializer=1.0)
        elif shared:
            get_variable("v", initializer=1.0)

    with pair.scope():
        shared = True
        pair.call_for_each_tower(tower_fn)
        assert pair.unwrap(get_variable("v", reuse=True))[1].name == "v/replica_1:0"
        shared = False
        with pytest.raises(RuntimeError, match="Every replica must create the same variables"):
            pair.call_for_each_tower(tower_fn)


def test_each_strategy_has_its_own_names(pair: distribute.MirroredStrategy) -> None:
    other = distribute.OneDeviceStrategy("CPU:2")
    with pair.scope():
        first = get_variable("v", (3, 4))
    with other.scope():
        second = get_variable("v", (3, 4))
        distribute.reset_variable_store()
        third = get_variable("v", (3, 4))
    assert len({id(v) for v in (first, second, third)}) == 3
    # Random values depend on the name alone.
    assert first.numpy().tolist() == second.numpy().tolist() == third.numpy().tolist()


# Scopes of names.


def test_scopes_nest_and_hand_down_what_they_say(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        with variable_scope("a", initializer=5.0, dtype=jnp.int32) as a, variable_scope("b") as b:
            v = get_variable("v", shape=(2,))
            assert repr(b) == "<VariableScope 'a/b', reuse=False>"
        assert (v.name, v.numpy().tolist(), v.dtype) == ("a/b/v:0", [5, 5], jnp.int32)
        with variable_scope("c", reuse=AUTO_REUSE), variable_scope("d", reuse=False) as d:
            # Reuse is inherited: a scope inside cannot take it back.
            assert d.reuse is AUTO_REUSE
            # A scope that was left is entered as it is.
            with variable_scope(a, reuse=True) as again:
                assert (again.name, again.reuse) == ("a", True)
                assert get_variable("b/v") is v
        assert distribute.get_variable_scope().name == ""


def test_reuse_variables_from_now_on(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        with variable_scope("a") as scope:
            v = get_variable("v", initializer=0.0)
            scope.reuse_variables()
            assert get_variable("v") is v
        distribute.get_variable_scope().reuse_variables()
        assert get_variable("a/v") is v
        distribute.reset_variable_store()
        assert get_variable("a/v", initializer=0.0) is not v


# Initial values, shapes and data types.


class _Untold:
    """An initializer that Python knows no signature of, as of some that are written in C."""

    @property
    def __signature__(self) -> Any:
        raise ValueError("no signature found")

    def __call__(self, shape: Any, dtype: Any) -> Any:
        return np.full(shape, 7, dtype)


@pytest.mark.parametrize(
    ("arguments", "expected", "dtype"),
    [
        ({"initializer": 2}, 2, jnp.int32),
        ({"initializer": [1.0, 2.0]}, [1.0, 2.0], jnp.float32),
        ({"initializer": 2, "dtype": jnp.float32}, 2.0, jnp.float32),
        ({"initializer": lambda: np.ones(2, np.float32)}, [1.0, 1.0], jnp.float32),
        ({"shape": 2, "initializer": jnp.ones}, [1.0, 1.0], jnp.float32),
        ({"shape": [2], "initializer": jnp.ones, "dtype": jnp.int32}, [1, 1], jnp.int32),
        ({"shape": (2,), "dtype": jnp.int32}, [0, 0], jnp.int32),
        ({"shape": (1,), "dtype": jnp.bool_}, [False], jnp.bool_),
        ({"shape": (0, 3)}, [], jnp.float32),
        ({"shape": (2,), "initializer": jax.nn.initializers.constant(3.0)}, [3, 3], jnp.float32),
        ({"shape": (2,), "initializer": np.ones}, [1.0, 1.0], jnp.float32),
        ({"shape": (2,), "initializer": _Untold()}, [7.0, 7.0], jnp.float32),
    ],
)
def test_initial_values(
    pair: distribute.MirroredStrategy, arguments: dict[str, Any], expected: Any, dtype: Any
) -> None:
    with pair.scope():
        v = get_variable("v", **arguments)
    assert v.numpy().tolist() == expected
    assert v.dtype == dtype


@pytest.mark.parametrize(
    ("shape", "limit"), [((), 3**0.5), ((4,), 0.75**0.5), ((200, 100), 0.02**0.5)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_default_initial_value_is_uniform(shape: Any, limit: float, dtype: Any) -> None:
    d = distribute.OneDeviceStrategy("CPU:0")
    with d.scope():
        one, two = get_variable("one", shape, dtype), get_variable("two", shape, dtype)
    values = np.concatenate([v.numpy().astype(float).ravel() for v in (one, two)])
    assert (np.abs(values) <= limit * 1.01).all()
    assert len(set(values)) > 1
    if len(values) > 1000:
        assert abs(values.mean()) < 0.05 * limit
        assert values.std() == pytest.approx(limit / 3**0.5, rel=0.05)


def test_a_convolution_counts_its_window_into_the_scale() -> None:
    with distribute.OneDeviceStrategy("CPU:0").scope():
        kernel = get_variable("kernel", (3, 3, 16, 32)).numpy()
    limit = (6 / (9 * (16 + 32))) ** 0.5
    assert limit * 0.9 < np.abs(kernel).max() <= limit


def test_jax_initializers_are_given_a_key(pair: distribute.MirroredStrategy) -> None:
    with pair.scope():
        a = get_variable("a", (8,), initializer=jax.nn.initializers.normal())
        b = get_variable("b", (8,), initializer=jax.nn.initializers.normal())
    assert a.numpy().tolist() != b.numpy().tolist()
