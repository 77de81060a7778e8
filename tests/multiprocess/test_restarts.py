"""`distribax run` starts workers again: after failures so often, after interruptions as needed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from distribax.cli.restarts import (
    MAX_SHORT_LIVES,
    SHORT_LIFE_SECONDS,
    RestartDecision,
    RestartPolicy,
)
from tests.multiprocess.launchers import Start, finish, launchers, lines_of
from tests.process_forks import WITH_WORKERS

pytestmark = pytest.mark.multiprocess

AGAIN = "starting all workers again"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with launchers(tmp_path) as start:
        yield start


# The argument has the exit codes of the attempts, the last one for all that follow.
ENDS = """
import os, sys
attempt = int(os.environ["DISTRIBAX_RESTART_COUNT"])
print("attempt", attempt, os.environ["TF_CONFIG"], flush=True)
codes = [int(code) for code in sys.argv[1].split(",")]
sys.exit(codes[min(attempt, len(codes) - 1)])
"""


def test_failures_are_followed_by_so_many_restarts(start: Start) -> None:
    options = ("--max-restarts", "2")
    code, out, err = finish(start(ENDS, *options, arguments=("5,6,0",)))
    assert code == 0, err
    lines = lines_of(out, 0)
    assert [line.split()[1] for line in lines] == ["0", "1", "2"]
    assert len({line.partition("{")[2] for line in lines}) == 3, "each start has ports of its own"
    assert f"{AGAIN} (restart 2 of 2)" in err
    code, out, err = finish(start(ENDS, *options, arguments=("5,6,7,8",)))
    assert code == 7
    assert len(lines_of(out, 0)) == 3


def test_an_interruption_is_no_failure(start: Start) -> None:
    code, out, err = finish(start(ENDS, "--workers", "2", arguments=("42,42,0",)))
    assert code == 0, err
    for worker in range(2):
        assert [line.split()[1] for line in lines_of(out, worker)] == ["0", "1", "2"]
    assert len(re.findall(rf"worker \d was told to stop \(exit code 42\); {AGAIN}", err)) == 2
    assert "failed" not in err


def test_interruptions_use_up_no_restarts(start: Start) -> None:
    code, out, err = finish(start(ENDS, "--max-restarts", "1", arguments=("42,5,42,6",)))
    assert code == 6
    assert len(lines_of(out, 0)) == 4
    assert err.count(f"{AGAIN} (restart 1 of 1)") == 1


def test_a_program_that_only_asks_for_restarts_has_failed(start: Start) -> None:
    code, out, err = finish(start(ENDS, "--max-restarts", "1", arguments=("42",)))
    assert code == 42
    # As often as is allowed in a row, and one failure that --max-restarts forgives.
    assert len(lines_of(out, 0)) == MAX_SHORT_LIVES + 2
    assert err.count("was told to stop") == MAX_SHORT_LIVES
    assert err.count("this is a failure") == 2
    assert f"{AGAIN} (restart 1 of 1)" in err


def test_the_others_may_leave_by_themselves(start: Start) -> None:
    """They are saving, and SIGTERM would end a program that does not listen to it any more."""
    script = """
        import os, sys, time
        if os.environ["DISTRIBAX_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                time.sleep(1)
                print("saved", flush=True)
            sys.exit(42)
    """
    code, out, err = finish(start(script, "--workers", "2", "--grace-seconds", "20"))
    assert code == 0, err
    assert lines_of(out, 1) == ["saved"]


def test_one_that_does_not_leave_is_ended(start: Start) -> None:
    script = """
        import os, sys, time
        if os.environ["DISTRIBAX_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                time.sleep(1000)
            sys.exit(42)
    """
    code, _, err = finish(start(script, "--workers", "2", "--grace-seconds", "0.2"))
    assert code == 0, err
    assert err.count(AGAIN) == 1


TRAINING = """
import os, signal, sys, time
import jax, jax.numpy as jnp
import distribax as dx

strategy = dx.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = dx.Variable(0.0)
step = dx.function(lambda: v.assign_add(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(())))))
handler = dx.PreemptionCheckpointHandler(
    strategy.cluster_resolver, dx.Checkpoint(v=v), os.path.join(os.path.dirname(__file__), "saved")
)
first = os.environ["DISTRIBAX_RESTART_COUNT"] == "0"
print("begins at", handler.total_run_calls, flush=True)
deadline = time.monotonic() + 300
# The first attempt ends only because it is told to.
while first or handler.total_run_calls < int(sys.argv[1]):
    assert time.monotonic() < deadline
    if handler.total_run_calls == 3 and first:
        print("pid", os.getpid(), flush=True)
    handler.run(step)
    time.sleep(0.005)
print("ends at", handler.total_run_calls, float(v), flush=True)
"""


def test_a_preempted_training_goes_on_where_it_was(start: Start) -> None:
    total = 60
    options = ("--workers", "2", "--grace-seconds", "30")
    launcher = start(TRAINING, *options, arguments=(str(total),), **WITH_WORKERS)
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if match := re.match(r"\[worker 1\] pid (\d+)", line):
            os.kill(int(match[1]), signal.SIGTERM)
            break
    code, out, err = finish(launcher)
    assert code == 0, err
    saved = {int(n) for n in re.findall(r"told to stop; saved after (\d+) steps", err)}
    assert len(saved) == 1
    (steps,) = saved
    assert steps >= 3
    for worker in range(2):
        begun, ended = lines_of(out, worker)[-2:]
        assert begun == f"begins at {steps}"
        assert ended == f"ends at {max(total, steps)} {float(2 * max(total, steps))}"
    assert len(re.findall(rf"worker \d was told to stop \(exit code 42\); {AGAIN}", err)) == 1


# The policy by itself, with any times.


def test_long_lives_are_resumed_for_ever() -> None:
    policy = RestartPolicy(max_restarts=0)
    for _ in range(100):
        assert policy.decide(42, SHORT_LIFE_SECONDS) is RestartDecision.RESUME
    assert policy.decide(1, 1e6) is RestartDecision.END


def test_a_long_life_forgives_the_short_ones_before() -> None:
    policy = RestartPolicy(max_restarts=0)
    for _ in range(3):
        for _ in range(MAX_SHORT_LIVES):
            assert policy.decide(42, 1.0) is RestartDecision.RESUME
        assert policy.decide(42, 1e6) is RestartDecision.RESUME
    for _ in range(MAX_SHORT_LIVES):
        assert policy.decide(42, 1.0) is RestartDecision.RESUME
    assert policy.decide(42, 1.0) is RestartDecision.END


def test_each_failure_counts() -> None:
    policy = RestartPolicy(max_restarts=2)
    names = [policy.decide(code, 1e6).name for code in (1, 42, 137, 42, 9)]
    assert names == ["RETRY", "RESUME", "RETRY", "RESUME", "END"]
