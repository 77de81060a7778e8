"""Nests of values: JAX's pytrees, and the containers of Python that JAX takes for leaves.

A dict or list of a class of its own, a mapping, a dataclass or an attrs object is no pytree unless
it is registered. Replicas may take and return them all the same: one that holds values is opened,
and put together again as an object of the same class.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import defaultdict
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.tree_util import PyTreeDef
from typing_extensions import override

from distribax import jax_private
from distribax.values.distributed import DistributedValues
from distribax.values.layout import is_host_value
from distribax.values.leaves import (
    get_opaque_test,
    is_none_or_opaque,
    is_wrapped,
)

IsLeaf: TypeAlias = Callable[[Any], bool]
"""Tells whether a part of a nest is taken as it is, although it could be opened."""

_NO_CONTAINERS = (str, bytes, bytearray, memoryview, range, DistributedValues, np.ndarray)


class _ContainerKind(enum.Enum):
    """What kind of container a class is that JAX does not know."""

    MAPPING = enum.auto()
    """Its items are the parts."""
    SEQUENCE = enum.auto()
    """Its elements are the parts."""
    RECORD = enum.auto()
    """Its fields are the parts: a dataclass, or a class of attrs."""


@lru_cache(maxsize=4096)
def _classify(cls: Any) -> _ContainerKind | None:
    if issubclass(cls, _NO_CONTAINERS):
        return None
    if issubclass(cls, Mapping):
        return _ContainerKind.MAPPING
    if issubclass(cls, Sequence):
        return _ContainerKind.SEQUENCE
    # The mark of attrs, which need not be installed.
    if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return _ContainerKind.RECORD
    return None


@dataclasses.dataclass(frozen=True)
class _ContainerForm:
    """A container without its parts. Two are the same if their class and the parts' names are."""

    cls: type
    names: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any] = dataclasses.field(compare=False)

    @override
    def __repr__(self) -> str:
        return f"{self.cls.__name__}{list(self.names)}"


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _OpenContainer:
    """Stands for a container in a nest; unflattened, it is that container again."""

    form: _ContainerForm
    parts: list[Any]

    def tree_flatten(self) -> tuple[list[Any], _ContainerForm]:
        return self.parts, self.form

    @classmethod
    def tree_unflatten(cls, form: _ContainerForm, parts: Sequence[Any]) -> Any:
        return form.rebuild(parts)


def flatten(
    nest: object, is_leaf: IsLeaf | None = None, *, of_results: bool = False
) -> tuple[list[Any], PyTreeDef]:
    """Returns the leaves of a nest, and its structure for `jax.tree.unflatten`.

    Args:
        nest: The nest.
        is_leaf: Which parts are taken as they are.
        of_results: Whether it is what a function returns, which is the function's own: then objects
            that hold arrays and numbers are opened. Of arguments, only those that could not be
            used as they are: those that hold distributed values, or mappings and sequences of
            arrays.

    Returns:
        The leaves and the structure.
    """
    leaves, tree = jax.tree.flatten(nest, is_leaf=is_leaf)
    if not any(map(_classify, map(type, leaves))):
        return leaves, tree
    opened = [open_container(leaf, is_leaf, of_results=of_results) for leaf in leaves]
    if all(new is old for new, old in zip(opened, leaves, strict=True)):
        return leaves, tree
    return jax.tree.flatten(jax.tree.unflatten(tree, opened), is_leaf=is_leaf)


def flatten_arguments(nest: object) -> tuple[list[Any], PyTreeDef]:
    """Like `flatten` for what a function is given: None is a leaf, and what is opaque."""
    # Every call of a compiled function gets here, so nothing is asked about parts without need.
    leaves, tree = jax_private.flatten_with_none(nest, get_opaque_test())
    if any(map(_classify, map(type, leaves))):
        return flatten(nest, is_none_or_opaque)
    return leaves, tree


def map_leaves(
    fn: Callable[[Any], Any],
    nest: object,
    is_leaf: IsLeaf | None = None,
    *,
    of_results: bool = False,
) -> Any:
    """Returns a nest of the same structure with `fn(leaf)` for each leaf; see `flatten`."""
    leaves, tree = flatten(nest, is_leaf, of_results=of_results)
    return jax.tree.unflatten(tree, [fn(leaf) for leaf in leaves])


def open_container(leaf: Any, is_leaf: IsLeaf | None = None, *, of_results: bool = False) -> Any:
    """Returns a pytree that stands for a container; what is not to be opened as it is.

    Args:
        leaf: A leaf of a pytree.
        is_leaf: As for `flatten`.
        of_results: As for `flatten`.

    Returns:
        A pytree of the container's parts that becomes the container when it is unflattened, or
        `leaf` itself.
    """
    cls: Any = type(leaf)
    kind = _classify(cls)
    if kind is None or (is_leaf is not None and is_leaf(leaf)):
        return leaf
    parts: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    if kind is _ContainerKind.MAPPING:
        names = _sort(leaf)
        parts, rebuild = [leaf[name] for name in names], _rebuild_mapping(leaf, names)
    elif kind is _ContainerKind.SEQUENCE:
        parts = list(leaf)
        names, rebuild = tuple(range(len(parts))), _rebuild_sequence(leaf)
    else:
        names = _list_field_names(leaf)
        parts, rebuild = [getattr(leaf, name) for name in names], _rebuild_record(leaf, names)
    parts = [_open_all(part, is_leaf, of_results) for part in parts]
    if not any(
        _is_wanted(each, kind, of_results) for each in jax.tree.leaves(parts, is_leaf=is_leaf)
    ):
        return leaf
    return _OpenContainer(_ContainerForm(type(leaf), names, rebuild), parts)


def _open_all(nest: object, is_leaf: IsLeaf | None, of_results: bool) -> Any:
    leaves, tree = jax.tree.flatten(nest, is_leaf=is_leaf)
    return jax.tree.unflatten(
        tree, [open_container(leaf, is_leaf, of_results=of_results) for leaf in leaves]
    )


def _is_wanted(leaf: object, kind: _ContainerKind, of_results: bool) -> bool:
    if is_wrapped(leaf) or jax_private.is_tracer(leaf):
        return True
    if of_results:
        return isinstance(leaf, jax.Array) or is_host_value(leaf)
    # A record that is given may be an object with a life of its own, such as a model.
    return kind is not _ContainerKind.RECORD and isinstance(leaf, (jax.Array, np.ndarray))


def _sort(names: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(sorted(names))
    except TypeError:  # Names of several types.
        return tuple(names)


def _list_field_names(record: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(record):
        fields: Iterable[Any] = dataclasses.fields(record)
    else:
        fields = record.__attrs_attrs__
    # A field may not have been set.
    return tuple(field.name for field in fields if hasattr(record, field.name))


def _rebuild_mapping(
    mapping: Mapping[Any, Any], names: Sequence[Any]
) -> Callable[[Sequence[Any]], Any]:
    cls, order = type(mapping), tuple(mapping)
    default = mapping.default_factory if isinstance(mapping, defaultdict) else None

    def rebuild(parts: Sequence[Any]) -> Any:
        by_name = dict(zip(names, parts, strict=True))
        items = {name: by_name[name] for name in order}
        make: Any = cls
        try:
            if not issubclass(cls, MutableMapping):
                return make(items)
            made = make()
        except TypeError as error:
            raise TypeError(
                f"{cls.__name__} is a mapping that cannot be made again with other values: "
                f"{error}. Let its class be called without arguments, or with a dict if it cannot "
                "be changed, or register it with jax.tree_util.register_pytree_node."
            ) from error
        if isinstance(made, defaultdict):
            made.default_factory = default
        for name, part in items.items():
            made[name] = part
        return made

    return rebuild


def _rebuild_sequence(sequence: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    cls: Any = type(sequence)
    if not isinstance(sequence, MutableSequence):
        return lambda parts: cls(parts)
    shell = copy.copy(sequence)
    shell.clear()

    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(shell)
        made.extend(parts)
        return made

    return rebuild


def _rebuild_record(record: Any, names: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    shell = copy.copy(record)
    for name in names:
        # Without the values, which would be kept alive; frozen records too.
        object.__setattr__(shell, name, None)

    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(shell)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return rebuild
