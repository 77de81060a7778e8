"""Steps on workers, variables on servers: what users of the strategy see, with real processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribax as dx
from distribax.coordinator import round_watch


def test_variables_are_spread_by_size(strategy: dx.ParameterServerStrategy) -> None:
    with strategy.scope():
        large = dx.Variable(np.zeros((1000, 10), np.float32))
        small = [dx.Variable(np.zeros(10, np.float32)) for _ in range(4)]
    assert {variable.device for variable in small} == {small[0].device}
    assert large.device != small[0].device
    assert large.device.startswith("/job:ps/replica:0/task:")


def test_servers_let_workers_go_first(coordinator: Any) -> None:
    def niceness(pid: int) -> set[int]:
        tids = map(int, os.listdir(f"/proc/{pid}/task"))
        return {os.getpriority(os.PRIO_PROCESS, tid) for tid in tids}

    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness(coordinator.schedule(os.getpid).fetch()) == {own}
    deadline = time.monotonic() + 300
    # One that another test has killed is told of as it was before, for a while.
    while not all(
        os.path.isdir(f"/proc/{server.get('pid')}/task") for server in coordinator.status().servers
    ):
        assert time.monotonic() < deadline, "the servers do not say who they are"
        time.sleep(0.05)
    for server in coordinator.status().servers:
        # Ray's own threads must go on answering.
        assert niceness(server["pid"]) == {own, min(own + 10, 19)}


@pytest.mark.parametrize("wrap", [lambda fn: fn, dx.function], ids=["eager", "compiled"])
def test_workers_add_to_one_variable(
    strategy: dx.ParameterServerStrategy, coordinator: Any, wrap: Any
) -> None:
    with strategy.scope():
        total = dx.Variable(0)
        mean = dx.metrics.Mean()

    @wrap
    def step(x: Any) -> Any:
        def replica(x: Any) -> Any:
            total.assign_add(x)
            mean.update_state(jnp.asarray(x, jnp.float32))
            return x * 2

        return strategy.run(replica, args=(x,))

    results = [coordinator.schedule(step, args=(x,)) for x in range(20)]
    coordinator.join()
    assert coordinator.fetch(results) == [2 * x for x in range(20)]
    assert int(total) == sum(range(20))
    assert float(mean.result()) == pytest.approx(np.mean(range(20)))


def test_a_write_of_the_coordinator_is_seen_by_what_it_schedules(
    strategy: dx.ParameterServerStrategy, coordinator: Any
) -> None:
    with strategy.scope():
        flag = dx.Variable(np.zeros(3, np.float32))
    for number in range(5):
        flag.assign(np.full(3, number, np.float32))
        read = coordinator.schedule(lambda: flag.read_value())
        np.testing.assert_array_equal(read.fetch(), np.full(3, number))


def test_no_variables_are_made_on_workers(
    strategy: dx.ParameterServerStrategy, coordinator: Any
) -> None:
    coordinator.schedule(lambda: dx.Variable(1.0, name="mine"))
    with pytest.raises(RuntimeError, match=r"'mine' is created in a function.*coordinator"):
        coordinator.join()


def test_a_variable_of_this_process_cannot_be_sent(coordinator: Any) -> None:
    here = dx.Variable(1.0, name="here")
    with pytest.raises(TypeError, match=r"variable 'here'.*lives in this process only"):
        coordinator.schedule(lambda: here.read_value())
    other = dx.OneDeviceStrategy("CPU:0")
    with pytest.raises(TypeError, match=r"OneDeviceStrategy: a function that refers to it"):
        coordinator.schedule(lambda: other.num_replicas_in_sync)


def test_no_strategy_is_made_on_workers(coordinator: Any) -> None:
    coordinator.schedule(lambda: dx.ParameterServerStrategy())
    with pytest.raises(RuntimeError, match=r"created in a worker process.*__main__"):
        coordinator.join()


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels; the import, which sets an environment variable, is not a test's."""
    from sklearn.datasets import load_digits  # Slow to import: not when tests are collected.

    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32) / 16.0, labels.astype(np.int32)


class _Model:
    """A small network for the digits; its variables belong to the strategy in scope."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        sizes = [(64, 32), (32, 10)]
        self.variables: list[Any] = []
        for rows, columns in sizes:
            weights = rng.normal(size=(rows, columns)) / np.sqrt(rows)
            self.variables.append(dx.Variable(weights.astype(np.float32)))
            self.variables.append(dx.Variable(np.zeros(columns, np.float32)))

    def __call__(self, images: Any) -> Any:
        w1, b1, w2, b2 = [variable.value() for variable in self.variables]
        return jax.nn.relu(images @ w1 + b1) @ w2 + b2

    def loss(self, images: Any, labels: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(self(images), labels)
        return jnp.mean(losses)

    def accuracy(self, images: Any, labels: Any) -> float:
        return float(np.mean(np.argmax(self(images), axis=-1) == labels))


def _make_step(strategy: Any, model: _Model, optimizer: Any) -> Any:
    @dx.function
    def step(iterator: Any) -> Any:
        def replica(images: Any, labels: Any) -> Any:
            loss, grads = dx.value_and_grad(lambda: model.loss(images, labels), model.variables)()
            optimizer.apply_gradients(zip(grads, model.variables, strict=True))
            return loss

        return strategy.run(replica, args=next(iterator))

    return step


def test_digits_reach_the_accuracy_of_one_device(
    strategy: dx.ParameterServerStrategy,
    coordinator: Any,
    digits: tuple[np.ndarray, np.ndarray],
) -> None:
    images, labels = digits
    train, test = slice(0, 1500), slice(1500, None)

    def dataset_fn() -> Any:
        rows = dx.data.Dataset.from_tensor_slices((images[train], labels[train]))
        return rows.shuffle(1500).repeat().batch(50)

    def trained(where: Any, run: Any) -> float:
        with where.scope():
            model = _Model()
            optimizer = dx.Optimizer(optax.adam(0.01))
        run(_make_step(where, model, optimizer))
        assert int(optimizer.iterations.numpy()) == 200
        return model.accuracy(images[test], labels[test])

    def alone(step: Any) -> None:
        iterator = iter(one.experimental_distribute_dataset(dataset_fn()))
        for _ in range(200):
            step(iterator)

    def together(step: Any) -> None:
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        for _ in range(200):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    one = dx.OneDeviceStrategy("CPU:0")
    synchronous, asynchronous = trained(one, alone), trained(strategy, together)
    assert synchronous > 0.85
    assert asynchronous > synchronous - 0.05


def test_the_coordinator_knows_an_optimizer_that_workers_built(
    strategy: dx.ParameterServerStrategy, coordinator: Any, tmp_path: Any
) -> None:
    with strategy.scope():
        w = dx.Variable(np.ones(4, np.float32), name="w")
    optimizer = dx.Optimizer(optax.adam(0.1))

    @dx.function
    def step() -> Any:
        loss, grad = dx.value_and_grad(lambda: jnp.sum(w.value() ** 2), w)()
        optimizer.apply_gradients([(grad, w)])
        return loss

    for _ in range(3):
        coordinator.schedule(step)
    coordinator.join()
    assert int(optimizer.iterations.numpy()) == 3
    names = [variable.name for variable in optimizer.variables]
    assert names == [
        "Optimizer/iterations:0",
        "Optimizer/slot_0:0",
        "Optimizer/w/slot_1:0",
        "Optimizer/w/slot_2:0",
    ]
    path = dx.Checkpoint(w=w, optimizer=optimizer).save(tmp_path / "ckpt")
    before = w.numpy()
    with dx.OneDeviceStrategy("CPU:0").scope():
        same = dx.Variable(np.zeros(4, np.float32), name="w")
        again = dx.Optimizer(optax.adam(0.1))
        again.build([same])
    dx.Checkpoint(w=same, optimizer=again).restore(path)
    np.testing.assert_array_equal(same.numpy(), before)
    for ours, theirs in zip(optimizer.variables, again.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def _train_synchronously(make: Any, halves: Any, steps: int, disturb: Any) -> Any:
    """Trains a table with two workers that have half of a batch each; returns it with its scale.

    `disturb` is called with the coordinator before each step.
    """
    strategy = dx.ParameterServerStrategy(num_workers=2, num_ps=1, synchronous=True)
    try:
        coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none", worker_timeout=300)
        scale, table, step = make(strategy)
        for number in range(steps):
            disturb(number, coordinator)
            for half in halves:
                coordinator.schedule(step, args=(half,))
            coordinator.join()
        # One function alone is no update yet.
        coordinator.schedule(step, args=(halves[0],))
        coordinator.join()
        return float(scale), table.numpy()
    finally:
        strategy.close()


def test_synchronous_training_is_that_of_one_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happens to a worker: it is late, stopped, or killed and has to be started again."""
    monkeypatch.setattr(round_watch, "_LATE_SECONDS", 1.0)
    ids = np.array([[0, 1], [1, 5]])
    targets = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
    halves = list(zip(ids, targets, strict=True))

    def make(where: Any) -> tuple[Any, Any, Any]:
        with where.scope():
            scale = dx.Variable(np.float32(0.5), name="scale")
            table = dx.Variable(np.linspace(-1, 1, 8 * 3, dtype=np.float32).reshape(8, 3))
            optimizer = dx.Optimizer(optax.adam(0.1))

        def step(half: Any) -> Any:
            def replica(ids: Any, targets: Any) -> Any:
                def loss_fn() -> Any:
                    rows = dx.embedding_lookup(table, ids)
                    return jnp.mean((jnp.sum(rows, -1) * scale.value() - targets) ** 2)

                variables = [scale, table]
                loss, grads = dx.value_and_grad(loss_fn, variables)()
                optimizer.apply_gradients(zip(grads, variables, strict=True))
                return loss

            return where.run(replica, args=half)

        return scale, table, dx.function(step)

    one = dx.OneDeviceStrategy("CPU:0")
    scale, table, step = make(one)
    for _ in range(6):
        step((ids.reshape(-1), targets.reshape(-1)))

    timers: list[threading.Timer] = []

    def disturb(number: int, coordinator: Any) -> None:
        workers = coordinator.status().workers
        if number == 1:
            deadline = time.monotonic() + 300
            while any(each.state != "ready" for each in coordinator.status().workers):
                assert time.monotonic() < deadline, coordinator.status()
                time.sleep(0.05)
        elif number == 2:
            # Longer than anything waits, as long as nobody has asked for that.
            os.kill(workers[1].pid, signal.SIGSTOP)
            timers.append(threading.Timer(4.0, os.kill, (workers[1].pid, signal.SIGCONT)))
            timers[-1].start()
        elif number == 4:
            os.kill(workers[0].pid, signal.SIGKILL)

    try:
        with caplog.at_level("WARNING", "distribax"):
            found = _train_synchronously(make, halves, 6, disturb)
    finally:
        for timer in timers:
            timer.join()
    np.testing.assert_allclose(found[0], float(scale), rtol=1e-5)
    np.testing.assert_allclose(found[1], table.numpy(), rtol=1e-5, atol=1e-6)
    late = r"synchronous update has waited \d+ s for worker 1 \(running, pid \d+"
    assert re.search(late, caplog.text)
    assert "A synchronous update has 1 of 2 gradients" in caplog.text


# With the session's strategy, whose Ray the one of the test shares.
@pytest.mark.usefixtures("strategy")
def test_workers_compute_with_the_settings_of_the_coordinator() -> None:
    own = dx.ParameterServerStrategy(num_workers=1, num_ps=1)
    try:
        with jax.enable_x64(True):
            coordinator = dx.coordinator.ClusterCoordinator(own, view="none")
            with own.scope():
                large = dx.Variable(2**40)
                third = dx.Variable(1 / 3)
            step = dx.function(lambda: (large.assign_add(1).value(), third.value() * 3))
            for fn in (step, step.python_function):
                number, one = coordinator.schedule(fn).fetch()
                assert number > 2**40 and one == 1.0
            assert large.numpy() == 2**40 + 2
    finally:
        own.close()
