"""Variants: one SPMD program in which devices run the same code for different shapes.

Each variant is traced by itself. The traces are laid side by side: what is computed alike in all of
them, from the same inputs, stays outside; the rest goes into branches, of which each device takes
its own. Collectives are always outside, as a device that waits for the others in one branch would
not meet those in another; so the traces are cut at their collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax.extend import core

_Id: TypeAlias = int
"""The number of a value; values that are computed alike have one number in all variants."""

# They name a mesh axis, but do not wait for other devices.
_LOCAL = frozenset({"axis_index", "pvary", "pcast", "preduced", "vary_unreduced_cast"})
# By primitive, the parameter that has the program of a call that is run once, where it stands.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


class VariantsDiffer(Exception):
    """The variants do not meet in the same collectives, so they cannot be one program."""


@dataclass(frozen=True)
class _NumberedEquation:
    """One equation, with the numbers of what it takes and gives."""

    equation: core.JaxprEqn
    inputs: tuple[_Id, ...]
    outputs: tuple[_Id, ...]


@dataclass
class _VariantProgram:
    """The trace of a variant: steps between collectives, and what it returns."""

    segments: list[list[_NumberedEquation]] = field(default_factory=lambda: [[]])
    collectives: list[_NumberedEquation] = field(default_factory=list)
    returned: list[_Id] = field(default_factory=list)
    made: set[tuple[_Id, ...]] = field(default_factory=set)

    def add(self, step: _NumberedEquation) -> None:
        """Adds a step, unless the same has been computed before."""
        if step.equation.effects or step.outputs not in self.made:
            self.made.add(step.outputs)
            self.segments[-1].append(step)

    def drop_unused(self) -> None:
        """Leaves out the steps whose results nobody needs."""
        needed = set(self.returned)
        for place in reversed(range(len(self.segments))):
            if place < len(self.collectives):
                needed.update(self.collectives[place].inputs)
            kept = []
            for step in reversed(self.segments[place]):
                if step.equation.effects or needed.intersection(step.outputs):
                    kept.append(step)
                    needed.update(step.inputs)
            self.segments[place] = kept[::-1]

    def get_ending(self, place: int) -> Sequence[_Id]:
        """Returns what is needed at the end of a segment: for a collective, or as the results."""
        if place == len(self.collectives):
            return self.returned
        return self.collectives[place].inputs

    def find_last_segments(self) -> dict[_Id, int]:
        """Returns the last segment of which each value must be an output, if it is made there."""
        last: dict[_Id, int] = {}
        for place, segment in enumerate(self.segments):
            for step in segment:
                last.update(dict.fromkeys(step.inputs, place - 1))
            last.update(dict.fromkeys(self.get_ending(place), place))
        return last


class _Numbering:
    """Numbers the values of several traces, so that equal computations get equal numbers."""

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.known: dict[_Id, Any] = {}
        self.literals: dict[_Id, Any] = {}
        self.avals: dict[_Id, Any] = {}
        self._keys: dict[object, Any] = {}
        self._kept: list[object] = []

    def create(self, aval: Any) -> _Id:
        number = len(self.avals)
        self.avals[number] = aval
        return number

    def number_constant(self, value: Any) -> _Id:
        key = ("constant", id(value))
        if key not in self._keys:
            self._keys[key] = number = self.create(_core.typeof(value))
            self.known[number] = value
        return self._keys[key]

    def number_outputs(self, equation: core.JaxprEqn, inputs: tuple[_Id, ...]) -> tuple[_Id, ...]:
        key: object = (equation.primitive, _make_params_key(equation.params), inputs)
        if equation.effects or key not in self._keys:
            # What the key names by its id must not be replaced by something else.
            self._kept.append(equation.params)
            self._keys[key] = tuple(self.create(var.aval) for var in equation.outvars)
        return self._keys[key]

    def number(self, traced: core.ClosedJaxpr, inputs: Sequence[_Id]) -> _VariantProgram:
        """Returns the trace of a variant, in which calls that hold collectives are inlined."""
        program = _VariantProgram()
        program.returned = self._add(program, traced.jaxpr, traced.consts, inputs)
        return program

    def _add(
        self,
        program: _VariantProgram,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[_Id],
    ) -> list[_Id]:
        numbers: dict[core.Var, _Id] = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers.update(zip(jaxpr.constvars, map(self.number_constant, consts), strict=True))

        def find(atom: core.Var | core.Literal) -> _Id:
            return self._number_literal(atom) if isinstance(atom, core.Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            given = tuple(map(find, equation.invars))
            if not _has_collective(equation, self.axis):
                made = self.number_outputs(equation, given)
                program.add(_NumberedEquation(equation, given, made))
            elif _is_collective(equation, self.axis):
                made = self._number_met(len(program.collectives), equation)
                program.collectives.append(_NumberedEquation(equation, given, made))
                program.segments.append([])
            else:
                made = tuple(self._add(program, *_find_body(equation), given))
            numbers.update(zip(equation.outvars, made, strict=True))
        return [find(atom) for atom in jaxpr.outvars]

    def _number_met(self, place: int, equation: core.JaxprEqn) -> tuple[_Id, ...]:
        """Returns the numbers of what a collective gives, the same in all variants."""
        key = ("collective", place, len(equation.outvars))
        if key not in self._keys:
            self._keys[key] = tuple(self.create(var.aval) for var in equation.outvars)
        return self._keys[key]

    def _number_literal(self, literal: core.Literal) -> _Id:
        key = ("literal", literal.aval, repr(literal.val))
        if key not in self._keys:
            self._keys[key] = number = self.create(literal.aval)
            self.literals[number] = literal.val
        return self._keys[key]


def _make_params_key(params: dict[str, Any]) -> object:
    return tuple((name, _make_value_key(value)) for name, value in sorted(params.items()))


def _make_value_key(value: Any) -> object:
    if isinstance(value, core.ClosedJaxpr):
        return str(value.jaxpr), tuple(map(id, value.consts))
    if isinstance(value, core.Jaxpr):
        return str(value)
    if isinstance(value, tuple):
        return tuple(map(_make_value_key, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _is_collective(equation: core.JaxprEqn, axis: str) -> bool:
    if equation.primitive.name in _LOCAL:
        return False
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    return axis in (named if isinstance(named, (tuple, list, frozenset)) else (named,))


def _has_collective(equation: core.JaxprEqn, axis: str) -> bool:
    if _is_collective(equation, axis):
        return True
    return any(
        _has_collective(inner, axis)
        for jaxpr in core.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )


def _find_body(equation: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    name = equation.primitive.name
    body = equation.params.get(_CALLS.get(name, ""))
    if body is None:
        raise VariantsDiffer(f"replicas meet inside {name}")
    return (body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (body, ())


def run_variants(
    traced: Sequence[core.ClosedJaxpr],
    inputs: Sequence[jax.Array],
    choice: jax.Array,
    axis: str,
) -> list[jax.Array]:
    """Runs one of several traced programs, the one that each device chooses.

    Args:
        traced: The programs, which take the same inputs and return as many arrays.
        inputs: The inputs.
        choice: The index of this device's program.
        axis: The mesh axis of the devices.

    Returns:
        The arrays of the chosen program; where their shapes differ by program, they are padded with
        zeros to the largest.

    Raises:
        VariantsDiffer: The programs do not meet in the same collectives, with the same shapes.
    """
    numbering = _Numbering(axis)
    given = [numbering.create(_core.typeof(value)) for value in inputs]
    numbering.known.update(zip(given, inputs, strict=True))
    programs = [numbering.number(each, given) for each in traced]
    for program in programs:
        program.drop_unused()
    _check_meetings(programs, numbering)
    return _VariantRunner(numbering, programs, choice).run()


def _check_meetings(programs: Sequence[_VariantProgram], numbering: _Numbering) -> None:
    if len({len(program.collectives) for program in programs}) > 1:
        raise VariantsDiffer("replicas with pieces of another size meet more or less often")
    for steps in zip(*(program.collectives for program in programs), strict=True):
        if len({_describe(step, numbering) for step in steps}) > 1:
            raise VariantsDiffer("the replicas meet with values of different shape")


def _describe(step: _NumberedEquation, numbering: _Numbering) -> object:
    avals = [numbering.avals[number] for number in step.inputs]
    forms = tuple((aval.shape, aval.dtype) for aval in avals)
    return step.equation.primitive, _make_params_key(step.equation.params), forms


class _VariantRunner:
    """Runs programs side by side."""

    def __init__(
        self, numbering: _Numbering, programs: Sequence[_VariantProgram], choice: jax.Array
    ) -> None:
        self._avals = numbering.avals
        self._literals = numbering.literals
        self._programs = programs
        self._choice = choice
        # What all programs have, and what each of them alone has.
        self._common: dict[_Id, Any] = {**numbering.known, **numbering.literals}
        self._own: list[dict[_Id, Any]] = [{} for _ in programs]
        self._last = [program.find_last_segments() for program in programs]
        self._shared = self._find_shared()

    def _find_shared(self) -> dict[tuple[_Id, ...], int]:
        """Returns the outputs of steps that all programs have, with the first segment of them."""
        places: list[dict[tuple[_Id, ...], int]] = []
        for program in self._programs:
            places.append({})
            for place, segment in enumerate(program.segments):
                for step in segment:
                    if not step.equation.effects:
                        places[-1].setdefault(step.outputs, place)
        in_all = set(places[0]).intersection(*places[1:])
        return {outputs: min(place[outputs] for place in places) for outputs in in_all}

    def run(self) -> list[jax.Array]:
        """Returns the results of the chosen program."""
        for place in range(len(self._programs[0].collectives)):
            operands = self._run_segment(place)
            step = self._programs[0].collectives[place]
            self._common.update(zip(step.outputs, _bind(step.equation, operands), strict=True))
        return self._run_segment(len(self._programs[0].collectives))

    def _run_segment(self, place: int) -> list[Any]:
        """Returns what is needed at the end of a segment."""
        self._run_shared(place)
        endings = list(zip(*(each.get_ending(place) for each in self._programs), strict=True))
        # What is one value for all needs no branch.
        chosen = [numbers for numbers in endings if not self._is_common(numbers)]
        results = self._run_own(place, list(dict.fromkeys(chosen)))
        return [
            self._common[numbers[0]] if self._is_common(numbers) else results[numbers]
            for numbers in endings
        ]

    def _is_common(self, numbers: tuple[_Id, ...]) -> bool:
        return len(set(numbers)) == 1 and numbers[0] in self._common

    def _run_shared(self, place: int) -> None:
        steps = {
            step.outputs: step
            for program in self._programs
            for segment in program.segments
            for step in segment
            if self._shared.get(step.outputs) == place and not step.equation.effects
        }
        # Numbers grow from what a step takes to what it gives.
        for outputs in sorted(steps):
            step = steps[outputs]
            values = [self._common[number] for number in step.inputs]
            self._common.update(zip(outputs, _bind(step.equation, values), strict=True))

    def _run_own(
        self, place: int, chosen: list[tuple[_Id, ...]]
    ) -> dict[tuple[_Id, ...], jax.Array]:
        """Runs what the programs do not have in common, in branches."""
        steps = [
            [s for s in each.segments[place] if s.equation.effects or s.outputs not in self._shared]
            for each in self._programs
        ]
        if not chosen and not any(steps):
            return {}
        forms = [_find_largest([self._avals[number] for number in numbers]) for numbers in chosen]
        kept = [self._find_kept(index, place, own, chosen) for index, own in enumerate(steps)]
        slots = _share_slots([[self._avals[n] for n in numbers] for numbers in kept])
        forms += slots.forms
        operands: dict[tuple[int, _Id], Any] = {}
        for index, own in enumerate(steps):
            made = {number for step in own for number in step.outputs}
            needed = {number for step in own for number in step.inputs}
            needed |= {numbers[index] for numbers in chosen}
            for number in needed - made - self._literals.keys():
                operands[index, number] = self._find(index, number)
        # One operand for each array, whatever the number of programs that take it.
        arrays = {id(value): value for value in operands.values()}
        order = {key: position for position, key in enumerate(arrays)}

        def make_branch(index: int) -> Callable[[list[Any]], list[Any]]:
            def branch(given: list[Any]) -> list[Any]:
                values = dict(self._literals)
                for (owner, number), value in operands.items():
                    if owner == index:
                        values[number] = given[order[id(value)]]
                for step in steps[index]:
                    made = _bind(step.equation, [values[number] for number in step.inputs])
                    values.update(zip(step.outputs, made, strict=True))
                given_out: list[Any] = [None] * len(forms)
                for position, numbers in enumerate(chosen):
                    given_out[position] = values[numbers[index]]
                for number, slot in zip(kept[index], slots.places[index], strict=True):
                    given_out[len(chosen) + slot] = values[number]
                return [_fit(v, form) for v, form in zip(given_out, forms, strict=True)]

            return branch

        branches = [make_branch(index) for index in range(len(self._programs))]
        results = lax.switch(self._choice, branches, list(arrays.values()))
        for index, numbers_kept in enumerate(kept):
            for number, slot in zip(numbers_kept, slots.places[index], strict=True):
                self._own[index][number] = results[len(chosen) + slot]
            for position, numbers in enumerate(chosen):
                self._own[index].setdefault(numbers[index], results[position])
        return dict(zip(chosen, results[: len(chosen)], strict=True))

    def _find(self, index: int, number: _Id) -> Any:
        return self._common[number] if number in self._common else self._own[index][number]

    def _find_kept(
        self, index: int, place: int, steps: list[_NumberedEquation], chosen: list[tuple[_Id, ...]]
    ) -> list[_Id]:
        """Returns what a program makes in a segment and needs in later ones."""
        last, taken = self._last[index], {numbers[index] for numbers in chosen}
        return [
            number
            for step in steps
            for number in step.outputs
            if last.get(number, -1) >= place and number not in taken
        ]


@dataclass(frozen=True)
class _Slots:
    """The values that branches hand on; values of one form share a slot, whoever they belong to."""

    forms: list[Any]
    places: list[list[int]]


def _share_slots(avals: list[list[Any]]) -> _Slots:
    forms: list[Any] = []
    places: list[list[int]] = []
    for own in avals:
        free = list(range(len(forms)))
        places.append([])
        for aval in own:
            slot = next((s for s in free if _same_form(forms[s], aval)), None)
            if slot is None:
                slot = len(forms)
                forms.append(aval)
            else:
                free.remove(slot)
            places[-1].append(slot)
    return _Slots(forms, places)


def _same_form(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _find_largest(avals: Sequence[Any]) -> Any:
    """Returns the form into which arrays of all given forms fit."""
    first = avals[0]
    if len({aval.ndim for aval in avals}) > 1 or len({aval.dtype for aval in avals}) > 1:
        raise VariantsDiffer("the replicas return values of different form")
    shape = tuple(map(max, zip(*(aval.shape for aval in avals), strict=True)))
    return jax.ShapeDtypeStruct(shape, first.dtype)


def _fit(value: Any, form: Any) -> jax.Array:
    """Returns a value padded with zeros to a form; zeros for None."""
    if jnp.issubdtype(form.dtype, jax.dtypes.prng_key):
        return _fit_key(value, form)
    if value is None:
        return jnp.zeros(form.shape, form.dtype)
    value = lax.convert_element_type(value, form.dtype)
    return pad_to(value, form.shape)


def _fit_key(value: Any, form: Any) -> jax.Array:
    if value is not None and value.shape == form.shape:
        return value
    if value is not None:
        raise VariantsDiffer("the replicas return random keys of different shape")
    key = jax.random.key(0, impl=str(form.dtype._impl.name))
    return jnp.broadcast_to(key, form.shape)


def pad_to(value: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns `value` with zeros at the ends of its dimensions, so that it has a given shape."""
    if tuple(value.shape) == tuple(shape):
        return value
    added = [(0, wanted - size, 0) for size, wanted in zip(value.shape, shape, strict=True)]
    return lax.pad(value, np.zeros((), value.dtype), added)


def _bind(equation: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Runs one equation."""
    params = equation.primitive.get_bind_params(equation.params)
    names = _source_info.current_name_stack() + equation.source_info.name_stack
    with (
        _source_info.user_context(equation.source_info.traceback, name_stack=names),
        equation.ctx.manager,
    ):
        result = equation.primitive.bind(*values, **params)
    return result if equation.primitive.multiple_results else [result]
