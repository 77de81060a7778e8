"""`PerReplica` and `Mirrored`: one value for each replica, different or the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import DTypeLike
from typing_extensions import override

from distribax import jax_private
from distribax.errors import DistribaxError
from distribax.topology import complete_device_name, device_name, make_replica_mesh
from distribax.values.arithmetic import ArrayLike
from distribax.values.idle import NONE_IDLE, IdleReplicas
from distribax.values.layout import (
    Evenness,
    Global,
    Layout,
    Local,
    Padded,
    Pieces,
    describe_kind,
    is_traced,
    join,
    pad,
    spread,
)

_D = TypeVar("_D", bound="DistributedValues")


class _CountsVariables(type):
    """Makes variables that have a copy for each replica instances of `DistributedValues`."""

    @override
    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        return cls is DistributedValues and isinstance(instance, ArrayLike) and instance.has_copies


class DistributedValues(metaclass=_CountsVariables):
    """Holds one value for each replica; see `PerReplica` and `Mirrored`.

    Mirrored and sync-on-read variables are instances as well.

    Instances come from distributed data sets, from `strategy.run` and from
    `strategy.experimental_distribute_values_from_function`.

    Args:
        values: One value for each replica of this process.

    Attributes:
        layout: How the values are stored.
        idle: Which replicas were idle in the run that made the values.

    Raises:
        ValueError: `values` is empty.
    """

    def __init__(self, values: Iterable[object]) -> None:
        pieces = tuple(values)
        if not pieces:
            raise ValueError(
                f"{type(self).__name__}: values is empty. Expected one value for each replica."
            )
        self.layout: Layout = Pieces(pieces)
        self.idle = NONE_IDLE

    @classmethod
    def of(cls: type[_D], layout: Layout, idle: IdleReplicas = NONE_IDLE) -> _D:
        """Wraps values that are stored in a given layout.

        Args:
            layout: How the values are stored.
            idle: Which replicas were idle in the run that made the values.

        Returns:
            The wrapped values.
        """
        wrapped = cls.__new__(cls)
        wrapped.layout = layout
        wrapped.idle = idle
        return wrapped

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this process's replicas, in the order of the replicas."""
        return self.layout.pieces

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that the values are on, in the order of the replicas."""
        return tuple(
            device_name(next(iter(value.devices())))
            for value in self.values
            if isinstance(value, jax.Array) and not jax_private.is_tracer(value)
        )

    def get(self, device: str | jax.Device | None = None) -> Any:
        """Returns the value on a device, or of the replica that runs now.

        Args:
            device: The device, or its name; by default that of the replica.

        Returns:
            The value.

        Raises:
            ValueError: There is no value on the device, or no replica runs and none is named.
        """
        if device is None:
            own = find_own_part(self)
            if own is not None:
                return own
        else:
            wanted = complete_device_name(device)
            for name, value in zip(self.devices, self.values, strict=False):
                if name == wanted:
                    return value
        raise ValueError(
            f"get: device={device!r} has no value. It has values on {', '.join(self.devices)}; "
            "outside a replica, name one of them."
        )

    def require_replicas(self, num_replicas: int) -> None:
        """Raises if the value has parts for more replicas than there are: they would be lost.

        Args:
            num_replicas: How many replicas there are.

        Raises:
            ValueError: The value has more parts.
        """
        count = len(self.layout.pieces)
        if count > num_replicas:
            raise ValueError(
                f"strategy.run: a value that was made for {count} replicas was given to a strategy "
                f"with {num_replicas}: {self!r}. Values belong to the strategy that made them; "
                "gather it and distribute it again."
            )

    def part(self, replica_id: int) -> Any:
        """Returns one replica's value.

        Args:
            replica_id: The index of the replica in this process.

        Returns:
            The value.

        Raises:
            ValueError: There is no value for that replica.
        """
        pieces = self.layout.pieces
        if replica_id >= len(pieces):
            raise ValueError(
                f"replica {replica_id} has no part of a value that was made for {len(pieces)} "
                f"replica(s): {self!r}. Values belong to the strategy that made them; gather it "
                "and distribute it again."
            )
        return pieces[replica_id]

    def on_mesh(self, mesh: Mesh) -> Global | None:
        """Returns the values as one array over `mesh`.

        Args:
            mesh: The mesh of the replicas.

        Returns:
            The array with its layout, or None if the values' shapes differ.
        """
        if isinstance(self.layout, Global):
            return self.layout if self.layout.mesh == mesh else None
        if isinstance(self.layout, Pieces):
            self._agree(mesh)
            if self.layout.evenness is Evenness.UNEVEN:
                return None
            joined = join(self.layout.pieces, mesh, mirrored=isinstance(self, Mirrored))
            if joined is not None:
                # Kept: a value that enters one program usually enters the next one too.
                self.layout = joined
            return joined or spread(self.layout.pieces, mesh)
        return None

    def _agree(self, mesh: Mesh) -> None:
        """Finds out whether the pieces of other processes have the same shape as those here.

        Values that differ, as in the last batch of an epoch, cannot be one array. If one process
        treated them as one, its program would not fit those of the others.
        """
        text = self.open_question(mesh)
        if text is not None and not jax_private.run_outside_trace(
            lambda: jax_private.agree_on(text)
        ):
            self.layout = Pieces(self.layout.pieces, mesh, Evenness.UNEVEN)

    def open_question(self, mesh: Mesh | None) -> str | None:
        """Returns what all processes must say alike if the value is one array.

        Args:
            mesh: The mesh of the replicas, if there is one.

        Returns:
            The shape and data type as text, or None if nothing needs to be asked.
        """
        layout = self.layout
        if mesh is None or not mesh.is_multi_process or not isinstance(layout, Pieces):
            return None
        if layout.evenness is not Evenness.UNKNOWN or isinstance(self, Mirrored):
            return None
        if is_traced(layout):
            return None
        kinds = {describe_kind(piece) for piece in layout.pieces}
        # One kind here is only part of the answer; several are, and the others must hear of it.
        return kinds.pop() if len(kinds) == 1 else f"uneven in {jax.process_index()}"

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shape of each replica's value, of all processes; all must call it."""
        layout, mesh = self.layout, self.layout.mesh
        if isinstance(layout, Local):
            return list(layout.shapes or (np.shape(layout.value),) * layout.mesh.size)
        if isinstance(layout, Padded):
            return list(layout.shapes)
        own = [tuple(np.shape(piece)) for piece in self.values]
        if mesh is None or not mesh.is_multi_process:
            return own
        if self.on_mesh(mesh) is not None:
            return own[:1] * mesh.size
        texts = jax_private.run_outside_trace(lambda: jax_private.gather_texts(json.dumps(own)))
        return [tuple(shape) for text in texts for shape in json.loads(text)]

    def join(self) -> Global | None:
        """Returns the values as one array over the mesh of the devices they are on, or None."""
        layout = self.layout
        if isinstance(layout, Pieces) and layout.evenness is Evenness.UNEVEN:
            return None
        if isinstance(layout, Pieces) and layout.mesh is not None:
            return self.on_mesh(layout.mesh)
        mesh = None if isinstance(layout, Padded) else self._find_mesh()
        return None if mesh is None else self.on_mesh(mesh)

    def _find_mesh(self) -> Mesh | None:
        """Returns a mesh of the devices that the values are on, if each is on one of its own."""
        devices: list[jax.Device] = []
        for piece in self.values:
            if not isinstance(piece, jax.Array) or jax_private.is_tracer(piece):
                return None
            if len(piece.devices()) != 1:
                return None
            devices.extend(piece.devices())
        if len(set(devices)) != len(devices) or len({device.platform for device in devices}) > 1:
            return None
        return make_replica_mesh(tuple(devices))

    def pad(self, mesh: Mesh | None = None) -> Padded | None:
        """Returns values whose shapes differ as one padded array.

        Over several processes, all of them must call it.

        Args:
            mesh: The mesh of the replicas; by default, that of the devices they are on.

        Returns:
            The array with its layout, or None if the values differ in more than their sizes.
        """
        layout = self.layout
        if isinstance(layout, Pieces):
            mesh = mesh or layout.mesh or self._find_mesh()
            shapes = [] if mesh is None else self.shapes()
            # Pieces of one shape that are no array are on other devices than those of the mesh.
            padded = pad(layout.pieces, mesh, shapes) if mesh and len(set(shapes)) > 1 else None
            # Kept: a value that enters one program usually enters the next one too.
            layout = self.layout = padded or layout
        if not isinstance(layout, Padded) or (mesh is not None and layout.mesh != mesh):
            return None
        return layout

    @override
    def __repr__(self) -> str:
        layout = self.layout
        if not isinstance(layout, Pieces) and is_traced(layout):
            inner = layout.value if isinstance(layout, Local) else layout.array
            return f"{type(self).__name__}:{{traced: {inner!r}}}"
        return format_listing(type(self).__name__, self.values)


def settle(values: Iterable[DistributedValues]) -> None:
    """Asks the other processes once about the shapes of several values, not once for each.

    The values that turn out to differ somewhere are asked about again when they are used.
    """
    asked = [
        (value, text)
        for value in values
        if (text := value.open_question(value.layout.mesh)) is not None
    ]
    if len(asked) > 1 and jax_private.agree_on("; ".join(text for _, text in asked)):
        for value, _ in asked:
            assert isinstance(value.layout, Pieces)
            value.layout = replace(value.layout, evenness=Evenness.EVEN)


def format_listing(name: str, values: Iterable[object]) -> str:
    """Formats one value per line, with its replica's index."""
    lines = ",\n".join(f"  {index}: {value!r}" for index, value in enumerate(values))
    return f"{name}:{{\n{lines}\n}}"


class _NotOneArrayError(DistribaxError, TypeError, AttributeError):
    """A `PerReplica` was used as one array; also an AttributeError, as it has no `shape`."""


_find_own_part: Callable[[DistributedValues], Any] | None = None


def register_own_part(find: Callable[[DistributedValues], Any]) -> None:
    """Says how the part of the replica that runs now is found; None where no replica runs."""
    global _find_own_part
    _find_own_part = find


def find_own_part(value: DistributedValues) -> Any:
    """Returns the part of the replica that runs now; None where no replica runs."""
    assert _find_own_part is not None, "the engine says how parts are found"
    return _find_own_part(value)


class PerReplica(DistributedValues, ArrayLike):
    """A value that may differ from replica to replica.

    In a replica that has it from outside, it can be used like the array that is the replica's part.
    """

    def find_own(self) -> Any:
        """Returns the part of the replica that runs now, or None where no replica runs.

        Returns:
            The part.
        """
        return find_own_part(self)

    @override
    def __eq__(self, other: object) -> Any:
        own = self.find_own()
        return NotImplemented if own is None else own == other

    @override
    def __ne__(self, other: object) -> Any:
        own = self.find_own()
        return NotImplemented if own is None else own != other

    __hash__ = object.__hash__

    @override
    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Stacks the local values, for logging; in a replica, it is the replica's part."""
        own = self.find_own()
        if own is not None:
            return np.asarray(own, dtype=dtype)
        values = [np.asarray(value) for value in self.values]
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            raise ValueError(
                f"np.asarray(PerReplica): the replicas' shapes differ: "
                f"{[value.shape for value in values]}. Get their parts with "
                "strategy.experimental_local_results(x), or join them with "
                "strategy.gather(x, axis=0)."
            )
        return np.stack(values).astype(dtype) if dtype is not None else np.stack(values)

    def _read_scalar(self, what: str) -> Any:
        own = self.find_own()
        if own is not None:
            return own
        values = self.__array__()
        if values[0].ndim == 0 and (values == values[0]).all():
            return values[0].item()
        raise ValueError(
            f"{what}(PerReplica): the {len(values)} replicas have different values, "
            f"{values.tolist()}. Combine them first: strategy.reduce('SUM', x, axis=None), or "
            "get their parts with strategy.experimental_local_results(x)."
        )

    @override
    def __float__(self) -> float:
        return float(self._read_scalar("float"))

    @override
    def __int__(self) -> int:
        return int(self._read_scalar("int"))

    @override
    def __jax_array__(self) -> jax.Array:
        own = self.find_own()
        if own is None:
            raise _NotOneArrayError(
                "A PerReplica value was used as an array outside a replica. Pass it to "
                "strategy.run(fn, args=(x,)), combine it with strategy.reduce(op, x, axis=None), "
                "or get its parts with strategy.experimental_local_results(x)."
            )
        return jnp.asarray(own)

    @override
    def numpy(self) -> np.ndarray:
        """Returns the replica's part as a NumPy array of its own.

        Returns:
            The array.

        Raises:
            TypeError: No replica runs.
        """
        return np.array(self.__jax_array__())

    @override
    def __format__(self, spec: str) -> str:
        if not spec or self.find_own() is not None:
            return super().__format__(spec)
        raise TypeError(
            f"f'{{x:{spec}}}': x is a PerReplica value, not one number. Combine it first, "
            "strategy.reduce('SUM', x, axis=None), or leave the format out."
        )


class Mirrored(DistributedValues, ArrayLike):
    """A value that is the same in all replicas; it can be used like the array it holds."""

    @override
    def get(self, device: str | jax.Device | None = None) -> Any:
        """Returns the value itself, or its copy on a device.

        Args:
            device: The device, or its name; any copy by default.

        Returns:
            The value.

        Raises:
            ValueError: There is no copy on the device.
        """
        if device is not None:
            return super().get(device)
        layout = self.layout
        if isinstance(layout, Local):
            return layout.value
        # An array over several processes is for programs; what users hold is their process's.
        if isinstance(layout, Global) and jax_private.is_local(layout.array):
            return layout.array
        return layout.pieces[0]

    @property
    @override
    def values(self) -> tuple[Any, ...]:
        """The copies of this process's replicas."""
        layout = self.layout
        return (layout.value,) * layout.mesh.size if isinstance(layout, Local) else layout.pieces

    @override
    def require_replicas(self, num_replicas: int) -> None:
        """Does nothing: all parts are the same, so none can be lost.

        Args:
            num_replicas: How many replicas there are.
        """

    @override
    def part(self, replica_id: int) -> Any:
        """Returns one replica's value; any copy will do where there is none on its device.

        Args:
            replica_id: The index of the replica in this process.

        Returns:
            The value.
        """
        values = self.values
        return values[replica_id] if replica_id < len(values) else self.get()

    @override
    def __jax_array__(self) -> Any:
        return self.get()

    @override
    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array of its own."""
        return np.array(self.values[0])
