"""`dx.Checkpoint`: saves variables, optimizers, metrics and iterators with Orbax."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from distribax import context
from distribax.types import VariableAggregation
from distribax.variables import Variable


@runtime_checkable
class Positioned(Protocol):
    """Anything with a position that can be saved: an iterator."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """Anything that keeps its state in variables: an optimizer, a metric."""

    @property
    def variables(self) -> Any: ...


class Checkpoint:
    """Saves and restores named objects; one format for every strategy.

    What was saved under one strategy can be restored under another, with any number of replicas: a
    variable is saved as its one value, a value that each replica keeps for itself as the combined
    one. Saving is atomic: a crash leaves the last complete checkpoint.

    Args:
        objects: Variables, optimizers, metrics, iterators, and lists, tuples or dicts of them,
            each under a name of its own.

    Example:
        >>> import tempfile, distribax as dx
        >>> v = dx.Variable(1.0)
        >>> checkpoint = dx.Checkpoint(v=v)
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/first")
        >>> _ = v.assign(5.0)
        >>> checkpoint.restore(path)
        >>> float(v)
        1.0
    """

    def __init__(self, **objects: Any) -> None:
        if not objects:
            raise ValueError(
                "dx.Checkpoint: nothing to save. Name what belongs to it: "
                "dx.Checkpoint(model=variables, optimizer=optimizer)."
            )
        self._objects = objects
        self._found()

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> str:
        """Writes a checkpoint to the new directory `path`, and returns it."""
        _require_outside_replicas("save")
        target = Path(path).absolute()
        if target.exists() and not overwrite:
            raise ValueError(
                f"Checkpoint.save: path={str(path)!r} exists already. Choose a new name (for "
                "example one with the step), or pass overwrite=True."
            )
        variables, iterators = self._found()
        values = {name: _saved_value(variable) for name, variable in variables.items()}
        positions = {name: iterator.get_state() for name, iterator in iterators.items()}
        ocp = _orbax()
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(
                target,
                args=ocp.args.Composite(
                    variables=ocp.args.StandardSave(values or {"": np.zeros(())}),
                    positions=ocp.args.JsonSave(positions),
                ),
                force=overwrite,
            )
        return str(target)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Reads a checkpoint; everything is checked before anything is changed."""
        _require_outside_replicas("restore")
        source = Path(path).absolute()
        if not source.is_dir():
            raise ValueError(
                f"Checkpoint.restore: path={str(path)!r} is not a checkpoint: there is no such "
                "directory. Pass what save() returned."
            )
        variables, iterators = self._found()
        ocp = _orbax()
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            read = checkpointer.restore(
                source,
                args=ocp.args.Composite(
                    variables=ocp.args.StandardRestore(), positions=ocp.args.JsonRestore()
                ),
            )
        values, positions = dict(read["variables"]), dict(read["positions"])
        values.pop("", None)
        _check_names("variables", variables, values, path)
        _check_names("iterators", iterators, positions, path)
        for name, variable in variables.items():
            saved = values[name]
            if tuple(saved.shape) != variable.shape:
                raise ValueError(
                    f"Checkpoint.restore: {name!r} was saved with shape {tuple(saved.shape)}, but "
                    f"{variable.described} has another. Build the model as it was when it was "
                    "saved."
                )
        for name, iterator in iterators.items():
            iterator.set_state(positions[name])
        for name, variable in variables.items():
            variable.assign(np.asarray(values[name]).astype(variable.dtype))

    def _found(self) -> tuple[dict[str, Variable], dict[str, Positioned]]:
        """Returns all variables and iterators by their path."""
        variables: dict[str, Variable] = {}
        iterators: dict[str, Positioned] = {}

        def visit(name: str, value: Any) -> None:
            if isinstance(value, Variable):
                variables[name] = value
            elif isinstance(value, Positioned):
                iterators[name] = value
            elif isinstance(value, Mapping):
                for key, item in value.items():
                    visit(f"{name}.{key}", item)
            elif isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    visit(f"{name}.{index}", item)
            elif isinstance(value, Stateful):
                visit(name, list(value.variables))
            else:
                raise TypeError(
                    f"dx.Checkpoint: {name}={value!r} cannot be saved. Expected a dx.Variable, an "
                    "iterator, something with `variables` (an optimizer, a metric), or a list, "
                    "tuple or dict of them."
                )

        for name, value in self._objects.items():
            visit(name, value)
        return variables, iterators


def _saved_value(variable: Variable) -> np.ndarray:
    if variable.per_replica and variable.aggregation is VariableAggregation.NONE:
        return variable.values[0].numpy()
    return variable.numpy()


def _check_names(what: str, wanted: Mapping[str, Any], saved: Mapping[str, Any], path: Any) -> None:
    missing, strange = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or strange:
        raise ValueError(
            f"Checkpoint.restore: the {what} of path={str(path)!r} are not those of this "
            f"Checkpoint. Not in the file: {missing}; only in the file: {strange}. Name the same "
            "objects as when it was saved (an optimizer has variables only once it is built: call "
            "optimizer.build(variables) first)."
        )


def _require_outside_replicas(what: str) -> None:
    replica = context.get_replica_context()
    if replica is not None and context.has_strategy():
        raise RuntimeError(
            f"Checkpoint.{what}: called inside a replica. Call it outside strategy.run()."
        )


def _orbax() -> Any:
    # Imported on use: it would make `import distribax` a good deal slower.
    import orbax.checkpoint as ocp

    return ocp
