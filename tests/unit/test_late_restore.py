"""Values that are restored before their variables exist."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

import distribax as dx


def _make() -> tuple[dx.Variable, dx.Optimizer]:
    return dx.Variable([1.0, 2.0]), dx.Optimizer(optax.adam(0.1))


def _train(v: dx.Variable, optimizer: dx.Optimizer, gradient: float) -> None:
    optimizer.apply_gradients([(jnp.full(2, gradient), v)])


def test_values_wait_longer_than_their_checkpoint(tmp_path: Path) -> None:
    v, optimizer = _make()
    _train(v, optimizer, 1.0)
    path = dx.Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "ckpt")
    _train(v, optimizer, -3.0)
    other, new = _make()
    dx.Checkpoint(v=other, optimizer=new).restore(path)
    gc.collect()
    _train(other, new, -3.0)
    assert other.numpy().tolist() == v.numpy().tolist()


def test_waiting_keeps_nothing_alive(tmp_path: Path) -> None:
    v, optimizer = _make()
    _train(v, optimizer, 1.0)
    path = dx.Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "ckpt")
    _, new = _make()
    dx.Checkpoint(optimizer=new).restore(path)
    gone = weakref.ref(new)
    del new
    gc.collect()
    assert gone() is None
    later, third = _make()
    _train(later, third, 1.0)
    _train(later, third, -3.0)
    _train(v, optimizer, -3.0)
    assert later.numpy().tolist() == v.numpy().tolist()


class _Counting(Mapping[str, Any]):
    """Objects that count how often somebody looks at them."""

    num_looks = 0

    def __getitem__(self, name: str) -> Any:
        return {"v": 1.0}[name]

    def __iter__(self) -> Iterator[str]:
        self.num_looks += 1
        return iter(["v"])

    def __len__(self) -> int:
        return 1


def test_steps_do_not_look_for_late_values_again(tmp_path: Path) -> None:
    path = dx.Checkpoint(v=2.0, other=dx.Variable(1.0)).save(tmp_path / "ckpt")
    objects = _Counting()
    checkpoint = dx.Checkpoint(model=objects)
    checkpoint.restore(path)
    count = dx.Variable(0)
    step = dx.function(lambda: count.assign_add(1))
    step()
    before = objects.num_looks
    for _ in range(3):
        step()
    assert (objects.num_looks, int(count)) == (before, 4)
