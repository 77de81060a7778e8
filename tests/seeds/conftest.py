"""The two ways to run a step: the documents' API works the same in both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distribax as dx
from tests.seeds.shim import tf


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The documents name GPUs, and CPU devices stand in for them, with a warning each time."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:There is no GPU on this machine"))


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture
def strategy() -> dx.MirroredStrategy:
    """The strategy of most of the documents' examples, on CPUs."""
    return tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])


@pytest.fixture(params=["eager", "compiled"])
def execution(request: pytest.FixtureRequest) -> Decorator:
    """Decorates a step that is to run eagerly, or compiled."""
    return tf.function if request.param == "compiled" else lambda fn: fn
