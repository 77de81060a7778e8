"""Synchronous training over several machines: names, cuts and notices, in network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.crew import Cluster
from tests.multiprocess.machines import Machine, machines

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    with machines(3, tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.mark.parametrize("by_name", [False, True], ids=["by address", "by name"])
def test_workers_train_whose_own_name_is_a_loopback_address(
    cluster: Cluster, three: list[Machine], by_name: bool
) -> None:
    workers = cluster.start(
        "train(3); print(float(step()))", machines=three[:2], by_name=by_name, COMPILED="True"
    )
    for worker in workers:
        assert worker.wait() == 0, worker.err
        assert worker.out.split()[-1] == "16384.0"


def test_two_workers_that_lose_each_other_are_named_by_all(
    cluster: Cluster, three: list[Machine]
) -> None:
    workers = cluster.start("train()", machines=three, DISTRIBAX_PEER_TIMEOUT="4")
    for worker in workers:
        worker.wait_until_says("ready")
    three[1].lose(three[2])
    try:
        for worker in workers:
            worker.must_name(workers[1], f"and {workers[2].name} cannot reach each other")
    finally:
        three[1].find(three[2])
