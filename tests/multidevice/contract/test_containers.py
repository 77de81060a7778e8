"""Containers that replicas take and return: they keep their class, and values in them are found."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import distribax as dx
from tests.multidevice.contract.cases import Case, replica_number
from tests.multidevice.contract.other_workers import TOGETHER


class Named(NamedTuple):
    a: Any


class Attributes(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Counted(defaultdict[str, Any]):
    pass


class Fixed(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Rows(list[Any]):
    pass


@dataclasses.dataclass
class Record:
    a: Any


@dataclasses.dataclass
class Labelled(Record):
    label: str = "text"
    parts: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


class Attrs:
    """Looks as a class of attrs does."""

    __attrs_attrs__ = (type("Attribute", (), {"name": "a"}),)

    def __init__(self, a: Any) -> None:
        self.a = a


MAKERS: dict[str, Any] = {
    "ordered": lambda a: OrderedDict(a=a),
    "defaultdict": lambda a: defaultdict(list, a=a),
    "attributes": lambda a: Attributes(a=a),
    "counted": lambda a: Counted(list, a=a),
    "user dict": lambda a: UserDict(a=a),
    "proxy": lambda a: MappingProxyType({"a": a}),
    "fixed": lambda a: Fixed({"a": a}),
    "named": lambda a: Named(a),
    "rows": lambda a: Rows([a]),
    "deque": lambda a: deque([a], maxlen=4),
    "record": lambda a: Record(a),
    "frozen": lambda a: Frozen(a),
    "attrs": lambda a: Attrs(a),
    "nested": lambda a: Record(Attributes(a=Rows([a]))),
}


def _take(container: Any) -> Any:
    """Returns the value in a container of any kind."""
    while not isinstance(container, (dx.DistributedValues, np.ndarray, float)):
        if isinstance(container, Mapping):
            container = container["a"]
        elif hasattr(container, "a"):
            container = container.a
        elif isinstance(container, (list, deque)):
            container = container[0]
        else:
            return container
    return container


@pytest.mark.parametrize("kind", MAKERS)
def test_containers_keep_their_class(kind: str, compiled: bool) -> None:
    case, make = Case("mirrored", 2, compiled), MAKERS[kind]
    strategy = case.strategy
    value = case.each(lambda index: jnp.asarray(index + 1.0))

    def replica_fn(given: Any) -> Any:
        assert type(given) is type(make(0))
        context = dx.get_replica_context()
        total = context.all_reduce("SUM", make(_take(given)))
        merged = context.merge_call(
            lambda strategy, x: strategy.reduce("MEAN", x, axis=None), args=(make(_take(given)),)
        )
        return make(_take(given) * 2), total, merged

    def step(given: Any) -> Any:
        own, total, merged = strategy.run(replica_fn, args=(given,))
        return own, total, merged, strategy.reduce("SUM", own, axis=None)

    own, total, merged, reduced = case.across(step, make(value))
    for result in (own, total, merged, reduced):
        assert type(result) is type(make(0))
    assert case.numbers(_take(own)) == [2.0, 4.0]
    assert [float(_take(x)) for x in (total, merged, reduced)] == [3.0, 1.5, 6.0]
    parts = strategy.experimental_local_results(own)
    assert [type(part) for part in parts] == [type(own)] * 2
    assert [float(_take(part)) for part in parts] == [2.0, 4.0]


def test_what_containers_have_beside_values_is_kept(small: Case) -> None:
    def replica_fn() -> Any:
        a = replica_number()
        rows = MappingProxyType({"a": a, 3: "text"}), deque([a, 5], maxlen=4)
        return Counted(list, a=a), Attributes(z=1, a=a), rows, Labelled(a, parts=[a])

    counted, attributes, (mixed, rows), record = small.run(replica_fn)
    assert mixed[3] == "text"
    assert counted.default_factory is list and counted["new"] == []
    assert list(attributes) == ["z", "a"] and attributes.a is attributes["a"]
    assert rows.maxlen == 4 and rows[1] == 5
    assert record.label == "text" and isinstance(record.parts, list)


def test_an_object_of_all_replicas_is_not_looked_into(small: Case) -> None:
    model = Labelled(jnp.ones(2), "model")

    def replica_fn(given: Any) -> Any:
        assert given is model
        return given

    # Among several workers, an array in it is what a worker has of its own.
    if not small.compiled and not TOGETHER:
        assert small.run(replica_fn, model) is model
    config = Attributes(size=3)
    assert small.run(lambda: (config, "text"))[0] is config


def test_a_mapping_that_cannot_be_made_again_says_so(pair: Any) -> None:
    class Strict(dict[str, Any]):
        def __init__(self, name: str, **items: Any) -> None:
            super().__init__(**items)

    with pytest.raises(TypeError, match=r"Strict is a mapping that cannot be made again.*register"):
        pair.run(lambda: Strict("x", a=replica_number()))
