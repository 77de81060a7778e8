"""The base of a data set's logical plan: immutable nodes that say what, not how."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from typing_extensions import override

from distribax.data.element_spec import Spec, infer_spec, make_zeros, merge_specs
from distribax.data.elements import Element
from distribax.errors import DistribaxError

INFINITE_CARDINALITY = -1
"""The `cardinality()` of a data set that never ends."""
UNKNOWN_CARDINALITY = -2
"""The `cardinality()` of a data set whose number of elements only reading it would tell."""

Probe: TypeAlias = Callable[["Node"], "Element | None"]
"""Runs a plan up to its first element; None if it has none."""


class UnknownSpecError(DistribaxError, ValueError):
    """The `element_spec` of a data set is not known: it has no element to derive it from."""


@runtime_checkable
class HasPlan(Protocol):
    """What the plan needs of a data set: its own plan."""

    @property
    def plan(self) -> Node: ...


@dataclass(frozen=True, eq=False)
class Node(abc.ABC):
    """One step of a pipeline. Nodes are compared by identity and never changed."""

    label_format: ClassVar[str] = ""
    """The label, with the node's fields as `{node.count}`."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes this one reads from."""
        return ()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """Returns the same step on other inputs; a source is returned as it is."""
        assert not inputs
        return self

    def cardinality(self) -> int:
        """Returns the number of elements, or INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return UNKNOWN_CARDINALITY

    @abc.abstractmethod
    def spec(self, probe: Probe) -> Spec:
        """Returns the nest of TensorSpecs; `probe` runs what only running can tell."""

    def is_batched(self, probe: Probe) -> bool | None:
        """Tells whether the elements are batches; None if only the elements can tell."""
        return False

    def static_batch_size(self, probe: Probe) -> int | None:
        """Returns the size of a full batch, if the plan says it."""
        return None

    @property
    def label(self) -> str:
        """How this step reads in a pipeline's fingerprint and in error messages."""
        return self.label_format.format(node=self)


@dataclass(frozen=True, eq=False)
class UnaryNode(Node):
    """A step on one input, by default one that keeps count, spec and batches as they are."""

    keeps_count: ClassVar[bool] = True
    """Whether there are as many elements as in the input; otherwise only reading them tells."""
    keeps_batches: ClassVar[bool] = True
    """Whether batches stay batches; otherwise no element is one."""
    input: Node

    @property
    @override
    def inputs(self) -> tuple[Node, ...]:
        return (self.input,)

    @override
    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        (only,) = inputs
        return dataclasses.replace(self, input=only)

    @override
    def cardinality(self) -> int:
        return self.input.cardinality() if self.keeps_count else UNKNOWN_CARDINALITY

    @override
    def spec(self, probe: Probe) -> Spec:
        return self.input.spec(probe)

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        return self.input.is_batched(probe) if self.keeps_batches else False

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        return self.input.static_batch_size(probe) if self.keeps_batches else None

    def infer(self, spec_for: Callable[[Element], Spec], probe: Probe, step: str) -> Spec:
        """Returns the spec of what a user's function makes of elements, by running it on the first.

        Without any element it is run on make_zeros, which need not be anything that it understands.
        """
        given, first = self.input.spec(probe), probe(self.input)
        try:
            return infer_spec(spec_for, make_zeros(given) if first is None else first, given)
        except Exception as error:
            if first is not None:
                raise
            raise UnknownSpecError(
                f"the element_spec of {step} over an empty data set cannot be known: its function "
                f"failed on an element of zeros ({type(error).__name__}: {error})."
            ) from error


@dataclass(frozen=True, eq=False)
class CombiningNode(Node):
    """A step on several inputs, by default one whose elements come from any of them."""

    parts: tuple[Node, ...]

    @property
    @override
    def inputs(self) -> tuple[Node, ...]:
        return self.parts

    @override
    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        return dataclasses.replace(self, parts=inputs)

    @override
    def spec(self, probe: Probe) -> Spec:
        return functools.reduce(merge_specs, (part.spec(probe) for part in self.parts))

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        answers = [part.is_batched(probe) for part in self.parts]
        if False in answers:
            return False
        return None if None in answers else True

    @override
    def static_batch_size(self, probe: Probe) -> int | None:
        sizes = {part.static_batch_size(probe) for part in self.parts}
        return sizes.pop() if len(sizes) == 1 else None


def walk(node: Node) -> Iterator[Node]:
    """Visits a plan from its end to its sources."""
    yield node
    for child in node.inputs:
        yield from walk(child)


def fingerprint(node: Node) -> str:
    """Returns a readable line that tells pipelines of different steps or sizes apart.

    Functions and data are not part of it, and neither is the number of workers and replicas
    that share a batch: a saved position means the same for any of them.
    """
    label = node.label
    if len(node.inputs) == 1:
        return f"{fingerprint(node.inputs[0])}{'.' if label else ''}{label}"
    if node.inputs:
        return f"{label}({', '.join(fingerprint(child) for child in node.inputs)})"
    return label
