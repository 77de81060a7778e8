"""TensorFlow's ParameterServerStrategy: a chief, workers and servers, each a process."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportArgumentType=false
# (the peer is installed in its own environment, not in the one that is checked)
from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import mlp_problem
import ps_problem
import tensorflow as tf
from serve import claim_output, serve

_START_SECONDS = 300.0
_END_SECONDS = 8.0
_held_sockets: list[socket.socket] = []
"""Bound until the end: a port that was only looked up may be another program's a moment later."""

Work = tuple[Callable[[], Any], Callable[[], ps_problem.Figures]]
"""Schedules one function; and returns figures that show what was done."""


def mlp(coordinator: Any, options: argparse.Namespace) -> Work:
    """Training of the MLP."""
    strategy = coordinator.strategy
    keras = options.way == "keras"
    problem = mlp_problem.make(ps_problem.BATCH_SIZE)
    with strategy.scope():
        layers = [
            (tf.Variable(kernel, name=f"kernel_{i}"), tf.Variable(bias, name=f"bias_{i}"))
            for i, (kernel, bias) in enumerate(problem.weights)
        ]
        variables = [variable for layer in layers for variable in layer]
        optimizer = tf.keras.optimizers.SGD(ps_problem.RATE)
        if keras:
            optimizer.build(variables)

    def loss_of(images: Any, labels: Any) -> Any:
        hidden = images
        for kernel, bias in layers[:-1]:
            hidden = tf.nn.relu(hidden @ kernel + bias)
        kernel, bias = layers[-1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden @ kernel + bias)
        return tf.reduce_mean(losses)

    def replica_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(images, labels)
        gradients = tape.gradient(loss, variables)
        if keras:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            for variable, gradient in zip(variables, gradients, strict=True):
                _descend(variable, gradient)
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        images, labels = next(iterator)
        return strategy.run(replica_step, args=(images, labels))

    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices(ps_problem.batches(0)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(data))
    images, labels = ps_problem.batches(0)

    def figures() -> ps_problem.Figures:
        return {"loss": float(loss_of(images[0], labels[0]))}

    return lambda: coordinator.schedule(step, args=(iterator,)), figures


def trivial(coordinator: Any, options: argparse.Namespace) -> Work:
    """Functions that only return a number."""

    @tf.function
    def nothing() -> Any:
        return tf.constant(1)

    return lambda: coordinator.schedule(nothing), dict


def embedding(coordinator: Any, options: argparse.Namespace) -> Work:
    """Lookups in a divided table, and updates of the rows found."""
    strategy = coordinator.strategy
    keras = options.way == "keras"
    shape = (options.rows, ps_problem.WIDTH)
    ones = functools.partial(tf.keras.initializers.Ones(), shape=shape, dtype=tf.float32)
    with strategy.scope():
        table = tf.Variable(ones, shape=shape, dtype=tf.float32)
        optimizer = tf.keras.optimizers.SGD(ps_problem.RATE)
        if keras:
            optimizer.build(table.variables)

    def replica_step(indices: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, indices))) / 2
        gradients = tape.gradient(loss, table.variables)
        if keras:
            optimizer.apply_gradients(zip(gradients, table.variables, strict=True))
        else:
            for variable, gradient in zip(table.variables, gradients, strict=True):
                variable.scatter_sub(
                    tf.IndexedSlices(gradient.values * ps_problem.RATE, gradient.indices)
                )
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices(ps_problem.indices(options.rows, 0)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(data))

    looked_up = ps_problem.indices(options.rows, 0)[0]

    def figures() -> ps_problem.Figures:
        return {"mean": float(tf.reduce_mean(tf.nn.embedding_lookup(table, looked_up)))}

    return lambda: coordinator.schedule(step, args=(iterator,)), figures


def _descend(variable: Any, gradient: Any) -> None:
    """A step of gradient descent by TensorFlow's own operation, on the variable's server."""
    with tf.device(variable.device):
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=ps_problem.RATE, delta=gradient
        )


WORKS = {"mlp": mlp, "trivial": trivial, "embedding": embedding}


def main() -> None:
    parser = ps_problem.parser()
    parser.add_argument("--way", choices=("keras", "raw"), default="raw", help="of updating")
    parser.add_argument("--threads", type=int, default=0, help="of each worker; 0: its default")
    parser.add_argument("--task", help="set by the chief for the other processes")
    options = parser.parse_args()
    if options.task:
        _take_part(options)
        return
    answers = claim_output()
    strategy, others = start_cluster(ps_problem.num_servers(options.work))
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    schedule, figures = WORKS[options.work](coordinator, options)
    run = ps_problem.runner(schedule, coordinator.join, figures)
    serve(run, answers)
    end_cluster(others)
    # At the end of the interpreter, the coordinator's threads would look for the workers.
    os._exit(0)


def start_cluster(num_servers: int) -> tuple[Any, list[subprocess.Popen[bytes]]]:
    """Returns the strategy of the chief, which this process is, and the other processes."""
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    cluster = _cluster(ps_problem.NUM_WORKERS, num_servers)
    tasks = [(job, index) for job in ("worker", "ps") for index in range(len(cluster[job]))]
    others = [_start(cluster, job, index) for job, index in tasks]
    for (job, index), process in zip(tasks, others, strict=True):
        _wait_until_open(f"{job} {index}", cluster[job][index], process)
    os.environ["TF_CONFIG"] = _tf_config(cluster, "chief", 0)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    partitioner = None
    if num_servers > 1:
        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(num_servers)
    return tf.distribute.ParameterServerStrategy(resolver, partitioner), others


def _wait_until_open(task: str, address: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until a task listens: TensorFlow itself would wait for it without end or message."""
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit(f"{task} ended with {process.returncode}") from None
            if time.monotonic() > deadline:
                waited = f"{_START_SECONDS:.0f} s"
                raise SystemExit(f"{task} did not listen on {address} in {waited}") from None
            time.sleep(0.2)


def end_cluster(others: list[subprocess.Popen[bytes]]) -> None:
    """Ends the other processes."""
    for process in others:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_END_SECONDS)


def _take_part(options: argparse.Namespace) -> None:
    """Is a worker or a server until the chief goes."""
    job, index = options.task.split(":")
    cluster = tf.train.ClusterSpec(json.loads(os.environ["TF_CONFIG"])["cluster"])
    settings = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=options.threads, inter_op_parallelism_threads=0
    )
    tf.distribute.Server(cluster, job, int(index), config=settings)
    sys.stdin.read()
    os._exit(0)


def _start(cluster: dict[str, list[str]], job: str, index: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, __file__),
            *(*sys.argv[1:], "--task", f"{job}:{index}"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TF_CONFIG": _tf_config(cluster, job, index)},
    )


def _cluster(num_workers: int, num_servers: int) -> dict[str, list[str]]:
    addresses = [_hold_address() for _ in range(1 + num_workers + num_servers)]
    return {
        "chief": addresses[:1],
        "worker": addresses[1 : 1 + num_workers],
        "ps": addresses[1 + num_workers :],
    }


def _hold_address() -> str:
    """Returns a free address; no other program gets its port, but TensorFlow's servers do."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    _held_sockets.append(held)
    return f"127.0.0.1:{held.getsockname()[1]}"


def _tf_config(cluster: dict[str, list[str]], job: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


if __name__ == "__main__":
    main()
