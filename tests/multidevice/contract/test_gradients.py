"""`dx.value_and_grad`: gradients with respect to variables, the replica's own in a replica."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import BATCH, Case, close, replica_number


def test_in_a_replica_the_gradient_is_its_own(case: Case) -> None:
    w, b = case.variable(2.0), case.variable(1.0)

    def replica_fn(x: Any) -> Any:
        return dx.value_and_grad(lambda x: jnp.sum((x * w + b) ** 2), (w, b))(x)

    loss, (dw, db) = case.run(replica_fn, case.split(BATCH))
    pieces = list(BATCH.reshape(case.num_replicas, -1))
    close(case.parts(loss), [((2 * x + 1) ** 2).sum() for x in pieces])
    close(case.parts(dw), [(2 * (2 * x + 1) * x).sum() for x in pieces])
    close(case.parts(db), [(2 * (2 * x + 1)).sum() for x in pieces])


def test_gradients_have_the_form_of_the_variables(case: Case) -> None:
    w, b = case.variable([1.0, 2.0]), case.variable(3.0)

    def loss() -> Any:
        return jnp.sum(w * w) * b

    def across() -> Any:
        single = dx.value_and_grad(loss, w)()[1]
        nest = dx.value_and_grad(loss, {"w": w, "rest": [b]})()[1]
        return single, nest

    single, nest = case.across(across)
    close(single, [6.0, 12.0])
    close(nest["w"], [6.0, 12.0])
    close(nest["rest"][0], 5.0)


def test_a_variable_that_is_named_twice_has_one_gradient(small: Case) -> None:
    """As tied weights are, in the lists of two layers."""
    w, b = small.variable(3.0), small.variable(1.0)
    differentiate = dx.value_and_grad(lambda: w * w * b, {"first": [w, b], "last": [w]})
    _, gradients = small.run(differentiate)
    parts = [*gradients["first"], *gradients["last"]]
    for part, expected in zip(parts, (6.0, 9.0, 6.0), strict=True):
        close(small.parts(part), [expected] * small.num_replicas)


def test_something_beside_the_loss(case: Case) -> None:
    w = case.variable(3.0)

    def replica_fn() -> Any:
        loss = lambda x, *, y: (w * x, {"y": y, "w": w.value()})  # noqa: E731
        return dx.value_and_grad(loss, w, has_aux=True)(replica_number(), y=5.0)

    (loss, aux), gradient = case.run(replica_fn)
    numbers = [index + 1.0 for index in range(case.num_replicas)]
    close(case.parts(loss), [3.0 * number for number in numbers])
    close(case.parts(gradient), numbers)
    assert aux["y"] == 5.0
    close(case.parts(aux["w"]), [3.0] * case.num_replicas)


def test_variables_that_are_not_asked_for_are_constants(case: Case) -> None:
    w, frozen = case.variable(2.0), case.variable(5.0)
    loss, gradient = case.across(lambda: dx.value_and_grad(lambda: w * frozen, w)())
    assert (float(loss), float(gradient)) == (10.0, 5.0)


def test_a_variable_that_is_not_used_has_no_gradient(case: Case) -> None:
    w, unused = case.variable(2.0), case.variable([1.0, 2.0])
    _, gradients = case.across(lambda: dx.value_and_grad(lambda: w * w, [w, unused])())
    close(gradients[1], [0.0, 0.0])


def test_assigning_inside_the_loss(case: Case) -> None:
    """As batch normalisation does with its running mean."""
    w = case.variable(2.0, aggregation="MEAN")
    mean = case.variable(0.0, aggregation="MEAN")
    count = case.variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def replica_fn() -> Any:
        def loss() -> Any:
            number = replica_number() * w
            mean.assign(number)
            count.assign_add(1.0)
            w.assign(w * 1.0)
            return number * number + mean

        return dx.value_and_grad(loss, [w, mean])()

    n = case.num_replicas
    loss, (dw, dmean) = case.run(replica_fn)
    numbers = np.arange(1.0, n + 1) * 2
    close(case.parts(loss), list(numbers**2 + numbers.mean()))
    close(case.parts(dw), list(numbers**2))
    close(case.parts(dmean), [1.0] * n)
    assert (float(mean), float(count), float(w)) == (numbers.mean(), n, 2.0)


def test_what_is_read_after_an_assignment_has_a_gradient(case: Case) -> None:
    """A loss function that normalises a weight before it uses it, for example."""
    w = case.variable([6.0, 8.0], aggregation="MEAN")

    def replica_fn() -> Any:
        def loss() -> Any:
            before = 3.0 * jnp.sum(w)
            w.assign(w / 2.0)
            return before + jnp.sum(w * w)

        return dx.value_and_grad(loss, w)()

    loss, gradient = case.run(replica_fn)
    close(case.parts(loss), [67.0] * case.num_replicas)
    close(case.parts(gradient), [[9.0, 11.0]] * case.num_replicas)
    close(w.numpy(), [3.0, 4.0])


def test_gradients_of_gradients(case: Case) -> None:
    w = case.variable(3.0)

    def replica_fn() -> Any:
        def slope() -> Any:
            return dx.value_and_grad(lambda: w**3 * replica_number(), w)()[1]

        return dx.value_and_grad(slope, w)()

    slope, second = case.run(replica_fn)
    numbers = np.arange(1.0, case.num_replicas + 1)
    close(case.parts(slope), list(27.0 * numbers))
    close(case.parts(second), list(18.0 * numbers))


def test_a_loss_over_all_replicas(compiled_case: Case) -> None:
    """Inside a function, the gradient may be taken around the whole run."""
    case = compiled_case
    w = case.variable(2.0)
    strategy = case.strategy

    def across(x: Any) -> Any:
        def loss() -> Any:
            losses = strategy.run(lambda x: jnp.sum((w * x) ** 2), args=(x,))
            return strategy.reduce("SUM", losses, axis=None)

        return dx.value_and_grad(loss, w)()

    loss, gradient = case.across(across, case.split(BATCH))
    close(loss, (4 * BATCH**2).sum())
    close(gradient, (4 * BATCH**2).sum())


def test_a_loss_over_eager_replicas_is_refused(pair: Any) -> None:
    with pair.scope():
        w = dx.Variable(2.0)
    loss = lambda: pair.reduce("SUM", pair.run(lambda: w * w), axis=None)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"strategy.run: called inside .*dx.value_and_grad"):
        dx.value_and_grad(loss, w)()


def test_the_jax_way(case: Case) -> None:
    """Pytrees in, pytrees out."""
    params = {"w": jnp.asarray(2.0), "b": jnp.asarray(1.0)}

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum((x * params["w"] + params["b"]) ** 2)

    def replica_fn(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return dx.get_replica_context().all_reduce("SUM", (value, gradients))

    value, gradients = case.run(replica_fn, params, case.split(BATCH))
    expected, wanted = jax.value_and_grad(loss)(params, jnp.asarray(BATCH))
    close(case.parts(value), [expected] * case.num_replicas)
    for name, gradient in gradients.items():
        close(case.parts(gradient), [wanted[name]] * case.num_replicas)


def test_the_loss_must_be_a_function() -> None:
    with pytest.raises(TypeError, match=r"value_and_grad: fn=3.0 is not callable"):
        dx.value_and_grad(3.0, dx.Variable(1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("variables", [None, 3.0, [jnp.ones(2)]])
def test_the_variables_must_be_variables(variables: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a nest of dx.Variable.*jax.value_and_grad"):
        dx.value_and_grad(lambda: 1.0, variables)


def test_there_must_be_variables() -> None:
    with pytest.raises(ValueError, match=r"variables=\[\] holds no variable.*model\.build"):
        dx.value_and_grad(lambda: 1.0, [])
