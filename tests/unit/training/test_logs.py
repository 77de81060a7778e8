"""Event files that TensorBoard itself reads, and metrics that reach other loggers."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribax as dx
from distribax.coordinator.status import CoordinatorStatus, WorkerState, WorkerStatus

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Those of tensorboard's own imports.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util


def read(folder: Path) -> Any:
    """Returns what TensorBoard finds in a folder."""
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


def test_tensorboard_reads_numbers_text_and_histograms(tmp_path: Path) -> None:
    with dx.logging.TensorBoard(tmp_path / "run") as board:
        for step in range(300):
            board.log_scalar("train/loss", 1.0 / (step + 1), step)
        board.log_scalar("array", np.float32([2.5]), step=1 << 40)
        board.log_text("about", "**bold** and ünïcode", step=3)
        board.log_histogram("weights", np.linspace(-1.0, 2.0, 3001), step=4)
        board.log_histogram("constant", np.full(5, 7), step=4)
        board.flush()
        found = read(tmp_path / "run")
        losses = found.Scalars("train/loss")
        assert [each.step for each in losses] == list(range(300))
        assert losses[3].value == pytest.approx(0.25)
        assert abs(losses[3].wall_time - time.time()) < 3600
        assert found.Scalars("array")[0].step == 1 << 40
        (text,) = found.Tensors("about")
        assert tensor_util.make_ndarray(text.tensor_proto).item().decode() == "**bold** and ünïcode"
        assert found.SummaryMetadata("about").plugin_data.plugin_name == "text"
        (histogram,) = found.Histograms("weights")
        value = histogram.histogram_value
        assert (value.min, value.max, value.num) == (-1.0, 2.0, 3001)
        assert value.sum == pytest.approx(1500.5) and sum(value.bucket) == 3001
        assert value.bucket_limit[-1] == pytest.approx(2.0)
        assert found.Histograms("constant")[0].histogram_value.num == 5


def test_what_cannot_be_written(tmp_path: Path) -> None:
    board = dx.logging.TensorBoard(tmp_path)
    with pytest.raises(ValueError, match=r"'loss' has the shape \(2,\)(.|\n)*log_histogram"):
        board.log_scalar("loss", [1.0, 2.0], step=1)
    for values in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="'grads' are empty or not all finite"):
            board.log_histogram("grads", np.asarray(values), step=1)
    board.close()
    board.close()
    board.flush()
    with pytest.raises(ValueError, match="the log was closed"):
        board.log_text("a", "b")


def test_metrics_reach_all_loggers(tmp_path: Path) -> None:
    said: list[tuple[dict[str, float], int]] = []
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        loss = dx.metrics.Mean("loss")
    strategy.run(lambda: loss.update_state(dx.get_replica_context().replica_id + 1.0))
    with dx.logging.TensorBoard(tmp_path) as board:
        logger = dx.logging.MetricLogger(
            board.log_metrics, lambda values, step: said.append((values, step))
        )
        assert logger.log([loss], step=3, reset=True, learning_rate=0.1) == said[0][0]
        logger.log({"again": loss, "constant": np.int32(2)}, step=4)
    assert said == [({"loss": 1.5, "learning_rate": 0.1}, 3), ({"again": 0.0, "constant": 2.0}, 4)]
    assert read(tmp_path).Scalars("loss")[0].value == 1.5
    with pytest.raises(TypeError, match="'x' cannot be called"):
        dx.logging.MetricLogger("x")
    with pytest.raises(ValueError, match=r"'rows' has the shape \(3,\)"):
        logger.log(step=1, rows=np.ones(3))


def test_status_of_a_coordinator_is_logged() -> None:
    worker = WorkerStatus(0, WorkerState.READY, 1.0, 1, "host", 0, 3, 0, None)

    class Coordinator:
        """Has finished three of four functions."""

        def status(self) -> CoordinatorStatus:
            return CoordinatorStatus(4, 3, 0, 0, 1, 1, 0, 2.5, (worker,), ({"restarts": 1},))

    said: list[tuple[dict[str, float], int]] = []
    logger = dx.logging.MetricLogger(lambda values, step: said.append((values, step)))
    with dx.logging.log_status(Coordinator(), logger, every_seconds=0.01):
        deadline = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert len(said) >= 3, "the last one is written at the end"
    values, step = said[-1]
    assert step == 3 and values["coordinator/rate"] == 2.5
    assert values["coordinator/workers_up"] == values["coordinator/server_restarts"] == 1
    with (
        pytest.raises(ValueError, match="every_seconds=0"),
        dx.logging.log_status(Coordinator(), logger, every_seconds=0),
    ):
        pass
