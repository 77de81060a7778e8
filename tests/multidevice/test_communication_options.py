"""The hints that `MultiWorkerMirroredStrategy` is given reach its collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import distribax as dx

SMALL = dx.CommunicationOptions(bytes_per_pack=8)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of arrays that each reduction sends, in order."""
    sent: list[int] = []
    add = dx.AllReduce.sum_in_program

    def record(ops: dx.AllReduce, values: list[jax.Array], mesh: jax.sharding.Mesh) -> object:
        sent.append(len(values))
        return add(ops, values, mesh)

    monkeypatch.setattr(dx.AllReduce, "sum_in_program", record)
    return sent


def _reduce(strategy: dx.Strategy, options: dx.CommunicationOptions | None = None) -> None:
    values = [jnp.ones(2), jnp.ones(2), jnp.ones(2)]

    @dx.function
    def step() -> object:
        return strategy.run(lambda: dx.get_replica_context().all_reduce("SUM", values, options))

    total = jax.tree.leaves(step(), is_leaf=lambda leaf: isinstance(leaf, dx.Mirrored))
    assert [leaf.numpy().tolist() for leaf in total] == [[8.0, 8.0]] * 3


def test_options_of_the_strategy_count_where_a_call_gives_none(packs: list[int]) -> None:
    _reduce(dx.MultiWorkerMirroredStrategy())
    _reduce(dx.MultiWorkerMirroredStrategy(communication_options=SMALL))
    assert packs == [1, 3]


def test_options_of_a_call_count_first(packs: list[int]) -> None:
    strategy = dx.MultiWorkerMirroredStrategy(communication_options=SMALL)
    _reduce(strategy, dx.CommunicationOptions(bytes_per_pack=1024))
    assert packs == [1]


def test_options_count_in_reductions_outside_the_replicas(packs: list[int]) -> None:
    for options in (None, SMALL):
        strategy = dx.MultiWorkerMirroredStrategy(communication_options=options)
        pairs = [(strategy.run(lambda: jnp.ones(2)), None) for _ in range(3)]
        strategy.extended.batch_reduce_to("SUM", pairs)
    assert packs == [1, 3]


def test_nccl_needs_gpus() -> None:
    with pytest.raises(ValueError, match="implementation=NCCL, which works between GPUs"):
        dx.MultiWorkerMirroredStrategy(
            communication_options=dx.CommunicationOptions(implementation="NCCL")
        )


def test_options_have_their_type() -> None:
    with pytest.raises(TypeError, match=r"communication_options=.* is not a dx.Communication"):
        dx.MultiWorkerMirroredStrategy(communication_options={"bytes_per_pack": 8})  # type: ignore[arg-type]
