"""MultiWorkerMirroredStrategy in real processes, compared with the one-device answer."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.workers import run_workers

pytestmark = pytest.mark.multiprocess

SETUPS = {
    "eager-1": (1, False),
    "compiled-2": (2, True),
    "eager-2": (2, False),
    "compiled-1": (1, True),
}
"""Devices of each worker, and mode."""


def _try_all(in_short: str) -> pytest.MarkDecorator:
    """Returns a mark that tries one setup in `make test`, and all of them in `make contract`.

    Two functions have both modes and both numbers of devices between them; the contract runs in
    workers with two devices in both modes.
    """
    cases = [
        pytest.param(*setup, id=name, marks=() if name == in_short else pytest.mark.thorough)
        for name, setup in SETUPS.items()
    ]
    return pytest.mark.parametrize(("devices", "compiled"), cases)


# What every program begins with: the strategy, and a line of JSON for the test to read.
START = """
import json, sys
import numpy as np, jax, jax.numpy as jnp, optax
import distribax as dx

dx.set_virtual_cpu_devices({devices})
strategy = dx.MultiWorkerMirroredStrategy()
compiled = {compiled}
worker = jax.process_index()

def step(fn):
    return dx.function(fn) if compiled else fn

def plain(x):
    if isinstance(x, (dx.PerReplica, dx.Mirrored)):
        return [np.asarray(v).tolist() for v in strategy.experimental_local_results(x)]
    return np.asarray(x).tolist()

def tell(**values):
    print(json.dumps({{k: jax.tree.map(plain, v) for k, v in values.items()}}))
"""


def run(program: str, devices: int, compiled: bool) -> list[dict[str, Any]]:
    source = START.format(devices=devices, compiled=compiled) + textwrap.dedent(program)
    results = run_workers(source, 2)
    for result in results:
        assert result.returncode == 0, f"worker {result.worker_id}:\n{result.stderr[-3000:]}"
    return [json.loads(result.stdout.strip().splitlines()[-1]) for result in results]


@_try_all("eager-1")
def test_replicas_values_variables_and_input(devices: int, compiled: bool) -> None:
    n = 2 * devices
    first, second = run(
        """
        seed = np.random.default_rng(worker)
        with strategy.scope():
            random = dx.Variable(seed.normal(size=3).astype(np.float32))
            called = dx.Variable(lambda: seed.normal(size=2).astype(np.float32))
            mean = dx.Variable(0.0, aggregation="MEAN")
            one = dx.Variable(0.0, aggregation="ONLY_FIRST_REPLICA")
            own = dx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

        @step
        def go():
            def replica():
                context = dx.get_replica_context()
                number = context.replica_id_in_sync_group
                value = jnp.asarray(number, jnp.float32)
                mean.assign_add(value)
                one.assign(value + 5)
                own.assign_add(value)
                total = context.all_reduce("SUM", {"a": value + 1, "b": jnp.ones(2)})
                joined = context.all_gather(value[None], axis=0)
                met = context.merge_call(lambda s, x: s.reduce("MEAN", x, axis=None), args=(value,))
                slope = jax.grad(lambda x: (context.all_reduce("SUM", x) ** 2))(value)
                return number, total, joined, met, slope
            return strategy.run(replica)

        number, total, joined, met, slope = go()
        given = strategy.experimental_distribute_values_from_function(
            lambda c: np.full(2, c.replica_id_in_sync_group, np.float32))
        tell(
            random=random.numpy(), called=called.numpy(), mean=mean.numpy(), one=one.numpy(),
            own=own.numpy(), number=number, total=total["a"], joined=joined, met=met, slope=slope,
            sum=strategy.reduce("SUM", number, axis=None),
            along=strategy.reduce("MEAN", given, axis=0),
            gathered=strategy.gather(given, axis=0),
            count=strategy.num_replicas_in_sync, summary=str(dx.summary(strategy)),
        )
        """,
        devices,
        compiled,
    )
    ids = np.arange(n)
    for worker, told in enumerate((first, second)):
        local = ids[worker * devices : (worker + 1) * devices].tolist()
        assert told["count"] == n
        assert told["summary"].count("process 1") == devices, "the mesh says whose a device is"
        assert told["number"] == local
        assert told["mean"] == ids.mean()
        assert told["one"] == 5
        assert told["own"] == ids.sum()
        assert told["total"] == [n * (n + 1) / 2] * devices
        assert told["joined"] == [ids.tolist()] * devices
        assert np.unique(told["met"]).tolist() == [ids.mean()]
        assert told["slope"] == [2.0 * ids.sum() * n] * devices
        assert told["sum"] == ids.sum()
        assert told["along"] == ids.mean()
        assert told["gathered"] == np.repeat(ids, 2).tolist()
    assert first["random"] == second["random"]
    assert first["called"] == second["called"]


# The eager one compiles every operation of NNX in both workers; the contract has eager replicas.
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["eager", "compiled"]
)
def test_nnx_models_start_with_the_values_of_the_first_worker(compiled: bool) -> None:
    """Parameters, statistics, optimizer state and random keys, whatever each worker's seed."""
    pytest.importorskip("flax.nnx")
    told = run(
        """
        from flax import nnx

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.linear = nnx.Linear(3, 4, rngs=rngs)
                self.norm = nnx.BatchNorm(4, rngs=rngs)
                self.drop = nnx.Dropout(0.5, rngs=rngs)

            def __call__(self, x):
                return self.drop(self.norm(self.linear(x)))

        model = Model(nnx.Rngs(7 * worker))
        own = np.asarray(model.linear.kernel[...])
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        optimizer.opt_state[0].mu.linear.bias[...] = jnp.full(4, 1.0 + worker)

        @step
        def go(x):
            def replica(x):
                loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
                optimizer.update(model, grads)
                return loss
            return strategy.run(replica, args=(x,))

        values = strategy.experimental_distribute_values_from_function(
            lambda c: np.full((2, 3), 1.0 + c.replica_id_in_sync_group, np.float32))
        for _ in range(2):
            go(values)
        # Values that the workers set later are their own business, as with dx.Variable.assign.
        model.norm.bias[...] = model.norm.bias[...] + 1.0
        go(values)
        state = nnx.to_pure_dict(nnx.state((model, optimizer), nnx.Not(nnx.RngState)))
        keys = nnx.state(model, nnx.RngKey)
        tell(
            own=own,
            state=[np.asarray(leaf) for leaf in jax.tree.leaves(state)],
            keys=[np.asarray(jax.random.key_data(k)) for k in jax.tree.leaves(keys)],
        )
        """,
        2,
        compiled,
    )
    assert told[0]["own"] != told[1]["own"]
    assert told[0]["state"] == told[1]["state"] and told[0]["keys"] == told[1]["keys"]


TRAINING = """
random = np.random.default_rng(0)
x = random.normal(size=(22, 3)).astype(np.float32)
y = (x @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
with strategy.scope():
    w = dx.Variable(np.zeros(3, np.float32))
    optimizer = dx.Optimizer(optax.adam(0.05))
    seen = dx.metrics.Sum()

@step
def train(features, labels):
    def replica(features, labels):
        def loss():
            return dx.compute_average_loss((features @ w - labels) ** 2, global_batch_size=8)
        value, gradient = dx.value_and_grad(loss, w)()
        optimizer.apply_gradients([(gradient, w)])
        seen.update_state(jnp.ones(len(labels)))
        return value
    return strategy.reduce("SUM", strategy.run(replica, args=(features, labels)), axis=None)

dataset = dx.data.Dataset.from_tensor_slices((x, y)).batch(8)
losses = [
    float(train(*batch))
    for _ in range(2)
    for batch in strategy.experimental_distribute_dataset(dataset)
]
tell(w=w.numpy(), losses=losses, seen=seen.result())
"""


@_try_all("compiled-2")
def test_training_equals_one_device(devices: int, compiled: bool) -> None:
    told = run(TRAINING, devices, compiled)
    lines: list[str] = []
    scope = {"tell": lambda **values: lines.append(json.dumps(values, default=np.ndarray.tolist))}
    alone = START.replace("dx.MultiWorkerMirroredStrategy()", "dx.OneDeviceStrategy('CPU:0')")
    source = alone.format(devices=1, compiled=False) + "\ntell = told\n" + TRAINING
    exec(compile(source, "training", "exec"), {"told": _keep(lines)} | scope)
    expected = json.loads(lines[0])
    for worker in told:
        np.testing.assert_allclose(worker["w"], expected["w"], rtol=1e-5)
        np.testing.assert_allclose(worker["losses"], expected["losses"], rtol=1e-5)
        assert worker["seen"] == expected["seen"] == 44


def _keep(lines: list[str]) -> Any:
    def tell(**values: Any) -> None:
        lines.append(json.dumps({k: np.asarray(v).tolist() for k, v in values.items()}))

    return tell


def test_workers_with_their_own_data_stay_in_step() -> None:
    told = run(
        """
        def dataset_fn(context):
            # Worker 1 has less than worker 0, and a smaller last batch.
            size = 7 if context.input_pipeline_id == 0 else 3
            return dx.data.Dataset.range(size).map(lambda x: x + 100 * worker).batch(2)

        @dx.function
        def mean_of(x):
            means = strategy.run(lambda v: v.astype(jnp.float32).mean(), args=(x,))
            return strategy.reduce("MEAN", means, axis=None)

        total, steps, means = 0, [], []
        for x in strategy.distribute_datasets_from_function(dataset_fn):
            means.append(mean_of(x))
            steps.append(np.asarray(strategy.experimental_local_results(x)[0]).tolist())
            total += int(strategy.reduce("SUM", strategy.run(lambda v: v.sum(), args=(x,))))
        def varying_fn(context):
            # The first batches are whole, as if all were; worker 1 has fewer.
            size = 8 if context.input_pipeline_id == 0 else 4
            batches = dx.data.Dataset.range(size).batch(2, drop_remainder=True)
            return batches.map(lambda x: x[x % 3 != 2])

        varying = [
            np.asarray(strategy.experimental_local_results(x)[0]).tolist()
            for x in strategy.distribute_datasets_from_function(varying_fn)
        ]
        def parse(x):
            return {"x": np.array([{5: 1, 6: 2}[int(x)]], np.int32)}

        def lonely_fn(context):
            # Worker 1 has nothing that would tell what parse returns.
            dataset = dx.data.Dataset.range(5, 7 if context.input_pipeline_id == 0 else 5)
            return dataset.map(parse).batch(1)

        lonely = [
            np.asarray(strategy.experimental_local_results(x["x"])[0]).tolist()
            for x in strategy.distribute_datasets_from_function(lonely_fn)
        ]
        nothing = list(
            strategy.distribute_datasets_from_function(lambda context: lonely_fn(context).take(0))
        )
        tell(
            steps=steps, total=total, means=means, traces=mean_of.trace_count, varying=varying,
            lonely=lonely, nothing=len(nothing),
        )
        """,
        1,
        compiled=True,
    )
    # Each set of sizes is compiled, and a worker without data counts for nothing.
    assert told[0]["means"] == told[1]["means"] == [50.5, 52.25, 4.5, 6.0]
    assert told[0]["traces"] == told[1]["traces"] == 4
    assert told[0]["steps"] == [[0, 1], [2, 3], [4, 5], [6]]
    assert told[1]["steps"] == [[100, 101], [102], [], []]
    assert told[0]["varying"] == [[0, 1], [3], [4], [6, 7]]
    assert told[1]["varying"] == [[0, 1], [3], [], []]
    assert told[0]["lonely"] == [[[1]], [[2]]]
    assert told[1]["lonely"] == [[], []]
    assert told[0]["nothing"] == told[1]["nothing"] == 0
    assert told[0]["total"] == told[1]["total"] == 21 + 303


def test_addresses_may_be_ipv6() -> None:
    program = """
        import jax.numpy as jnp, distribax as dx
        strategy = dx.MultiWorkerMirroredStrategy()
        print(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(2)), axis=0))
    """
    for result in run_workers(program, 2, host="[::1]"):
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "4.0"
    program = """
        import distribax as dx
        try:
            dx.MultiWorkerMirroredStrategy()
        except RuntimeError as error:
            print(error)
    """
    environment = {"DISTRIBAX_JOIN_TIMEOUT": "1"}
    (alone,) = run_workers(program, 2, host="[::1]", start=[0], environment=environment)
    assert alone.stdout.startswith("worker 1 ([::1]:"), alone.stderr
    assert "did not join within 1 s" in alone.stdout


def test_missing_worker_is_named_to_all(tmp_path: Path) -> None:
    program = f"""
        import os, time
        import distribax as dx
        # On a busy machine, one may be ready to join long before another.
        open(os.path.join({str(tmp_path)!r}, str(os.getpid())), "w").close()
        while len(os.listdir({str(tmp_path)!r})) < 2:
            time.sleep(0.05)
        try:
            dx.MultiWorkerMirroredStrategy(join_timeout_seconds=3)
        except RuntimeError as error:
            print(error)
    """
    first, second = run_workers(program, 3, start=[0, 1])
    for result in (first, second):
        assert result.returncode == 0
        assert "worker 2 (127.0.0.1:" in result.stdout
        assert "did not join within 3 s; joined: worker 0, worker 1" in result.stdout
    (alone,) = run_workers(program, 2, start=[1])
    assert "worker 0 (127.0.0.1:" in alone.stdout and "joined: worker 1" in alone.stdout


def test_disagreement_about_the_cluster_is_told_to_both() -> None:
    program = """
        import json, os, sys
        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["index"] == 1:
            config["cluster"]["worker"].append("127.0.0.1:9")
            os.environ["TF_CONFIG"] = json.dumps(config)
        import distribax as dx
        try:
            dx.MultiWorkerMirroredStrategy(join_timeout_seconds=10)
        except ValueError as error:
            print(error)
    """
    for result in run_workers(program, 2):
        assert "different cluster specs" in result.stdout


def test_strategy_after_jax_has_started_says_what_to_do() -> None:
    program = """
        import jax, distribax as dx
        jax.devices()
        try:
            dx.MultiWorkerMirroredStrategy()
        except RuntimeError as error:
            print(error)
    """
    (result,) = run_workers(program, 2, start=[0])
    assert "Create the strategy first" in result.stdout


def test_alone_it_is_a_mirrored_strategy() -> None:
    program = """
        import os
        del os.environ["TF_CONFIG"]
        import distribax as dx
        dx.set_virtual_cpu_devices(2)
        strategy = dx.MultiWorkerMirroredStrategy()
        print(strategy.num_replicas_in_sync, strategy.reduce("SUM", strategy.run(
            lambda: dx.get_replica_context().replica_id_in_sync_group), axis=None))
        try:
            dx.MultiWorkerMirroredStrategy(join_timeout_seconds=0)
        except ValueError as error:
            print(error)
    """
    (result,) = run_workers(program, 1)
    assert result.stdout.splitlines()[0] == "2 1", result.stderr
    assert "join_timeout_seconds=0" in result.stdout
