"""The strategies that every way of input works under."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multidevice.input.replicas import STRATEGIES


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    return STRATEGIES[request.param]()
