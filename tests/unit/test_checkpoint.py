"""`dx.Checkpoint`: saved under one strategy, restored under another, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import distribax as dx
from distribax.training.checkpoints.checkpoint_files import checksum_notes

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
    path = saved.checkpoint.write(tmp_path / "first")
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
    path = dx.Checkpoint(whole=five, real=tenth).write(tmp_path / "sum")
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
    path = dx.Checkpoint(data=first).write(tmp_path / "position")
    second = make()
    dx.Checkpoint(data=second).restore(path)
    assert taken(second, 7) == expected[3:]
    for iterator in (first, second, whole):
        iterator.close()


def test_nothing_to_save_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to save"):
        dx.Checkpoint().save(tmp_path / "v")
    for value in ("text", test_nothing_to_save_is_an_error, object(), len, dx):
        with pytest.raises(TypeError, match=r"dx.Checkpoint: model.1 is a \w+, which cannot be"):
            dx.Checkpoint(model=[dx.Variable(1.0), value])
    with pytest.raises(ValueError, match="'restore' is a name of the checkpoint itself"):
        dx.Checkpoint(restore=dx.Variable(1.0))
    with pytest.raises(AttributeError, match=r"has no 'w'. It saves: v"):
        _ = dx.Checkpoint(v=dx.Variable(1.0)).w


def test_an_existing_path_is_replaced_only_on_demand(tmp_path: Path) -> None:
    v = dx.Variable(1.0)
    checkpoint = dx.Checkpoint(v=v)
    path = checkpoint.write(tmp_path / "v")
    v.assign(2.0)
    with pytest.raises(ValueError, match="exists already"):
        checkpoint.write(path)
    assert checkpoint.write(path, overwrite=True) == path
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
    path = checkpoint.write(tmp_path / "v")
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
        checkpoint.write(path, overwrite=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["v"]
    checkpoint.restore(path)
    assert float(v) == 1.0


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    dataset = dx.data.Dataset.range(10)
    a, b, data = dx.Variable(1.0), dx.Variable([1.0, 2.0]), iter(dataset)
    next(data)
    path = dx.Checkpoint(a=a, b=b, data=data).write(tmp_path / "saved")
    a.assign(5.0)
    next(data)

    def refuses(match: str, **objects: Any) -> None:
        with pytest.raises(ValueError, match=match):
            dx.Checkpoint(**objects).restore(path)
        assert float(a) == 5.0

    refuses(r"'b' was saved with shape \(2,\), but variable", a=a, b=dx.Variable(0.0), data=data)
    other = iter(dx.data.Dataset.range(10).batch(2))
    refuses("another pipeline", a=a, b=b, data=other)
    assert np.asarray(next(other)).tolist() == [0, 1]
    dx.Checkpoint(a=a, b=b, data=data).restore(path).assert_consumed()
    assert float(a) == 1.0
    assert next(data) == 1


def test_iterators_move_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = iter(dx.data.Dataset.range(10)), iter(dx.data.Dataset.range(20))
    next(first)
    path = dx.Checkpoint(a=first, b=second).write(tmp_path / "saved")
    next(first)
    with pytest.raises(ValueError, match="another pipeline"):
        dx.Checkpoint(a=first, b=iter(dx.data.Dataset.range(30))).restore(path)
    assert next(first) == 2


def test_a_part_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = iter(dx.data.Dataset.range(10))
    path = dx.Checkpoint(a=dx.Variable(1.0), b=dx.Variable(2.0), data=data).write(tmp_path / "all")
    b = dx.Variable(0.0)
    dx.Checkpoint(b=b).restore(path, partial=True).assert_existing_objects_matched()
    assert float(b) == 2.0
    status = dx.Checkpoint(b=b).restore(path)
    with pytest.raises(AssertionError, match=r"Only in the checkpoint: \['a'\]"):
        status.assert_consumed()
    status.expect_partial().assert_consumed()
    assert not caplog.records
    status = dx.Checkpoint(c=b).restore(path)
    assert "has no values for ['c'], which stay as they are" in caplog.text
    with pytest.raises(AssertionError, match=r"has no values for \['c'\]"):
        status.assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="nothing in the program is in the checkpoint"):
        status.assert_nontrivial_match()
    status.initialize_or_restore()
    status.run_restore_ops()


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint = dx.Checkpoint(v=dx.Variable(1.0))
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match="is not a checkpoint"):
            checkpoint.restore(path)
    path = Path(checkpoint.write(tmp_path / "v"))
    notes = path / "notes" / "metadata"
    later = json.loads(notes.read_text()) | {"version": 99}
    notes.write_text(json.dumps(later | {"checksum": checksum_notes(later)}))
    with pytest.raises(ValueError, match="has format version 99"):
        checkpoint.restore(path)


def test_positions_of_several_workers_do_not_fit_one(tmp_path: Path) -> None:
    data = iter(dx.data.Dataset.range(10))
    checkpoint = dx.Checkpoint(data=data)
    path = Path(checkpoint.write(tmp_path / "v"))
    notes = path / "notes" / "metadata"
    content = json.loads(notes.read_text()) | {"version": 1}  # Without checksums.
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
    path = checkpoint.write(tmp_path / "v")
    # One that is built after the restore takes its values then, in a compiled step too.
    with strategy.scope():
        same, late = dx.Variable(0.0), dx.Optimizer(optax.sgd(1.0))
    status = dx.Checkpoint(w=same, optimizer=late).restore(path)
    assert float(same) == -2.0
    step = lambda: late.apply_gradients([(jnp.ones(()), same)])  # noqa: E731
    dx.function(lambda: strategy.run(step))()
    assert (int(late.iterations), float(same)) == (2, -4.0)
    status.assert_consumed()


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
    path = dx.Checkpoint(data=counter).write(tmp_path / "v")
    counter.position = 5
    dx.Checkpoint(data=counter).restore(path)
    assert counter.position == 3
    with pytest.raises(TypeError, match="position of 'data', b'x', is not data that JSON can hold"):
        dx.Checkpoint(data=Counter(b"x")).write(tmp_path / "bytes")
    assert not (tmp_path / "bytes").exists()


def test_inside_a_replica_is_refused(tmp_path: Path) -> None:
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        checkpoint = dx.Checkpoint(v=dx.Variable(1.0))
    with pytest.raises(RuntimeError, match="inside a replica"):
        strategy.run(lambda: checkpoint.write(tmp_path / "v"))
    with pytest.raises(RuntimeError, match="inside a replica"):
        strategy.run(lambda: checkpoint.restore(tmp_path / "v"))
    with pytest.raises(ValueError, match="timeout_seconds=0 is not positive"):
        checkpoint.write(tmp_path / "v", timeout_seconds=0)


class Net:
    """A plain object that creates its variables when it is first called."""

    def __init__(self) -> None:
        self.units = 2
        self.names = ["a", "b"]
        self.owner = self
        self.layers: list[Any] = []

    def __call__(self, x: Any) -> Any:
        if not self.layers:
            self.layers.append(dx.Variable(jnp.ones(self.units)))
            self.layers.append({"bias": dx.Variable(self.layers[0] + 1.0)})
        return x * self.layers[0] + self.layers[1]["bias"]


@pytest.mark.parametrize("compiled", [False, True])
def test_variables_that_are_created_after_the_restore(compiled: bool, tmp_path: Path) -> None:
    net = Net()
    net(1.0)
    net.layers[0].assign([3.0, 4.0])
    net.layers[1]["bias"].assign([0.5, 0.25])
    path = dx.Checkpoint(net=net).save(tmp_path / "ckpt")
    strategy = dx.MirroredStrategy(["CPU:0", "CPU:1"])
    other = Net()
    checkpoint = dx.Checkpoint(net=other)
    status = checkpoint.restore(path)
    with pytest.raises(AssertionError, match="Only in the checkpoint"):
        status.assert_consumed()
    call = lambda: strategy.run(other, args=(jnp.ones(2),))  # noqa: E731
    with strategy.scope():
        result = (dx.function(call) if compiled else call)()
    if not compiled:
        assert np.asarray(strategy.experimental_local_results(result)[0]).tolist() == [3.5, 4.25]
    assert other.layers[0].numpy().tolist() == [3.0, 4.0]
    assert other.layers[1]["bias"].numpy().tolist() == [0.5, 0.25]
    status.assert_consumed()


def test_a_late_value_of_another_shape(tmp_path: Path) -> None:
    path = dx.Checkpoint({"w": dx.Variable([1.0, 2.0])}).save(tmp_path / "ckpt")
    root: dict[str, Any] = {}
    checkpoint = dx.Checkpoint(root)
    checkpoint.restore(path)
    root["w"] = dx.Variable(0.0)
    with pytest.raises(ValueError, match=r"'w' was saved with shape \(2,\)"):
        root["w"].read_value()


def test_an_assignment_after_the_restore_holds(tmp_path: Path) -> None:
    path = dx.Checkpoint(w=dx.Variable(1.0)).save(tmp_path / "ckpt")
    checkpoint = dx.Checkpoint()
    checkpoint.restore(path)
    checkpoint.w = dx.Variable(0.0)
    checkpoint.w.assign(5.0)
    assert float(checkpoint.w) == 5.0


def test_saves_are_numbered_and_counted(tmp_path: Path) -> None:
    v = dx.Variable(0.0)
    checkpoint = dx.Checkpoint(v=v)
    assert checkpoint.restore(dx.train.latest_checkpoint(tmp_path)) is not None
    assert int(checkpoint.save_counter) == 0
    paths = [checkpoint.save(tmp_path / "ckpt") for _ in range(2)]
    assert [Path(path).name for path in paths] == ["ckpt-1", "ckpt-2"]
    assert dx.train.latest_checkpoint(tmp_path) == paths[1]
    assert checkpoint.save_counter.numpy() == 2 == checkpoint.save_counter
    assert repr(checkpoint.save_counter) == "<save_counter 2>"
    again = dx.Checkpoint(v=v)
    again.read(again.write(tmp_path / "plain"))
    assert int(again.save_counter) == 0
    again.restore(paths[0])
    assert int(again.save_counter) == 1
    assert again.save(tmp_path / "ckpt") == paths[1]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="File exists"):
        again.save(tmp_path / "file" / "ckpt")
    assert int(again.save_counter) == 2


def test_without_a_checkpoint_there_is_nothing_to_assert(tmp_path: Path) -> None:
    status = dx.Checkpoint(v=dx.Variable(0.0)).restore(None)
    status.expect_partial()
    for check in ("assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"):
        with pytest.raises(AssertionError, match=r"no checkpoint was given \(None\)"):
            getattr(status, check)()


def test_any_tree_is_saved_and_restored(tmp_path: Path) -> None:
    from flax import nnx

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = optax.adam(0.1)
    checkpoint = dx.Checkpoint(
        model=model,
        optimizer=nnx.Optimizer(model, tx, wrt=nnx.Param),
        dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(3)),
        state=tx.init({"w": jnp.ones(3)}),
        params={"w": jnp.ones(3), "n": [np.arange(2), np.float32(1.5)]},
        step=5,
        lr=0.5,
        key=jax.random.key(1),
        nothing=None,
    )
    before = jax.tree.map(np.asarray, nnx.state(model))
    path = checkpoint.save(tmp_path / "ckpt")
    names = dict(dx.train.list_variables(path))
    assert names["model.kernel"] == (2, 3) == names["optimizer.opt_state.0.mu.kernel"]
    assert names["state.0.mu.w"] == (3,)
    assert dx.train.load_variable(tmp_path, "params.n.0").tolist() == [0, 1]
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
    checkpoint.step, checkpoint.lr, checkpoint.key = 9, 0.1, jax.random.key(7)
    checkpoint.params["w"] = jnp.zeros(3)
    checkpoint.params["n"][0] = np.zeros(2, int)
    checkpoint.state = jax.tree.map(jnp.zeros_like, checkpoint.state)
    checkpoint.restore(path).assert_consumed()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, nnx.state(model)), before)
    assert (checkpoint.step, checkpoint.lr) == (5, 0.5)
    assert (checkpoint.key == jax.random.key(1)).all()
    assert checkpoint.params["w"].tolist() == [1.0, 1.0, 1.0]
    assert checkpoint.params["n"][0].tolist() == [0, 1]
    assert isinstance(checkpoint.params["n"][1], np.float32)
    assert type(checkpoint.state) is type(tx.init({}))
    with pytest.raises(ValueError, match=r"name='x' is not in .*It has: .*model.bias"):
        dx.train.load_variable(path, "x")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        dx.train.list_variables(tmp_path / "none")


def test_a_value_that_cannot_be_replaced(tmp_path: Path) -> None:
    frozen = MappingProxyType({"x": jnp.ones(2)})
    path = dx.Checkpoint(frozen=frozen).save(tmp_path / "ckpt")
    with pytest.raises(TypeError, match=r"frozen.x is a value in a mappingproxy, which cannot be"):
        dx.Checkpoint(frozen=frozen).restore(path)


def test_new_checkpoints_as_they_come(tmp_path: Path) -> None:
    v = dx.Variable(0.0)
    manager = dx.CheckpointManager(dx.Checkpoint(v=v), tmp_path / "run", max_to_keep=1)
    waited: list[bool] = []

    def over() -> bool:
        waited.append(True)
        if len(waited) == 1:
            manager.save(3)
            return False
        return True

    found = []
    for path in dx.train.checkpoints_iterator(tmp_path / "run", timeout=0.01, timeout_fn=over):
        found.append(Path(path).name)
        if found == ["ckpt-3"]:
            manager.save(3)  # The same number, written again, is a new one.
            manager.save(4)
    assert found == ["ckpt-3", "ckpt-4"]
    assert list(dx.train.checkpoints_iterator(tmp_path / "none", timeout=0.01)) == []
