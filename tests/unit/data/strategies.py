"""Random pipelines for property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from distribax.data import AUTOTUNE, Dataset
from tests.unit.data.reference import Step, batched, interleaved

SMALL = st.integers(1, 5)


def _fan_out(value: Any) -> int:
    return int(np.sum(value)) % 4


def _inner(value: Any) -> Dataset:
    return Dataset.from_tensor_slices(np.repeat(np.asarray(value)[None], _fan_out(value), 0))


def _inner_values(value: Any) -> list[Any]:
    return [value] * _fan_out(value)


@st.composite
def element_steps(draw: st.DrawFn) -> Step:
    """A step whose elements stay single numbers, or arrays of them."""
    n, m = draw(SMALL), draw(SMALL)
    kind = draw(st.sampled_from(_KINDS))
    return kind(n, m)


def _take(n: int, m: int) -> Step:
    return Step(f"take({n * m})", lambda d: d.take(n * m), lambda v: v[: n * m])


def _skip(n: int, m: int) -> Step:
    return Step(f"skip({n})", lambda d: d.skip(n), lambda v: v[n:])


def _shard(n: int, m: int) -> Step:
    index = m % n
    return Step(f"shard({n}, {index})", lambda d: d.shard(n, index), lambda v: v[index::n])


def _repeat(n: int, m: int) -> Step:
    count = min(n, 3) - 1
    return Step(f"repeat({count})", lambda d: d.repeat(count), lambda v: v * count)


def _map(n: int, m: int) -> Step:
    threads = {1: None, 2: 2, 3: AUTOTUNE}.get(m)

    def add(value: Any) -> Any:
        return value + n

    def expect(values: list[Any]) -> list[Any]:
        return [(np.asarray(value) + n).tolist() for value in values]

    return Step(f"map(+{n}, {threads})", lambda d: d.map(add, threads), expect)


def _filter(n: int, m: int) -> Step:
    def keep(value: Any) -> bool:
        return int(np.sum(value)) % (n + 1) != 0

    return Step(
        f"filter({n})", lambda d: d.filter(keep), lambda v: [x for x in v if keep(np.asarray(x))]
    )


def _flat_map(n: int, m: int) -> Step:
    return Step(
        "flat_map",
        lambda d: d.flat_map(_inner),
        lambda v: [part for x in v for part in _inner_values(x)],
    )


def _interleave(n: int, m: int) -> Step:
    threads = 2 if m == 5 else None
    return Step(
        f"interleave({n}, {m}, {threads})",
        lambda d: d.interleave(_inner, cycle_length=n, block_length=m, num_parallel_calls=threads),
        lambda v: interleaved([_inner_values(x) for x in v], n, m),
    )


def _concatenate(n: int, m: int) -> Step:
    return Step(f"concatenate(take {n})", lambda d: d.concatenate(d.take(n)), lambda v: v + v[:n])


def _cache(n: int, m: int) -> Step:
    return Step("cache", lambda d: d.cache(), lambda v: v)


def _prefetch(n: int, m: int) -> Step:
    return Step(f"prefetch({n})", lambda d: d.prefetch(n), lambda v: v)


def _rebatch(n: int, m: int) -> Step:
    # Nothing but full batches keeps the rows as they were.
    return Step(f"batch({n}).unbatch", lambda d: d.batch(n).unbatch(), lambda v: v)


_KINDS = (
    _take,
    _skip,
    _shard,
    _repeat,
    _map,
    _filter,
    _flat_map,
    _interleave,
    _concatenate,
    _cache,
    _prefetch,
    _rebatch,
)


@st.composite
def batch_steps(draw: st.DrawFn) -> Step:
    """A step that batches."""
    size, drop = draw(SMALL), draw(st.booleans())
    return Step(
        f"batch({size}, {drop})",
        lambda d: d.batch(size, drop_remainder=drop),
        lambda v: batched(v, size, drop),
    )


@st.composite
def shuffles(draw: st.DrawFn) -> Step:
    """A shuffle, whose result can only be compared as a set."""
    size, seed = draw(st.integers(1, 12)), draw(st.one_of(st.none(), st.integers(0, 9)))
    return Step(f"shuffle({size}, {seed})", lambda d: d.shuffle(size, seed=seed), lambda v: v)


sources = st.integers(0, 12).map(
    lambda n: Step(f"range({n})", lambda _: Dataset.range(n), lambda _: list(range(n)))
)
