"""The orders that a buffered shuffle produces, as arithmetic on positions.

A shuffle with a buffer of B places fills the places with the first B elements. Each step draws a
place, gives out its element and puts the next element there. When the input has ended, the places
are given out in a random order. The draws depend on a key alone, so the order of a whole pass can
be computed without touching an element, and a pass can be resumed from a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

Key: TypeAlias = tuple[int, ...]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_BLOCK = 4096
BLOCK_SIZE = 256
"""How many random numbers a block has that can be made by its number."""


def _make_generator(key: Key, stream: int) -> np.random.Generator:
    words = [word & 0xFFFF_FFFF_FFFF_FFFF for word in key]
    return np.random.default_rng(np.random.SeedSequence(words, spawn_key=(stream,)))


def _draw_blocks(key: Key, num_places: int) -> Iterator[Indices]:
    # Blocks of one size: however many draws are asked for at a time, they are the same draws.
    random = _make_generator(key, 0)
    while True:
        yield random.integers(0, num_places, _BLOCK)


def draw_places(key: Key, num_places: int, skip: int = 0) -> Iterator[int]:
    """Returns the endless sequence of drawn places, from number `skip` on."""
    for block in _draw_blocks(key, num_places):
        if skip >= _BLOCK:
            skip -= _BLOCK
            continue
        yield from block[skip:].tolist()
        skip = 0


def draw_first_places(key: Key, num_places: int, count: int) -> Indices:
    """Returns the first `count` drawn places."""
    blocks = _draw_blocks(key, num_places)
    parts = [next(blocks) for _ in range(-(-count // _BLOCK))]
    return np.concatenate(parts)[:count] if parts else np.empty(0, np.int64)


def draw_last_order(key: Key, size: int) -> Indices:
    """Returns the order in which `size` filled places are given out at the end."""
    return _make_generator(key, 1).permutation(size)


def fill_places(key: Key, num_places: int, steps: int) -> Indices:
    """Returns which element is in each place after so many steps of a full buffer."""
    places = np.arange(num_places)
    # Where a place was drawn several times, the last element put there stays.
    places[draw_first_places(key, num_places, steps)] = num_places + np.arange(steps)
    return places


def shuffle_order(key: Key, size: int, num_places: int) -> Indices:
    """Returns the order in which a pass over `size` elements gives them out."""
    if size <= num_places:
        return draw_last_order(key, size)
    steps = size - num_places
    drawn = draw_first_places(key, num_places, steps)
    # A step gives out what the previous step at the same place put there; sorting the steps by
    # place brings each next to its predecessor.
    by_place = np.argsort(drawn, kind="stable")
    sorted_places = drawn[by_place]
    given = np.empty(steps, np.int64)
    given[by_place] = sorted_places
    follows = sorted_places[1:] == sorted_places[:-1]
    given[by_place[1:][follows]] = num_places + by_place[:-1][follows]
    rest = fill_places(key, num_places, steps)[draw_last_order(key, num_places)]
    return np.concatenate([given, rest])


def draw_uniforms(key: Key) -> Iterator[float]:
    """Returns an endless sequence of random numbers from 0 to below 1."""
    random = _make_generator(key, 2)
    while True:
        yield from random.random(_BLOCK).tolist()


def draw_block(key: Key, number: int) -> Indices:
    """Returns one block of an endless sequence of random numbers of 32 bits."""
    return _make_generator((*key, number), 3).integers(0, 2**32, BLOCK_SIZE, dtype=np.int64)
