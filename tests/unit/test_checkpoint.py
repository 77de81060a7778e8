"""`dx.Checkpoint`: saved under one strategy, restored under another, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import distribax as dx

STRATEGIES = {
    "one": lambda: dx.OneDeviceStrategy("CPU:0"),
    "two": lambda: dx.MirroredStrategy(["CPU:0", "CPU:1"]),
    "three": lambda: dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
    "central": lambda: dx.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2"),
}


class Training:
    """Everything that a training has: parameters, an optimizer, metrics, sums of replicas."""

    def __init__(self, strategy: dx.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = dx.Variable(jnp.zeros(3), name="w")
            self.optimizer = dx.Optimizer(optax.adam(0.1))
            self.optimizer.build([self.w])
            self.mean = dx.metrics.Mean()
            self.count = dx.Variable(
                0, synchronization="ON_READ", aggregation="SUM", trainable=False
            )
            self.average = dx.Variable(
                0.0, synchronization="ON_READ", aggregation="MEAN", trainable=False
            )
            self.own = dx.Variable(0.0, synchronization="ON_READ", trainable=False)
        self.checkpoint = dx.Checkpoint(
            model={"w": self.w, "stats": [self.count, self.average, self.own]},
            optimizer=self.optimizer,
            metrics=(self.mean,),
        )

    def step(self) -> None:
        def replica() -> None:
            number = dx.get_replica_context().replica_id_in_sync_group
            self.optimizer.apply_gradients([(jnp.full(3, 1.0 + number), self.w)])
            self.mean.update_state(jnp.asarray([1.0, 4.0]) + number)
            self.count.assign_add(3 + 2 * number)
            self.average.assign(1.0 * number)
            self.own.assign(7.0 + number)

        self.strategy.run(replica)

    def read(self) -> list[Any]:
        variables = [self.w, *self.optimizer.variables, self.count, self.average]
        values = [variable.numpy().tolist() for variable in variables]
        return [*values, float(self.mean.result()), float(self.own.values[0].numpy())]


@pytest.mark.parametrize("after", STRATEGIES)
@pytest.mark.parametrize("before", STRATEGIES)
def test_saved_under_one_strategy_and_restored_under_another(
    before: str, after: str, tmp_path: Path
) -> None:
    saved = Training(STRATEGIES[before]())
    saved.step()
    path = saved.checkpoint.save(tmp_path / "first")
    assert path == str(tmp_path / "first")
    restored = Training(STRATEGIES[after]())
    assert restored.read() != saved.read()
    restored.checkpoint.restore(path)
    assert restored.read() == saved.read()
    # It is alive: every copy is there, and training goes on.
    restored.step()
    assert int(restored.optimizer.iterations) == 2


def test_a_sum_of_replicas_is_restored_exactly(tmp_path: Path) -> None:
    """5 does not divide by 3, and a third of 0.1 three times is not 0.1."""
    with dx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
        whole = dx.Variable(0, synchronization="ON_READ", aggregation="SUM")
        real = dx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    with dx.OneDeviceStrategy("CPU:0").scope():
        five, tenth = dx.Variable(5), dx.Variable(0.1)
    path = dx.Checkpoint(whole=five, real=tenth).save(tmp_path / "sum")
    dx.Checkpoint(whole=whole, real=real).restore(path)
    assert whole.numpy() == 5
    assert real.numpy() == np.float32(0.1)


@pytest.mark.parametrize("distributed", [False, True])
def test_an_iterator_goes_on_with_the_next_element(distributed: bool, tmp_path: Path) -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])

    def make() -> Any:
        dataset = dx.data.Dataset.range(40).shuffle(7, seed=3).batch(4)
        return iter(strategy.experimental_distribute_dataset(dataset) if distributed else dataset)

    def taken(iterator: Any, count: int) -> list[Any]:
        found = [strategy.experimental_local_results(next(iterator)) for _ in range(count)]
        return [np.concatenate([np.asarray(x) for x in step]).tolist() for step in found]

    first, whole = make(), make()
    expected = taken(whole, 10)
    assert taken(first, 3) == expected[:3]
    path = dx.Checkpoint(data=first).save(tmp_path / "position")
    second = make()
    dx.Checkpoint(data=second).restore(path)
    assert taken(second, 7) == expected[3:]
    for iterator in (first, second, whole):
        iterator.close()


def test_nothing_to_save_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to save"):
        dx.Checkpoint()
    with pytest.raises(TypeError, match=r"dx.Checkpoint: model.1=3 cannot be saved"):
        dx.Checkpoint(model=[dx.Variable(1.0), 3])


def test_an_existing_path_is_replaced_only_on_demand(tmp_path: Path) -> None:
    v = dx.Variable(1.0)
    checkpoint = dx.Checkpoint(v=v)
    path = checkpoint.save(tmp_path / "v")
    v.assign(2.0)
    with pytest.raises(ValueError, match="exists already"):
        checkpoint.save(path)
    assert checkpoint.save(path, overwrite=True) == path
    v.assign(3.0)
    checkpoint.restore(path)
    assert float(v) == 2.0
    assert os.listdir(tmp_path) == ["v"]


@pytest.mark.parametrize("stage", ["orbax", "rename"])
def test_an_error_while_saving_leaves_the_last_good_one(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = dx.Variable(1.0)
    checkpoint = dx.Checkpoint(v=v)
    path = checkpoint.save(tmp_path / "v")
    v.assign(2.0)
    if stage == "orbax":
        write = ocp.Checkpointer.save

        def broken(self: Any, *args: Any, **kwargs: Any) -> None:
            write(self, *args, **kwargs)
            raise OSError("no space left")

        monkeypatch.setattr(ocp.Checkpointer, "save", broken)
    else:
        rename = os.rename

        def refused(source: Any, target: Any) -> None:
            if ".part-" in str(source):
                raise OSError("no space left")
            rename(source, target)

        monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(path, overwrite=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["v"]
    checkpoint.restore(path)
    assert float(v) == 1.0


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    dataset = dx.data.Dataset.range(10)
    a, b, data = dx.Variable(1.0), dx.Variable([1.0, 2.0]), iter(dataset)
    next(data)
    path = dx.Checkpoint(a=a, b=b, data=data).save(tmp_path / "saved")
    a.assign(5.0)
    next(data)

    def refuses(match: str, **objects: Any) -> None:
        with pytest.raises(ValueError, match=match):
            dx.Checkpoint(**objects).restore(path)
        assert float(a) == 5.0

    refuses(r"variables of path=.*Not in the file: \['c'\]; only in the file: \['b'\]", a=a, c=b)
    refuses(r"iterators of path=.*only in the file: \['data'\]", a=a, b=b)
    refuses(r"'b' was saved with shape \(2,\), but variable", a=a, b=dx.Variable(0.0), data=data)
    other = iter(dx.data.Dataset.range(10).batch(2))
    refuses("another pipeline", a=a, b=b, data=other)
    assert np.asarray(next(other)).tolist() == [0, 1]
    dx.Checkpoint(a=a, b=b, data=data).restore(path)
    assert float(a) == 1.0
    assert next(data) == 1


def test_iterators_move_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = iter(dx.data.Dataset.range(10)), iter(dx.data.Dataset.range(20))
    next(first)
    path = dx.Checkpoint(a=first, b=second).save(tmp_path / "saved")
    next(first)
    with pytest.raises(ValueError, match="another pipeline"):
        dx.Checkpoint(a=first, b=iter(dx.data.Dataset.range(30))).restore(path)
    assert next(first) == 2


def test_a_part_of_a_checkpoint_on_demand(tmp_path: Path) -> None:
    data = iter(dx.data.Dataset.range(10))
    path = dx.Checkpoint(a=dx.Variable(1.0), b=dx.Variable(2.0), data=data).save(tmp_path / "all")
    b = dx.Variable(0.0)
    dx.Checkpoint(b=b).restore(path, partial=True)
    assert float(b) == 2.0
    with pytest.raises(ValueError, match=r"Not in the file: \['c'\]"):
        dx.Checkpoint(c=b).restore(path, partial=True)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint = dx.Checkpoint(v=dx.Variable(1.0))
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match="is not a checkpoint"):
            checkpoint.restore(path)
    path = Path(checkpoint.save(tmp_path / "v"))
    notes = path / "notes" / "metadata"
    notes.write_text(json.dumps(json.loads(notes.read_text()) | {"version": 99}))
    with pytest.raises(ValueError, match="has format version 99"):
        checkpoint.restore(path)


def test_positions_of_several_workers_do_not_fit_one(tmp_path: Path) -> None:
    data = iter(dx.data.Dataset.range(10))
    checkpoint = dx.Checkpoint(data=data)
    path = Path(checkpoint.save(tmp_path / "v"))
    notes = path / "notes" / "metadata"
    content = json.loads(notes.read_text())
    (own,) = content["positions"]["data"]
    content["positions"]["data"] = [own, own]
    notes.write_text(json.dumps(content))
    checkpoint.restore(path)  # Where all were at the same place, it is anybody's.
    content["positions"]["data"] = [own, own | {"run": 5}]
    notes.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="saved by 2 workers, each at a place of its own"):
        checkpoint.restore(path)


def test_an_optimizer_may_be_named_before_it_is_built(tmp_path: Path) -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w, optimizer = dx.Variable(0.0), dx.Optimizer(optax.sgd(1.0))
    checkpoint = dx.Checkpoint(w=w, optimizer=optimizer)
    strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(()), w)]))
    assert optimizer.iterations.distribute_strategy is strategy
    path = checkpoint.save(tmp_path / "v")
    with pytest.raises(ValueError, match=r"call optimizer\.build\(variables\) first"):
        dx.Checkpoint(w=w, optimizer=dx.Optimizer(optax.sgd(1.0))).restore(path)
    checkpoint.restore(path)
    assert int(optimizer.iterations) == 1


class Counter:
    """An iterator of a user, with a position of any kind."""

    def __init__(self, position: Any) -> None:
        self.position = position

    def get_state(self) -> Any:
        return self.position

    def set_state(self, state: Any) -> None:
        self.position = state


def test_iterators_of_users(tmp_path: Path) -> None:
    counter = Counter(3)
    path = dx.Checkpoint(data=counter).save(tmp_path / "v")
    counter.position = 5
    dx.Checkpoint(data=counter).restore(path)
    assert counter.position == 3
    with pytest.raises(TypeError, match="position of 'data', b'x', is not data that JSON can hold"):
        dx.Checkpoint(data=Counter(b"x")).save(tmp_path / "bytes")
    assert not (tmp_path / "bytes").exists()


def test_inside_a_replica_is_refused(tmp_path: Path) -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        checkpoint = dx.Checkpoint(v=dx.Variable(1.0))
    with pytest.raises(RuntimeError, match="inside a replica"):
        strategy.run(lambda: checkpoint.save(tmp_path / "v"))
    with pytest.raises(RuntimeError, match="inside a replica"):
        strategy.run(lambda: checkpoint.restore(tmp_path / "v"))
    with pytest.raises(ValueError, match="timeout_seconds=0 is not positive"):
        checkpoint.save(tmp_path / "v", timeout_seconds=0)
