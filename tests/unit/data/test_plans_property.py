"""Random pipelines give what a plain Python interpreter gives, and resume at every position."""

from __future__ import annotations

import collections
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distribax.data import Dataset
from tests.unit.data.reference import Step, plain, values_of
from tests.unit.data.strategies import batch_steps, element_steps, shuffles, sources

_LIMIT = 60
_settings = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

plans = st.tuples(
    sources, st.lists(element_steps(), max_size=4), st.lists(batch_steps(), max_size=1)
)


def _dataset(steps: list[Step]) -> Dataset:
    dataset = Dataset.range(0)
    for step in steps:
        dataset = step.apply(dataset)
    return dataset


def _expected(steps: list[Step]) -> list[Any]:
    values: list[Any] = []
    for step in steps:
        values = step.expect(values)
    return values


def _flat(plan: tuple[Step, list[Step], list[Step]]) -> list[Step]:
    return [plan[0], *plan[1], *plan[2]]


@_settings
@given(plans)
def test_elements_are_those_of_the_interpreter(plan: tuple[Step, list[Step], list[Step]]) -> None:
    steps = _flat(plan)
    dataset, expected = _dataset(steps), _expected(steps)
    assert values_of(dataset) == expected
    # A second iteration, now with filled caches, and the number of elements.
    assert values_of(dataset) == expected
    assert dataset.cardinality() in (len(expected), -2)


@_settings
@given(
    plans,
    st.lists(shuffles(), min_size=1, max_size=2),
    st.lists(element_steps(), max_size=2),
)
def test_iterators_resume_at_every_position(
    plan: tuple[Step, list[Step], list[Step]], mixers: list[Step], later: list[Step]
) -> None:
    steps = [plan[0], *plan[1], *mixers, *later, *plan[2]]
    dataset = _dataset(steps)
    states, seen = [], []
    with dataset.make_iterator() as iterator:
        states.append(json.dumps(iterator.get_state()))
        for element in iterator:
            seen.append(plain(element))
            states.append(json.dumps(iterator.get_state()))
            if len(seen) == _LIMIT:
                break
    # Restoring into a data set that was built anew is restoring in another process.
    for rebuilt in (dataset, _dataset(steps)):
        for position in range(0, len(states), 1 + len(states) // 8):
            with rebuilt.make_iterator() as iterator:
                iterator.set_state(json.loads(states[position]))
                rest = [plain(next(iterator)) for _ in range(len(seen) - position)]
                assert rest == seen[position:]
                if len(seen) < _LIMIT:
                    assert next(iterator, "end") == "end"


@_settings
@given(plans, shuffles(), st.lists(element_steps(), max_size=0), st.integers(1, 3))
def test_a_shuffle_keeps_every_element_once(
    plan: tuple[Step, list[Step], list[Step]], mixer: Step, later: list[Step], epochs: int
) -> None:
    steps = [plan[0], *plan[1]]
    expected = _expected(steps)
    dataset = mixer.apply(_dataset(steps)).repeat(epochs)
    seen = values_of(dataset)
    for epoch in range(epochs):
        part = seen[epoch * len(expected) : (epoch + 1) * len(expected)]
        assert collections.Counter(part) == collections.Counter(expected)


@_settings
@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 5), st.integers(1, 7))
def test_fused_and_streamed_shuffles_agree(size: int, buffer: int, seed: int, batch: int) -> None:
    fused = Dataset.range(size).shuffle(buffer, seed=seed).repeat(2).batch(batch)
    # A filter that keeps all makes the source a stream, on which nothing can be fused.
    stream = Dataset.range(size).filter(lambda x: True)
    streamed = stream.shuffle(buffer, seed=seed).repeat(2).batch(batch)
    assert values_of(fused) == values_of(streamed)
