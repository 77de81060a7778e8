"""Descriptions of parameters, optimizers and servers, as plain data that can be sent."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from typing_extensions import override


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter that lives on a server: its identity, its form, and the server's index.

    `uid` is unique in the cluster and never used again; `name` is for people.

    >>> ParameterSpec("7f", "dense/kernel", (784, 512), "float32", server=0).nbytes
    1605632
    """

    uid: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    server: int

    def __post_init__(self) -> None:
        if not self.uid:
            raise ValueError(f"uid of parameter {self.name!r} is empty: give it a unique string.")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape of parameter {self.name!r} is {self.shape}: sizes are >= 0.")
        object.__setattr__(self, "dtype", parse_dtype(self.dtype).name)
        if self.server < 0:
            raise ValueError(f"server of parameter {self.name!r} is {self.server}, expected >= 0.")

    @property
    def nbytes(self) -> int:
        """The size of the parameter's value in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer whose updates run on a server, for the parameters that live there.

    Attributes:
        uid: Its identity; `Apply` names it.
        transformation: An optax transformation, pickled with cloudpickle.
        targets: The parameters it updates, by uid, in the order of an `Apply`'s gradients.
        slots: The leaves of `transformation.init(values of the targets as a list)`, each a
            parameter of its own on the same server, by uid, in the order of `jax.tree.leaves`.
            Those that do not exist when the optimizer is registered are created by the server.
        counter: An integer parameter that grows by one with each update, or None.
        rounds: How many contributions make one update. 1 applies each as it comes (asynchronous);
            n collects n of them and applies their mean once (synchronous).
        round_timeout: How many seconds a round may stay incomplete while somebody waits for it;
            then it is applied with the contributions that have arrived. None waits for all.
    """

    uid: str
    transformation: bytes
    targets: tuple[str, ...]
    slots: tuple[str, ...] = ()
    counter: str | None = None
    rounds: int = 1
    round_timeout: float | None = None

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError(f"targets of optimizer {self.uid!r} is empty: name its parameters.")
        if self.rounds < 1:
            raise ValueError(f"rounds of optimizer {self.uid!r} is {self.rounds}, expected >= 1.")
        if self.round_timeout is not None and not self.round_timeout > 0:
            raise ValueError(
                f"round_timeout of optimizer {self.uid!r} is {self.round_timeout}, expected > 0 s."
            )


@dataclass(frozen=True)
class Endpoint:
    """Where a server can be reached, and which process of it that is.

    Attributes:
        host: The address its TCP socket is bound to.
        port: The TCP port.
        unix: The name of its abstract unix socket; empty where there are none.
        boot: A different string for each start of a server.
        machine: Which running kernel and network namespace `unix` can be used in.
    """

    host: str
    port: int
    unix: str
    boot: str
    machine: str = ""

    @override
    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@functools.cache
def parse_dtype(dtype: str) -> np.dtype[np.generic]:
    """Returns the NumPy type of that name; raises a ValueError for objects and unknown names."""
    try:
        found: np.dtype[np.generic] = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is not a NumPy or JAX type of numbers.") from error
    if found.hasobject or found.names is not None or found.itemsize == 0:
        raise ValueError(f"dtype {dtype!r} cannot be stored: parameters are arrays of numbers.")
    return found
