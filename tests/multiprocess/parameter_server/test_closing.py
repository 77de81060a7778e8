"""A strategy that is closed; nothing is left of it but the snapshots in a folder of the user."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import distribax as dx
from distribax.cluster.ray import ray_session


def _wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.05)


def test_snapshots_are_kept_and_a_closed_strategy_says_so(
    coordinator: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "snapshots"
    own = dx.ParameterServerStrategy(
        num_workers=1, num_ps=1, snapshot_dir=folder, snapshot_interval=0.2
    )
    try:
        with own.scope():
            v = dx.Variable(1.0)
        own.snapshot()
        # A folder that the server cannot write into is told of at once, not when it has died.
        shutil.rmtree(folder)
        folder.write_text("in the way")
        v.assign_add(1.0)
        with caplog.at_level(logging.WARNING, "distribax"):
            _wait_until(lambda: "cannot save its snapshot" in caplog.text)
        assert caplog.text.count("cannot save its snapshot") == 1
        with pytest.raises(OSError, match="snapshots") as caught:
            own.snapshot()
        assert not isinstance(caught.value, ray.exceptions.RayError)
        folder.unlink()
        (path,) = own.snapshot()
        # The session's strategy knows nothing of this one, nor of its variables.
        for fn in (lambda: v.value(), lambda: own.run(lambda: 1)):
            with pytest.raises(TypeError, match="another ParameterServerStrategy"):
                coordinator.schedule(fn)
    finally:
        own.close()
    assert Path(path).is_relative_to(folder) and any(folder.rglob("*.dxsnap"))
    own.close()
    for use in (own.snapshot, lambda: dx.coordinator.ClusterCoordinator(own)):
        with pytest.raises(RuntimeError, match="the strategy was closed"):
            use()
    with pytest.raises(RuntimeError, match="client is closed: its strategy was closed"):
        v.numpy()


def test_a_call_that_ray_would_end_the_program_in_is_an_error(coordinator: Any) -> None:
    stopped = pytest.raises(dx.DistribaxError, match="shut down while a call waited")
    with stopped as raised, ray_session.guard_calls():
        raise SystemExit(0)  # As Ray does, in each thread that waits for it.
    assert isinstance(raised.value, RuntimeError)
    with pytest.raises(KeyError), ray_session.guard_calls():
        raise KeyError("of the caller")
