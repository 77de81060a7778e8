"""`replica_id_in_sync_group`: one meaning, eager and compiled; and errors of traced conditions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, close


def _id() -> Any:
    context = dx.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def test_what_is_computed_is_the_replicas_own(case: Case) -> None:
    total = case.variable(0, aggregation="SUM")
    reduce = case.strategy.reduce

    def replica_fn() -> Any:
        total.assign_add(_id() + 1)
        total.assign_add(_id())
        chosen = jnp.where(_id() == 0, 10.0, 20.0) + (_id() > 0).astype(jnp.float32)
        computed = (_id() + 1, 5 - _id(), _id() * 0.5, jnp.arange(2) * _id(), -_id(), _id() % 2)
        return computed, chosen, _id().astype(jnp.float32), _id()

    def step() -> Any:
        computed, chosen, floats, ids = case.strategy.run(replica_fn)
        return computed, chosen, floats, ids, reduce("SUM", [ids, chosen], axis=None)

    computed, chosen, floats, ids, (sum_of_ids, sum_of_chosen) = case.across(step)
    n = case.num_replicas
    numbers = np.arange(n)
    expected = (numbers + 1, 5 - numbers, numbers * 0.5, None, -numbers, numbers % 2)
    for value, parts in zip(computed, expected, strict=True):
        if parts is not None:
            assert case.numbers(value) == parts.tolist()
    assert case.numbers(computed[3]) == [[0, index] for index in range(n)]
    assert [part.dtype for part in case.parts(computed[0])] == [np.int32] * n
    assert case.numbers(chosen) == [10.0, *[21.0] * (n - 1)]
    assert case.numbers(floats) == case.numbers(ids) == numbers.tolist()
    close((sum_of_ids, sum_of_chosen), (numbers.sum(), 10.0 + 21.0 * (n - 1)))
    assert int(total) == n * (n + 1) // 2 + n * (n - 1) // 2


def test_it_is_an_int_where_python_wants_one(case: Case) -> None:
    if case.compiled and not case.single:
        pytest.skip("a compiled step has no numbers, unless there is one replica by construction")

    def replica_fn() -> Any:
        own, number = _id(), int(_id())
        assert isinstance(own, int) and hash(own) == number and {own: "x"}[number] == "x"
        assert list(range(own + 1)) == list(range(number + 1))
        assert "ab" * own == "ab" * number and list("abcde")[own + 1] == list("abcde")[number + 1]
        assert f"{own} {own:02d}" == f"{number} {number:02d}" and json.dumps([own]) == f"[{number}]"
        assert copy.deepcopy(own) == number and own in (number, 9) and own != "a" and own != 7
        assert own <= number and not own < number and not own > number
        computed = (~own, abs(own), own << 1, own**2, *divmod(own, 2), own & 1, 2**own)
        expected = (~number, number, number << 1, number**2, *divmod(number, 2), number & 1)
        assert [int(each) for each in computed] == [*expected, 2**number]
        assert not hasattr(own, "__no_such_name__")
        return (jax.random.fold_in(jax.random.key(0), own), 1 if own == 0 else 2)

    case.run(replica_fn)


def _if_id(x: Any) -> Any:
    return x if _id() == 0 else x + 1


def _range_id(x: Any) -> Any:
    return [x for _ in range(_id())]


def _if_argument(batch: Any, *, scale: Any) -> Any:
    return batch["x"][1] if scale > 0 else batch["x"][0]


@pytest.mark.parametrize("fn", [_if_id, _range_id], ids=["if", "range"])
def test_a_compiled_condition_says_what_to_write(pair: Any, fn: Callable[..., Any]) -> None:
    step = dx.function(lambda x: pair.run(fn, args=(x,)))
    message = (
        rf"(?s)the function {fn.__name__} at \S*test_replica_id.py:\d+ for strategy.run\. .*"
        r"replica_id_in_sync_group is such a value.*jnp.where.*jax.lax.cond"
    )
    with pytest.raises(jax.errors.JAXTypeError, match=message):
        step(1.0)


def test_errors_name_the_users_arguments(pair: Any) -> None:
    batch = {"x": [1.0, 2.0]}
    message = r"(?s)the function _if_argument at .* the argument scale\.(?!.*replica_id).*jnp.where"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=message):
        dx.function(_if_argument)(batch, scale=1.0)
    run = dx.function(lambda b, s: pair.run(_if_argument, args=(b,), kwargs={"scale": s}))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=message):
        run(batch, 1.0)
    with pytest.raises(jax.errors.TracerArrayConversionError, match=r"argument a\['x'\]\[1\]"):
        dx.function(lambda a: np.asarray(a["x"][1]))(batch)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"arguments args\[0\] and"):
        dx.function(max)(1.0, 2.0)
