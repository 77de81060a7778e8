"""`dx.summary`: what is where: devices, replicas, variables, and how much memory they take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from typing_extensions import override

from distribax import context, contracts
from distribax.topology import device_name
from distribax.training.checkpoints.tracked import VariableSlot, find_tracked
from distribax.types import VariableSynchronization
from distribax.variables import ShardedVariable, Variable, registry

_MOST_DRAWN: Final = 16
"""A mesh with more devices is described, not drawn."""


@dataclass(frozen=True)
class VariableSummary:
    """One line of a summary.

    Attributes:
        name: The variable's name, or the path that leads to it.
        shape: Its shape.
        dtype: Its data type.
        role: "trainable", "optimizer state", "metric" or "state".
        placement: Where its value is kept, such as "mirrored on 4 devices".
        bytes_per_device: How much memory it takes, by the name of the device or server.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    placement: str
    bytes_per_device: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """What `dx.summary` returns; `print` shows it as text.

    Attributes:
        strategy: The name of the strategy's class.
        num_replicas: How many replicas it has, on all workers.
        devices: The names of the devices that run replicas here.
        mesh: The mesh, drawn as text; empty if the strategy has none.
        variables: One entry for each variable.
    """

    strategy: str
    num_replicas: int
    devices: tuple[str, ...]
    mesh: str
    variables: tuple[VariableSummary, ...]

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """How much memory all variables take, by the name of the device or server."""
        total: dict[str, int] = {}
        for variable in self.variables:
            for device, size in variable.bytes_per_device.items():
                total[device] = total.get(device, 0) + size
        return total

    @override
    def __str__(self) -> str:
        count = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        lines = [f"{self.strategy}: {count}, here on {', '.join(map(_shorten, self.devices))}"]
        if self.mesh:
            lines += ["", self.mesh]
        if self.variables:
            lines += ["", *_format_table(self.variables), "", "bytes of all variables:"]
            lines += [
                f"  {_shorten(device)}: {_format_bytes(size)}"
                for device, size in sorted(self.bytes_per_device.items())
            ]
        else:
            lines += ["", "no variables"]
        return "\n".join(lines)

    @override
    def __repr__(self) -> str:
        return str(self)


def summary(strategy: contracts.Strategy | None = None, **objects: object) -> Summary:
    """Returns what is where: devices, replicas, the mesh, and the variables with their memory.

    Args:
        strategy: The strategy; by default the one in scope.
        **objects: Models, optimizers, metrics, variables and nests of them, each under a name, as
            `dx.Checkpoint` takes them. Without any, all `dx.Variable`s of the strategy are listed.

    Returns:
        The summary; `print(dx.summary(strategy))` shows it.

    Example:
        >>> import distribax as dx
        >>> strategy = dx.OneDeviceStrategy("CPU:0")
        >>> with strategy.scope():
        ...     w = dx.Variable([[1.0, 2.0]], name="w")
        >>> print(dx.summary(strategy, w=w))
        OneDeviceStrategy: 1 replica, here on CPU:0
        <BLANKLINE>
        variable  shape   dtype    role       placement  bytes per device
        w         (1, 2)  float32  trainable  on CPU:0   8 B
        <BLANKLINE>
        bytes of all variables:
          CPU:0: 8 B
    """
    strategy = context.get_strategy() if strategy is None else strategy
    extended = strategy.extended
    mesh = extended.mesh
    return Summary(
        type(strategy).__name__,
        strategy.num_replicas_in_sync,
        tuple(extended.worker_devices),
        draw_mesh(mesh) if mesh is not None else "",
        tuple(_list_named(objects) if objects else _list_all(strategy)),
    )


def _list_all(strategy: contracts.Strategy) -> Iterable[VariableSummary]:
    roles = _find_roles()
    for variable in registry.list_variables():
        if isinstance(variable, Variable) and variable.distribute_strategy is strategy:
            yield _describe(variable.name.removesuffix(":0"), variable, roles)


def _list_named(objects: dict[str, object]) -> Iterable[VariableSummary]:
    roles = _find_roles()
    tracked = find_tracked(objects, lambda name, value: None)
    for name, slot in tracked.slots.items():
        if not isinstance(slot, VariableSlot):
            yield VariableSummary(name, slot.shape, "", "state", "kept by its library", {})
        elif isinstance(slot.variable, ShardedVariable):
            for index, shard in enumerate(slot.variable.variables):
                yield _describe(f"{name}.shard_{index}", shard, roles)
        else:
            # Slots of an optimizer are numbered; their own names say what they belong to.
            is_slot = roles.get(id(slot.variable)) == registry.OPTIMIZER_STATE
            own = slot.variable.name.removesuffix(":0")
            yield _describe(own if is_slot else name, slot.variable, roles)


def _find_roles() -> dict[int, str]:
    """Returns the roles of what optimizers and metrics own, by the identity of the variable."""
    return {id(part): role for owned, role in registry.list_owned() for part in _split(owned)}


def _split(variable: object) -> Sequence[object]:
    return variable.variables if isinstance(variable, ShardedVariable) else [variable]


def _describe(name: str, variable: Variable, roles: dict[int, str]) -> VariableSummary:
    size = math.prod(variable.shape) * variable.dtype.itemsize
    placement = variable.placement
    role = roles.get(id(variable)) or ("trainable" if variable.trainable else "state")
    if placement.specs:
        servers = [f"server {spec.server}" for spec in placement.specs]
        where, sizes = f"on {', '.join(servers)}", dict.fromkeys(servers, size)
    else:
        devices = [device_name(device) for device in variable.devices]
        where, per_device = f"on {', '.join(map(_shorten, devices))}", size
        sharding = placement.sharding
        if variable.synchronization is VariableSynchronization.ON_READ and variable.per_replica:
            where = f"one value for each of {placement.num_copies} replicas"
        elif isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            shard = sharding.shard_shape(variable.shape)
            per_device = math.prod(shard) * variable.dtype.itemsize
            where = f"divided: {sharding.spec}"
        elif placement.has_copies:
            where = f"mirrored on {placement.num_copies} devices"
        sizes = dict.fromkeys(devices, per_device)
    return VariableSummary(name, variable.shape, str(np.dtype(variable.dtype)), role, where, sizes)


def draw_mesh(mesh: Mesh) -> str:
    """Returns the mesh as text: a box for each device.

    Args:
        mesh: A mesh with one or two axes; others, and large ones, are described in one line.

    Returns:
        The lines, joined.

    >>> import jax
    >>> from jax.sharding import Mesh
    >>> print(draw_mesh(Mesh(np.array(jax.devices("cpu")[:1]), ("replica",))))
    mesh: replica=1
    ┌───────┐
    │   0   │
    │ CPU:0 │
    └───────┘
    """
    title = "mesh: " + ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    if mesh.devices.ndim > 2 or mesh.devices.size > _MOST_DRAWN:
        return title
    rows = mesh.devices if mesh.devices.ndim == 2 else mesh.devices[None]
    is_shared = len({device.process_index for device in mesh.devices.flat}) > 1

    def owner(device: jax.Device) -> list[str]:
        return [f"process {device.process_index}"] if is_shared else []

    cells = [
        [
            (_format_place(mesh, row, column), _shorten(device_name(device)), *owner(device))
            for column, device in enumerate(line)
        ]
        for row, line in enumerate(rows)
    ]
    width = max(len(text) for line in cells for cell in line for text in cell) + 2

    def border(left: str, middle: str, right: str) -> str:
        return left + middle.join(["─" * width] * len(cells[0])) + right

    drawn = [title, border("┌", "┬", "┐")]
    for number, line in enumerate(cells):
        if number:
            drawn.append(border("├", "┼", "┤"))
        for part in range(len(line[0])):
            drawn.append("│" + "│".join(cell[part].center(width) for cell in line) + "│")
    return "\n".join([*drawn, border("└", "┴", "┘")])


def _format_place(mesh: Mesh, row: int, column: int) -> str:
    return f"{row}, {column}" if mesh.devices.ndim == 2 else str(column)


def _shorten(device: str) -> str:
    """Returns a device's name without the parts that all devices of this process share."""
    return device.rpartition("device:")[2]


def _format_table(variables: Sequence[VariableSummary]) -> list[str]:
    rows = [("variable", "shape", "dtype", "role", "placement", "bytes per device")]
    for each in variables:
        sizes = sorted(set(each.bytes_per_device.values()))
        shown = ", ".join(map(_format_bytes, sizes)) or "-"
        rows.append((each.name, str(each.shape), each.dtype, each.role, each.placement, shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
