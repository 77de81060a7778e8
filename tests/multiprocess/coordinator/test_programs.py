"""Whole programs with a coordinator: how they are interrupted, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunFresh
from tests.multiprocess.coordinator.conftest import wait_until

pytestmark = pytest.mark.multiprocess


# Takes more than 10 s: Ray of its own, a worker and a server, and the end of all.
def test_a_program_is_interrupted_while_it_waits_and_leaves_nothing_behind(
    run_forked: RunFresh,
) -> None:
    out = run_forked(
        """
        import json, os, signal, sys, threading, time
        from dataclasses import dataclass
        import distribax as dx

        @dataclass(frozen=True)
        class Pair:
            left: int
            right: int

            def total(self):
                return self.left + self.right + OFFSET

        class Unlucky(Exception):
            pass

        OFFSET = 0

        def add(pair):
            if pair.left < 0:
                raise Unlucky(pair)
            return Pair(pair.total(), type(pair) is Pair)

        strategy = dx.ParameterServerStrategy(num_workers=1, num_ps=1)
        coordinator = dx.coordinator.ClusterCoordinator(strategy)
        sum_ = coordinator.schedule(add, args=(Pair(1, 2),)).fetch()
        OFFSET = 10
        seen = [type(sum_) is Pair, sum_.left, sum_.right, sum_.total()]
        coordinator.schedule(add, args=(Pair(-1, 2),))
        try:
            coordinator.join()
        except Unlucky as error:
            seen.append(error.args[0].right)

        coordinator.schedule(time.sleep, args=(600,))
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            coordinator.join()
        except KeyboardInterrupt:
            seen.append("interrupted")
        pids = [worker.pid for worker in coordinator.status().workers]
        print(json.dumps({"seen": seen, "pids": pids}))
        """,
    )
    told = json.loads(out.splitlines()[-1])
    assert told["seen"] == [True, 3, True, 14, 2, "interrupted"]
    assert len(told["pids"]) == 1
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in told["pids"]))


# Takes more than 10 s: Ray of its own, and longer stopped than a worker may be silent.
def test_a_program_is_stopped_for_a_while_and_ray_is_shut_down(run_forked: RunFresh) -> None:
    out = run_forked(
        """
        import contextlib, gc, json, os, subprocess, threading, time
        import ray
        from distribax.cluster.ray import engine as engines
        from distribax.coordinator import ClusterCoordinator
        from distribax.parameter_server.strategy import ParameterServerStrategy

        class Setup:
            def start(self, worker_index): return self
            def scope(self): return contextlib.nullcontext()
            def flush(self): pass

        class Plain(ParameterServerStrategy):
            cluster_coordinator = None
            def __init__(self): self.engine = engines.start_embedded(1, 0)
            def worker_setup(self): return Setup()
            def watch_rounds(self, idle): return []
            def finish_rounds(self): pass
            def server_status(self): return []

        def names():
            return [thread.name for thread in threading.enumerate()]

        dropped = ClusterCoordinator(Plain())
        assert "distribax-coordinator" in names()
        del dropped
        gc.collect()
        deadline = time.monotonic() + 300
        while "distribax-coordinator" in names() and time.monotonic() < deadline:
            time.sleep(0.05)
        seen = ["distribax-coordinator" in names()]

        coordinator = ClusterCoordinator(Plain(), worker_timeout=10.0)
        value = coordinator.schedule(pow, args=(2, 3))
        seen.append(value.fetch())
        # A program that is stopped for a while does not take its workers for dead.
        stop = f"kill -STOP {os.getpid()}; sleep 13; kill -CONT {os.getpid()}"
        subprocess.run(["sh", "-c", stop], check=True)
        coordinator.schedule(time.sleep, args=(2,)).fetch()
        (worker,) = coordinator.status().workers
        seen.append(worker.restarts)
        running = coordinator.schedule(time.sleep, args=(600,))
        ray.shutdown()
        for use in (coordinator.join, running.fetch):
            try:
                use()
            except RuntimeError as error:
                seen.append(str(error))
        print(json.dumps(seen))
        """,
    )
    still_there, value, restarts, *errors = json.loads(out.splitlines()[-1])
    assert (still_there, value, restarts) == (False, 8, 0)
    assert len(errors) == 2 and all("Ray has been shut down" in error for error in errors)
