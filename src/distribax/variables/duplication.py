"""Which variables can be copied, and which can be pickled for another process."""

from __future__ import annotations

from distribax.execution import frames, named_objects
from distribax.variables.placement import PlacedVariable

DESCRIBED = (
    *("_name", "_aggregation", "_synchronization", "_trainable"),
    *("_where", "_shape", "_dtype", "_constraint"),
)
"""The attributes of a variable that another process is told, beside its value."""


def check_copyable(variable: PlacedVariable) -> None:
    """Raises if `copy.deepcopy` cannot make another variable here."""
    if variable.source is not None or frames.current() is not None:
        where = "in a dx.function" if variable.source is None else "on parameter servers"
        raise TypeError(
            f"copy.deepcopy: {variable.described} cannot be copied {where}. Create another one "
            "with its value: dx.Variable(v.numpy())."
        )


def check_picklable(variable: PlacedVariable) -> None:
    """Raises if a variable that lives in this process cannot leave it."""
    if named_objects.get_destination() is not None:
        raise TypeError(
            f"{variable.described} lives in this process only, so a function that refers to it "
            "cannot run on a worker. Create it inside `with strategy.scope():` of the "
            "ParameterServerStrategy, or pass the function its value: args=(v.numpy(),)."
        )
    if variable.placement.mesh is not None:
        raise TypeError(
            f"pickle: {variable.described} belongs to the devices of a strategy, which cannot be "
            "pickled. Pickle its value, v.numpy(), or save it with dx.Checkpoint(v=v)."
        )
