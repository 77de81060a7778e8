"""Gradients in eager code: the loss function runs as written, whatever computes it."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.training import eager_gradients

X = jnp.arange(6.0).reshape(3, 2) / 5


@pytest.fixture
def weights(monkeypatch):
    monkeypatch.setattr(eager_gradients, "_histories", weakref.WeakKeyDictionary())
    return dx.Variable([[0.5, -1.0], [0.25, 2.0]])


def differentiate(fn, variable, *args, **options):
    """Returns what dx.value_and_grad and jax.value_and_grad give for a function of an array."""
    ours = dx.value_and_grad(lambda *a: fn(variable.value(), *a), variable, **options)(*args)
    plain = jax.value_and_grad(fn, **options)(variable.value(), *args)
    return ours, plain


def relu_loss(w, x):
    return jax.nn.logsumexp(jax.nn.relu(x @ w), axis=-1).mean()


def scan_loss(w, x):
    return jax.lax.scan(lambda carry, row: (carry + jnp.tanh(row @ w).sum(), None), 0.0, x)[0]


def mask_loss(w, x):
    y = x @ w
    return (y[y > 0] ** 2).sum()


def branch_loss(w, x):
    y = (x @ w).sum()
    return y * 2 if y > 0 else y * 3


def index_loss(w, x):
    best = int(jnp.argmax(x @ w))
    return (x @ w).ravel()[best] * jnp.power(w[0, 0], 2)


def host_loss(w, x):
    best = jnp.argmax(x @ w, axis=1)
    assert best.devices() == x.devices() and best.device == x.device
    counts = np.bincount(np.asarray(best), minlength=2) + best.tolist()[0] + float(best[0])
    return (x @ w).sum() * counts.sum()


def dropout_loss(w, x):
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return jnp.where(keep, x, 0.0).sum() * w.sum()


def loop_loss(w, x):
    return jax.lax.fori_loop(0, jnp.int32(3), lambda _, y: jnp.sin(y @ w), x).sum()


def nested_loss(w, x):
    return jax.grad(lambda v: jnp.tanh(v @ w).sum())(x).sum()


def own_jvp_loss(w, x):
    @jax.custom_jvp
    def scaled(y):
        return y * 3

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * 10))
    return scaled(x @ w).sum()


def own_vjp_loss(w, x):
    @jax.custom_vjp
    def scaled(y):
        return y * 2

    scaled.defvjp(lambda y: (scaled(y), None), lambda _, g: (g * 7,))
    return scaled(x @ w).sum()


@pytest.mark.parametrize(
    "fn",
    [
        relu_loss,
        scan_loss,
        mask_loss,
        branch_loss,
        index_loss,
        host_loss,
        dropout_loss,
        loop_loss,
        nested_loss,
        own_jvp_loss,
        own_vjp_loss,
        lambda w, x: jax.jit(relu_loss)(w, x) + jnp.float32(2.0),
        lambda w, x: jax.vmap(lambda row: jnp.cos(row @ w))(x).sum(),
        lambda w, x: jnp.array(3.0) + 0 * x.sum(),
    ],
)
def test_value_and_gradient_are_those_of_jax(weights, fn):
    for factor in (1.0, 2.0):
        ours, plain = differentiate(fn, weights, X * factor)
        assert isinstance(ours[0], jax.Array)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, plain)


def test_code_runs_at_each_call_and_one_program_computes_it(weights):
    calls = []

    def loss(x, weight):
        calls.append(weight)
        return (x @ weights).sum() * weight

    before = len(eager_gradients._programs)
    differentiated = dx.value_and_grad(loss, weights)
    values = [float(differentiated(X, weight)[0]) for weight in (1.0, 2.0, 3.0)]
    assert calls == [1.0, 2.0, 3.0]
    assert len(eager_gradients._programs) == before + 1
    np.testing.assert_allclose(values, [values[0], 2 * values[0], 3 * values[0]], rtol=1e-6)


def test_values_can_be_printed_and_asked_for(weights, capsys):
    def loss(x):
        y = (x @ weights).sum()
        print(y)
        return y

    value, _ = dx.value_and_grad(loss, weights)(X)
    assert f"primal={float(value):.2f}" in capsys.readouterr().out


def test_effects_happen_once_and_in_order(weights):
    seen = []

    def loss(x):
        y = (x @ weights).sum()
        jax.debug.callback(lambda v: seen.append(float(v)), y, ordered=True)
        return y * 2

    value, _ = dx.value_and_grad(loss, weights)(X)
    jax.effects_barrier()
    assert seen == [pytest.approx(float(value) / 2)]


def test_auxiliary_results_keep_their_form(weights):
    def loss(x):
        y = x @ weights
        return y.sum(), {"y": y, "name": "mine", "best": jnp.argmax(y), "x": x}

    (value, aux), _ = dx.value_and_grad(loss, weights, has_aux=True)(X)
    assert aux["name"] == "mine" and aux["x"] is X
    np.testing.assert_allclose(aux["y"], X @ weights.value(), rtol=1e-6)
    assert int(aux["best"]) == int(jnp.argmax(X @ weights.value()))
    assert float(value) == pytest.approx(float(aux["y"].sum()))


def test_variables_can_be_written_in_the_function(weights):
    total = dx.Variable(0.0)

    def loss(x):
        y = (x @ weights).sum()
        total.assign_add(y)
        return y * total

    for number in (1, 2):
        value, _ = dx.value_and_grad(loss, weights)(X)
        y = float((X @ weights.value()).sum())
        assert float(total) == pytest.approx(number * y)
        assert float(value) == pytest.approx(number * y * y)


def test_a_mean_is_stored_and_used(weights):
    """As in batch normalisation; JAX inlines `mean` and `clip`, with the numbers in them."""
    mean = dx.Variable(jnp.zeros(2))
    x = np.asarray(X)

    def loss(x):
        y = jnp.clip(x @ weights, -50.0, 50.0)
        centre = y.mean(axis=0)
        mean.assign(centre)
        return jnp.sum((y - centre) ** 2)

    def expected(w):
        y = x @ w
        return jnp.sum((y - y.mean(axis=0)) ** 2)

    for _ in range(2):
        value, grad = dx.value_and_grad(loss, weights)(X)
        wanted = jax.value_and_grad(expected)(weights.value())
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(grad, wanted[1], rtol=1e-5)
        np.testing.assert_allclose(mean.numpy(), (x @ weights.value()).mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda w, x: x @ w, "scalar-output"),
        (lambda w, x: (x @ w).astype(int).sum(), "real- or complex-valued|float"),
        (lambda w, x: "loss", "not a valid JAX type|scalar"),
    ],
)
def test_errors_are_those_of_jax(weights, fn, message):
    with pytest.raises(TypeError, match=message):
        dx.value_and_grad(lambda x: fn(weights.value(), x), weights)(X)


def test_value_that_leaves_the_function_is_refused(weights):
    kept = []

    def loss(x):
        kept.append(x @ weights)
        return kept[-1].sum()

    dx.value_and_grad(loss, weights)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        print(kept[0])
    with pytest.raises(jax.errors.UnexpectedTracerError):
        _ = kept[0] + 1


def test_operations_that_are_new_each_time_are_not_compiled_for_ever(weights, monkeypatch):
    monkeypatch.setattr(eager_gradients, "_MAX_NEW_PROGRAMS", 2)

    def loss(x, size):
        return (x @ weights)[:, :size].sum() * jnp.ones(size).sum()

    before = len(eager_gradients._programs)
    rows = jnp.ones((1, 2))
    for size in (1, 2):
        dx.value_and_grad(loss, weights)(rows, size)
    # A third form is computed operation by operation, and compiled when it occurs again.
    for expected in (2, 3, 3):
        wide = jnp.ones((5, 2))
        value, _ = dx.value_and_grad(loss, weights)(wide, 1)
        assert float(value) == pytest.approx(float((wide @ weights.value())[:, :1].sum()))
        assert len(eager_gradients._programs) == before + expected


def test_value_read_before_an_update_stays(weights):
    optimizer = dx.Optimizer(optax.sgd(0.1))
    before, copy = weights.value(), np.array(weights.value())
    for _ in range(2):
        _, gradient = dx.value_and_grad(lambda: (X @ weights).sum(), weights)()
        optimizer.apply_gradients([(gradient, weights)])
    np.testing.assert_array_equal(before, copy)
    assert not np.allclose(weights.numpy(), copy)
