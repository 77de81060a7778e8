"""Ways to sum many tensors over two processes: by all-reduce or exchange, apart or in packs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import multi_worker_crew
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mlp_shard_map import AXIS

from benchmarks.sides.packing import sizes_of
from distribax.collectives import exchange
from distribax.collectives.packing import PackLimits, reduce_packed


def sum_by_exchange(values: list[Any]) -> list[Any]:
    return [exchange.sum_by_exchange(value) for value in values]


def sum_by_all_reduce(values: list[Any]) -> list[Any]:
    return list(jax.lax.psum(tuple(values), AXIS))


REDUCTIONS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "all-reduce": sum_by_all_reduce,
    "exchange": sum_by_exchange,
}


def make_program(mesh: jax.sharding.Mesh, way: str) -> Any:
    """The program of a way such as "exchange 64 4096": packs of up to 4 MiB, the tensors in them of
    up to 64 KiB.
    """
    name, *kibibytes = way.split()
    limits = PackLimits(*(1024 * int(number) for number in kibibytes))

    def body(values: list[Any]) -> list[Any]:
        return reduce_packed(values, REDUCTIONS[name], limits)

    split = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(split,), out_specs=PartitionSpec(), check_vma=False
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--mixes", nargs="+", help=sizes_of.__doc__)
    parser.add_argument("--ways", nargs="+", help=make_program.__doc__)
    options, crew = multi_worker_crew.join(parser)
    jax.distributed.initialize(crew.addresses[0], crew.size, crew.rank)
    mesh = jax.make_mesh((crew.size,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    programs = {}
    for mix in options.mixes:
        tensors = [
            jax.make_array_from_process_local_data(split, np.ones((1, size), np.float32))
            for size in sizes_of(mix)
        ]
        for way in options.ways:
            program = make_program(mesh, way)
            sums = program(tensors)
            assert all(float(total.addressable_data(0)[0, 0]) == crew.size for total in sums)
            programs[f"{mix} {way}"] = (program, tensors)

    def run(steps: int) -> dict[str, dict[str, float]]:
        seconds: dict[str, float] = {}
        for name, (program, tensors) in programs.items():
            start = time.perf_counter()
            for _ in range(steps):
                # One at a time, as in training, where the next step needs the sums of this one.
                jax.block_until_ready(program(tensors))
            seconds[name] = (time.perf_counter() - start) / steps
        return {"ways": seconds}

    crew.serve(run)


if __name__ == "__main__":
    main()
