"""One call of a compiled function: its arguments, and the elements that are fetched for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.tree_util import PyTreeDef

from distribax import contracts, jax_private
from distribax.execution.calls import signature
from distribax.execution.state import role_arguments
from distribax.execution.state.role_arguments import RoleArgument
from distribax.execution.traces import frames
from distribax.execution.traces.iterators import LiftedIterator, Pulled
from distribax.values import Form, is_none_or_opaque, is_wrapped

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Origin: TypeAlias = int | LiftedIterator
"""Where an iterator comes from: its place among the arguments, or itself."""


@dataclass(eq=False)
class Call:
    """A call: its arguments, flat and as they were given, and the elements fetched for it.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
        leaves: All of them, flat.
        tree: Their structure.
        slots: How each leaf enters the program.
        dynamic: The leaves that are inputs of the program.
        key: What calls with the same programs have in common.
        pulled: The elements that were fetched, each with its iterator.
        captured: The distributed values that replicas have found in a trace, and not been given.
    """

    args: Args
    kwargs: Kwargs
    leaves: list[Any]
    tree: PyTreeDef
    slots: list[signature.Slot]
    dynamic: list[Any]
    key: tuple[Hashable, ...]
    pulled: list[Pulled] = field(default_factory=list, init=False)
    captured: dict[contracts.State, None] = field(default_factory=dict, init=False)

    @property
    def has_wrapped(self) -> bool:
        """Whether there are distributed values among the arguments and elements."""
        elements = jax.tree.leaves([element for _, element in self.pulled], is_leaf=is_wrapped)
        return any(isinstance(slot, Form) for slot in self.slots) or any(map(is_wrapped, elements))

    def fetch_all(self, origins: Iterable[Origin]) -> None:
        """Fetches the elements that an earlier call with these arguments needed."""
        for origin in origins:
            iterator = self.leaves[origin] if isinstance(origin, int) else origin
            self.pulled.append((iterator, iterator.fetch()))

    def fetch(self, iterator: LiftedIterator) -> Any:
        """Fetches an element that the function asks for while it is traced."""
        element = frames.run_outside(iterator.fetch)
        self.pulled.append((iterator, element))
        return element

    def find_origins(self) -> list[Origin]:
        """Returns where the iterators are from whose elements were fetched."""
        return [self._find_origin(iterator) for iterator, _ in self.pulled]

    def _find_origin(self, iterator: LiftedIterator) -> Origin:
        for index, leaf in enumerate(self.leaves):
            if leaf is iterator:
                return index
        return iterator

    @functools.cached_property
    def role_arguments(self) -> list[RoleArgument]:
        """The variables among the arguments."""
        return [slot.value for slot in self.slots if isinstance(slot, signature.RoleSlot)]

    @functools.cached_property
    def role_key(self) -> Hashable:
        """Like `key`, for all calls with variables of the same forms."""
        where, tree, *keys = self.key
        others = [
            None if isinstance(slot, signature.RoleSlot) else key
            for slot, key in zip(self.slots, keys, strict=True)
        ]
        return (where, tree, *others, role_arguments.describe(self.role_arguments))

    @property
    def static_objects(self) -> list[object]:
        """The arguments that are part of the signature, but for variables and iterators."""
        slots = (slot for slot in self.slots if type(slot) is signature.StaticSlot)
        return [slot.value for slot in slots if not isinstance(slot.value, LiftedIterator)]

    def read_role_key(self) -> Hashable:
        """Returns the key of programs for this call and others with variables of these forms."""
        return (self.role_key, *self.read_inputs()[0])

    def read_inputs(self) -> tuple[tuple[Hashable, ...], list[Any]]:
        """Returns the signatures of the elements, and the program's inputs, with the elements."""
        if not self.pulled:
            return (), self.dynamic
        inputs, keys = list(self.dynamic), []
        for _, element in self.pulled:
            leaves, tree = jax.tree.flatten(element)
            parts, _, values = signature.read(leaves, frozenset())
            inputs.extend(values)
            keys.append((tree, *parts))
        return tuple(keys), inputs

    def name_inputs(self, fn: Callable[..., object]) -> Iterator[str]:
        """Yields what the arguments that are inputs are called where `fn` is written."""
        names = name_leaves(fn, self.args, self.kwargs, is_none_or_opaque)
        if len(names) != len(self.slots):
            # Containers that JAX does not know.
            names = [f"argument {index}" for index in range(len(self.slots))]
        for name, slot in zip(names, self.slots, strict=True):
            if not isinstance(slot, signature.StaticSlot):
                yield name


def name_leaves(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    is_leaf: Callable[[object], bool],
) -> list[str]:
    """Returns what the leaves of arguments are called where `fn` is written: "x", "batch[0]"."""
    paths, _ = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)), is_leaf=is_leaf)
    positional = _name_positions(fn, len(args))
    names = []
    for (kind, which, *inner), _ in paths:
        name = positional[which.idx] if kind.idx == 0 else str(which.key)
        names.append(name + jax.tree_util.keystr(tuple(inner)))
    return names


def _name_positions(fn: Callable[..., object], count: int) -> list[str]:
    """Returns the names of the first `count` positional parameters."""
    parameters = jax_private.list_parameters(fn)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds][:count]
    rest = [each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL]
    name = rest[0] if rest else "args"
    return [*names, *(f"{name}[{index}]" for index in range(count - len(names)))]


def rebuild(tree: PyTreeDef, slots: Sequence[signature.Slot], inputs: Iterable[Any]) -> Any:
    """Returns a nest with `inputs` in it, as traced code sees it."""
    remaining = iter(inputs)
    leaves: list[Any] = []
    for slot in slots:
        if isinstance(slot, signature.StaticSlot):
            leaves.append(slot.value)
        else:
            array = next(remaining)
            leaves.append(array if slot is None else slot.wrap(array))
    return jax.tree.unflatten(tree, leaves)
