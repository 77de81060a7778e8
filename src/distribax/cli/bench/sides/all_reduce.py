"""All-reduces of arrays of several sizes, by hand and by each algorithm of distribax."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from placing import place
from serve import serve

import distribax as dx

AXIS = "replica"
ALGORITHMS = {
    "AllReduce": dx.AllReduce,
    "HierarchicalCopy": dx.HierarchicalCopyAllReduce,
    "ReductionToOneDevice": dx.ReductionToOneDevice,
}
COPY_BYTES = 64 << 20


def make_hand(replicas: int, elements: int) -> Callable[[], Any]:
    """The sum that JAX makes of one array on each device."""
    mesh = jax.make_mesh((replicas,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    split = PartitionSpec(AXIS)
    values = jax.device_put(np.ones((replicas, elements), np.float32), NamedSharding(mesh, split))
    program = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=(split,), out_specs=PartitionSpec()
        )
    )
    return lambda: program(values)


def make_ours(name: str, replicas: int, elements: int) -> Callable[[], Any]:
    """The sum that a replica context makes, with one of the algorithms."""
    devices = [f"CPU:{index}" for index in range(replicas)]
    strategy = dx.MirroredStrategy(devices, cross_device_ops=ALGORITHMS[name]())
    values = place(strategy, np.ones((replicas * elements,), np.float32))

    def replica_step(x: jax.Array) -> jax.Array:
        return dx.get_replica_context().all_reduce("sum", x)

    @dx.function
    def step(values: Any) -> Any:
        return strategy.run(replica_step, args=(values,))

    def call() -> Any:
        return strategy.experimental_local_results(step(values))

    assert float(call()[0][0]) == replicas
    return call


def measure_copies() -> float:
    """Bytes a second that this machine reads and writes when it copies memory."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    best = min(_time(lambda: np.copyto(target, source)) for _ in range(5))
    return 2 * COPY_BYTES / best


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of each replica's array")
    options = parser.parse_args()
    dx.set_virtual_cpu_devices(options.replicas)
    ways: dict[str, Callable[[], Any]] = {}
    for size in options.sizes:
        ways[f"JAX by hand (psum) {size}"] = make_hand(options.replicas, size // 4)
        for name in ALGORITHMS:
            ways[f"{name} {size}"] = make_ours(name, options.replicas, size // 4)
    for call in ways.values():
        jax.block_until_ready(call())

    def run(steps: int) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        for name, call in ways.items():
            # One at a time, as in training, where the next step needs the sum of this one.
            seconds[name] = sum(_time(call) for _ in range(steps)) / steps
        return {"ways": seconds, "copy": measure_copies()}

    serve(run)


if __name__ == "__main__":
    main()
