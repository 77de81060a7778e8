"""What a worker says when it has lost another one, and that it ends in any case."""

from __future__ import annotations

import textwrap
import time

import jax.numpy as jnp
import pytest

from distribax.cluster.peers.last_words import _report
from distribax.errors import PeerLostError
from distribax.types import PEER_LOST_EXIT_CODE
from tests.environment import inherited
from tests.forked import start_forked


def report() -> PeerLostError:
    return PeerLostError("worker 1 (b:1)", "died", time.time() - 5.0)


def test_report_says_who_is_missing_and_since_when() -> None:
    first, since, *_, last = _report(report(), "worker 0 (a:1)", None).splitlines()
    assert first == "distribax.errors.PeerLostError: worker 1 (b:1) died."
    assert since.startswith("  Missing since 20") and since.endswith(" 5.0 s ago.")
    assert "exit code 43" in last


def test_report_says_where_the_main_thread_is() -> None:
    lines = _report(report(), "worker 0 (a:1)", None).splitlines()
    assert "  Meanwhile worker 0 (a:1) was here:" in lines
    assert any(__file__ in line and "in test_report_says_where_the_main" in line for line in lines)
    assert '      lines = _report(report(), "worker 0 (a:1)", None).splitlines()' in lines
    assert "    in distribax.cluster.peers.last_words._report" in lines


def test_report_says_where_the_program_has_failed() -> None:
    with pytest.raises(TypeError) as failure:
        jnp.zeros(3).reshape(2)
    lines = _report(report(), "worker 0 (a:1)", failure.tb).splitlines()
    assert "      jnp.zeros(3).reshape(2)" in lines
    assert any(line.startswith("    in jax.") for line in lines)


def test_callback_that_does_not_end_is_not_waited_for() -> None:
    program = """
        import sys, time
        from distribax.cluster.peers import last_words
        from distribax.errors import PeerLostError

        last_words.CALLBACK_SECONDS = 1.0
        last_words.on_peer_lost(lambda error: sys.exit("printed"))
        last_words.on_peer_lost(lambda error: time.sleep(600))
        last_words.LastWords("worker 0 (a:1)").end_process(PeerLostError("worker 1 (b:1)", "died"))
    """
    process = start_forked(textwrap.dedent(program), inherited())
    _, err = process.communicate()
    assert process.returncode == PEER_LOST_EXIT_CODE
    assert "worker 1 (b:1) died." in err
    assert "SystemExit: printed" in err
