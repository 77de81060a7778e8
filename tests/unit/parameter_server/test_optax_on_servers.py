"""Transformations of every kind of state on servers: as plain optax, or refused with a reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import distribax as dx
from distribax.testing import local_servers

RANDOM = np.random.default_rng(0)
SHAPES = [(4, 3), (4,)]
START = [RANDOM.normal(size=shape).astype(np.float32) for shape in SHAPES]
GRADS = [[RANDOM.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(2)]


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda param: param.ndim == 2, params)


def _label(params: Any) -> Any:
    return jax.tree.map(lambda param: "matrix" if param.ndim == 2 else "other", params)


_TWO = {"matrix": optax.adam(0.1), "other": optax.sgd(0.1, momentum=0.9)}
TRANSFORMATIONS = {
    "masked by a list": optax.masked(optax.adam(0.1), [True, False]),
    "masked": optax.masked(optax.adam(0.1), _is_matrix),
    "labels in a list": optax.multi_transform(_TWO, ["matrix", "other"]),
    "labels": optax.multi_transform(_TWO, _label),
    "sm3": optax.sm3(0.1),
    "muon": optax.contrib.muon(0.1, ns_steps=1),
    "lamb": optax.lamb(0.1),
    "polyak": optax.polyak_sgd(),
    "lookahead": optax.lookahead(optax.sgd(0.1), 2, 0.5),
}

ONE, SEVERAL, DIVIDED = "one server", "several servers", "divided variables"
_ALONE = "cannot be run for one of them alone"
_MORE = "computes an update from more than the array that it is for"
REFUSED = {
    (SEVERAL, "masked by a list"): _ALONE,
    (DIVIDED, "masked by a list"): _ALONE,
    (SEVERAL, "labels in a list"): _ALONE,
    (DIVIDED, "labels in a list"): _ALONE,
    (DIVIDED, "sm3"): "cannot be divided like its shards",
    (DIVIDED, "muon"): _MORE,
    (DIVIDED, "lamb"): _MORE,
    (SEVERAL, "polyak"): rf"{_ALONE}.*'value'",
    (DIVIDED, "polyak"): rf"{_ALONE}.*'value'",
} | {(place, "lookahead"): "keeps two sets of parameters" for place in (ONE, SEVERAL, DIVIDED)}


@contextlib.contextmanager
def _servers(place: str) -> Iterator[Any]:
    with local_servers(1 if place == ONE else 2) as strategy, strategy.scope():
        if place == DIVIDED:
            strategy.variable_partitioner = dx.partitioners.FixedShardsPartitioner(2)
        yield strategy


def _train_with_optax(transformation: Any, extra_args: dict[str, Any]) -> Any:
    transformation = optax.with_extra_args_support(transformation)
    params: Any = START
    state = transformation.init(params)
    for grads in GRADS:
        updates, state = transformation.update(grads, state, params, **extra_args)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("place", [ONE, SEVERAL, DIVIDED])
def test_it_trains_as_plain_optax(place: str, name: str) -> None:
    extra_args: Any = {"value": jnp.float32(1.0)} if name == "polyak" else {}
    with _servers(place):
        variables = [dx.Variable(value) for value in START]
        optimizer = dx.Optimizer(TRANSFORMATIONS[name])
        if reason := REFUSED.get((place, name)):
            with pytest.raises(ValueError, match=reason):
                optimizer.build(variables)
            return
        for grads in GRADS:
            optimizer.apply_gradients(zip(grads, variables, strict=True), **extra_args)
        expected = _train_with_optax(TRANSFORMATIONS[name], extra_args)
        for variable, value in zip(variables, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), value, rtol=1e-4, atol=1e-5)


def test_a_server_cannot_call_a_function() -> None:
    with _servers(ONE):
        w = dx.Variable(1.0)
        optimizer = dx.Optimizer(optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"value_fn=.* is a function, and a parameter server"):
            optimizer.apply_gradients([(1.0, w)], value_fn=lambda params: params[0])
