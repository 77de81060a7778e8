"""A side-car evaluator with a custom loop, and with files that Keras writes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

import distribax as dx
from tests.conftest import RunFresh


def test_evaluates_what_comes_until_the_end(tmp_path: Path) -> None:
    w, copy = dx.Variable(0.0), dx.Variable(-1.0)
    manager = dx.CheckpointManager(dx.Checkpoint(w=w), tmp_path)
    seen: list[float] = []

    def train(step: int) -> None:
        w.assign(float(step))
        manager.save(step)

    def evaluate(path: str) -> dict[str, float]:
        dx.Checkpoint(w=copy).restore(path)
        seen.append(float(copy))
        if seen[-1] < 30:
            train(int(seen[-1]) + 10)
        return {"w": seen[-1]}

    train(10)
    evaluator = dx.SidecarEvaluator(evaluate, tmp_path, until=lambda path, found: found["w"] == 30)
    assert evaluator.start() == {"w": 30.0} and seen == [10, 20, 30]
    assert dx.experimental.SidecarEvaluator is dx.SidecarEvaluator
    last = dx.SidecarEvaluator(evaluate, tmp_path, max_evaluations=1)
    assert last.start() == {"w": 30.0}


def test_nothing_comes(tmp_path: Path) -> None:
    evaluator = dx.SidecarEvaluator(lambda path: 1, tmp_path / "none", timeout=0.01)
    assert evaluator.start() is None


def test_checkpoints_that_are_gone_or_damaged_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = dx.CheckpointManager(dx.Checkpoint(w=dx.Variable(1.0)), tmp_path, max_to_keep=1)
    manager.save(1)

    def evaluate(path: str) -> str:
        if path.endswith("-1"):
            manager.save(2)
        if path.endswith("-2"):
            shutil.rmtree(Path(path, "variables"))
            threading.Timer(0.1, manager.save, (3,)).start()
        dx.train.list_variables(path)
        return path

    found = dx.SidecarEvaluator(evaluate, tmp_path, max_evaluations=1).start()
    assert found.endswith("ckpt-3")
    assert "ckpt-1 is gone" in caplog.text and "ckpt-2 is damaged" in caplog.text


def test_errors_of_an_evaluation_are_raised(tmp_path: Path) -> None:
    dx.Checkpoint(w=dx.Variable(1.0)).save(tmp_path / "ckpt")

    def evaluate(path: str) -> None:
        raise ValueError("shapes do not fit")

    with pytest.raises(ValueError, match="shapes do not fit"):
        dx.SidecarEvaluator(evaluate, tmp_path).start()
    with pytest.raises(TypeError, match="evaluate=None is not a function"):
        dx.SidecarEvaluator(None, tmp_path)  # type: ignore[arg-type]


def test_files_of_keras(tmp_path: Path, run_forked: RunFresh) -> None:
    pytest.importorskip("h5py")
    program = f"""
        import threading
        from pathlib import Path
        import keras, numpy as np
        import distribax as dx

        folder = Path({str(tmp_path)!r})
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        other = keras.models.clone_model(model)

        def save(epoch, value):
            model.set_weights([np.full((2, 1), value)])
            model.save_weights(folder / f"epoch-{{epoch}}.weights.h5")

        def evaluate(path):
            other.load_weights(path)
            print(Path(path).name, other.get_weights()[0][0, 0])
            if path.endswith("-9.weights.h5"):
                threading.Timer(0.1, save, (10, 3.0)).start()
            return float(other.get_weights()[0][0, 0])

        save(9, 1.0)
        (folder / "notes.txt").write_text("not a checkpoint")
        evaluator = dx.SidecarEvaluator(
            evaluate, folder, pattern="*.weights.h5", max_evaluations=2
        )
        print(evaluator.start())
    """
    out = run_forked(program, KERAS_BACKEND="jax")
    assert out.split() == ["epoch-9.weights.h5", "1.0", "epoch-10.weights.h5", "3.0", "3.0"]
