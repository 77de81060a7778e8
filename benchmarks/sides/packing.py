"""Ways to sum many tensors over replicas in one program: apart, as a tuple, or packed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import mlp_problem
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mlp_shard_map import AXIS, make_mesh
from serve import serve

Tensors = Sequence[jax.Array]

# A tensor of more elements than this is left alone by "packed-small".
SMALL = 1024

MLP_SIZES = tuple(
    size for inputs, outputs in pairwise(mlp_problem.LAYERS) for size in (inputs * outputs, outputs)
)
# Convolution kernels, each with a scale and a shift, as in a small residual net.
RESNET_SIZES = (9 * 64 * 64, 64, 64) * 12


def separate(tensors: Tensors) -> list[jax.Array]:
    return [jax.lax.psum(tensor, AXIS) for tensor in tensors]


def as_tuple(tensors: Tensors) -> list[jax.Array]:
    return list(jax.lax.psum(tuple(tensors), AXIS))


def packed(tensors: Tensors) -> list[jax.Array]:
    flat = jax.lax.psum(jnp.concatenate([tensor.ravel() for tensor in tensors]), AXIS)
    ends = np.cumsum([tensor.size for tensor in tensors])
    pieces = jnp.split(flat, ends[:-1])
    return [piece.reshape(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def packed_small(tensors: Tensors) -> list[jax.Array]:
    """Pack the small tensors, and sum the large ones as they are: they gain nothing from a copy."""
    small = [index for index, tensor in enumerate(tensors) if tensor.size <= SMALL]
    large = [index for index, tensor in enumerate(tensors) if tensor.size > SMALL]
    sums: dict[int, jax.Array] = {}
    if small:
        sums |= zip(small, packed([tensors[index] for index in small]), strict=True)
    sums |= zip(large, as_tuple([tensors[index] for index in large]), strict=True)
    return [sums[index] for index in range(len(tensors))]


WAYS: dict[str, Callable[[Tensors], list[jax.Array]]] = {
    "separate": separate,
    "tuple": as_tuple,
    "packed": packed,
    "packed-small": packed_small,
}


def sizes_of(mix: str) -> tuple[int, ...]:
    """The sizes of the tensors: "mlp", "resnet", or "24x1024" for 24 tensors of 1,024 elements."""
    if mix == "mlp":
        return MLP_SIZES
    if mix == "resnet":
        return RESNET_SIZES
    count, size = mix.split("x")
    return (int(size),) * int(count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("mixes", nargs="+", help=sizes_of.__doc__)
    options = parser.parse_args()
    mesh = make_mesh(options.replicas)
    split = PartitionSpec(AXIS)
    programs = {}
    for mix in options.mixes:
        tensors = [
            jax.device_put(
                np.ones((options.replicas, size), np.float32), NamedSharding(mesh, split)
            )
            for size in sizes_of(mix)
        ]
        for name, way in WAYS.items():
            program = jax.jit(
                jax.shard_map(way, mesh=mesh, in_specs=(split,), out_specs=PartitionSpec())
            )
            sums = program(tensors)
            assert all(float(total[0, 0]) == options.replicas for total in sums)
            programs[mix, name] = (program, tensors)

    def run(steps: int) -> dict[str, dict[str, float]]:
        seconds: dict[str, float] = {}
        for (mix, name), (program, tensors) in programs.items():
            start = time.perf_counter()
            for _ in range(steps):
                # One at a time, as in training, where the next step needs the sums of this one.
                jax.block_until_ready(program(tensors))
            seconds[f"{mix} {name}"] = (time.perf_counter() - start) / steps
        return {"ways": seconds}

    serve(run)


if __name__ == "__main__":
    main()
