"""What a program sees of Ray when it ends under a call."""

from __future__ import annotations

import pytest

from distribax import DistribaxError
from distribax.cluster.ray import ray_session


def test_a_call_that_ray_would_end_the_program_in_is_an_error() -> None:
    with pytest.raises(DistribaxError, match="shut down while a call waited") as raised:
        with ray_session.refuse_exit():
            raise SystemExit(0)  # As Ray does, in each thread that waits for it.
    assert isinstance(raised.value, RuntimeError)
    with ray_session.refuse_exit():
        pass
    with pytest.raises(KeyError), ray_session.refuse_exit():
        raise KeyError("of the caller")
