"""Steps that look at elements one by one and keep, change or count them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from distribax.data import elements
from distribax.data.element_spec import Spec, find_spec
from distribax.data.plan.passes import Passes
from distribax.data.plan.plan_node import Probe, UnaryNode


@dataclass(frozen=True, eq=False)
class TakeWhile(UnaryNode):
    """The elements before the first one for which a predicate is false."""

    label_format = "take_while()"
    keeps_count = False
    predicate: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Unique(UnaryNode):
    """The elements that did not come before."""

    label_format = "unique()"
    keeps_count = False


@dataclass(frozen=True, eq=False)
class IgnoreErrors(UnaryNode):
    """The elements that could be made."""

    label_format = "ignore_errors()"
    keeps_count = False
    log_warning: bool


@dataclass(frozen=True, eq=False)
class AssertCardinality(UnaryNode):
    """The elements, whose number is known in advance."""

    label_format = "assert_cardinality({node.count})"
    count: int

    @override
    def cardinality(self) -> int:
        return self.count


@dataclass(frozen=True, eq=False)
class Scan(UnaryNode):
    """Every element through a function that passes a state on."""

    label_format = "scan()"
    initial_state: elements.Element
    fn: Callable[..., Any]

    def call(self, state: elements.Element, element: elements.Element) -> tuple[Any, Any]:
        """Returns the next state and the new element."""
        made = self.fn(state, element)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise TypeError(
                f"the function given to Dataset.scan returned {elements.shorten(made)}. Expected a "
                "tuple of the next state and the new element."
            )
        after = elements.check_state(state, elements.to_element(made[0]), "scan_func")
        return after, elements.from_return(made[1])

    @override
    def spec(self, probe: Probe) -> Spec:
        return self.infer(
            lambda element: find_spec(self.call(self.initial_state, element)[1]), probe, "scan"
        )


@dataclass(frozen=True, eq=False)
class Resample(UnaryNode):
    """Pairs of class and element, of which some are left out at random."""

    label_format = "rejection_resample()"
    keeps_count = False
    class_func: Callable[..., Any]
    target: tuple[float, ...]
    # None to estimate it.
    initial: tuple[float, ...] | None
    seed: int | None
    reshuffle_each_iteration: bool = True
    passes: Passes = field(default_factory=Passes)

    @override
    def spec(self, probe: Probe) -> Spec:
        given = self.input.spec(probe)

        def pair(element: elements.Element) -> Spec:
            label = elements.to_element(elements.call_with_element(self.class_func, element))
            return (find_spec(label), given)

        return self.infer(pair, probe, "rejection_resample")

    @override
    def is_batched(self, probe: Probe) -> bool | None:
        # The class has no batch dimension, so such elements cannot be split.
        return False
