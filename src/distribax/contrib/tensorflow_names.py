"""TensorFlow's names and what they are here: for the migration guide, and for names not there."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

_EXPLAINED: Final = {
    "distribute": "`tf.distribute.X` is `dx.X`",
    "distribute_lib": "it was never public; what it defines is in `dx` itself",
    "keras": "import keras (version 3) itself",
}


@dataclass(frozen=True)
class Name:
    """One of TensorFlow's names.

    Attributes:
        tensorflow: The name, without `tf.`.
        here: What to write instead; it begins with `dx.` if it is a name of this library.
        differs: How it differs; empty if it does not.
    """

    tensorflow: str
    here: str
    differs: str


@functools.cache
def read_table() -> tuple[Name, ...]:
    """Returns all names, those that mean the same here first."""
    path = files("distribax.contrib") / "tensorflow_names.csv"
    with path.open(encoding="utf-8") as file:
        return tuple(Name(**row) for row in csv.DictReader(file))


def explain_missing(module: str, name: str) -> str:
    """Returns the message for a name that a public module does not have, with the way out.

    Args:
        module: The module.
        name: The name.

    Returns:
        The text of an AttributeError.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name in _EXPLAINED:
        return f"{message}: {_EXPLAINED[name]}."
    reduced = name.removeprefix("reduce_")
    if reduced != name:
        return f"{message}: write jnp.{reduced} for tf.{name}."
    for row in read_table():
        root, _, rest = row.tensorflow.removeprefix("distribute.").partition(".")
        if root == name:
            exact = row.tensorflow if not rest else f"{row.tensorflow}, for example,"
            more = f" {row.differs}" if row.differs else ""
            return f"{message}: tf.{exact} is {row.here} here.{more}"
    return f"{message}. docs/guide/migrating.md lists TensorFlow's names and what they are here."
