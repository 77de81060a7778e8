"""Synchronous training over several machines: names, cuts and notices, in network namespaces."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from distribax.types import RESTARTABLE_EXIT_CODE
from tests.environment import inherited
from tests.forked import start_forked
from tests.multiprocess.crew import Cluster
from tests.multiprocess.machines import ENTER, Machine, machines
from tests.multiprocess.workers import describe_task

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


DOCTOR = """
import json, sys
from distribax.cli import doctor
findings = [each.as_dict() for each in doctor.examine(wait_seconds=float(sys.argv[1]))]
print(json.dumps([each for each in findings if each["area"] in ("cluster", "peers")]))
"""


def test_the_doctor_checks_that_all_reach_each_other(three: list[Machine]) -> None:
    def diagnose(seconds: str) -> list[list[dict[str, str]]]:
        addresses = [f"{machine.name}:2222" for machine in three]
        doctors = [
            start_forked(
                ENTER + DOCTOR,
                inherited() | describe_task(addresses, index) | machine.environment,
                arguments=[seconds],
            )
            for index, machine in enumerate(three)
        ]
        said = [doctor.communicate() for doctor in doctors]
        return [json.loads(out) for out, _ in said]

    well = diagnose("120")
    for findings in well:
        peers = [each["value"] for each in findings if each["area"] == "peers"]
        assert peers == ["reached from here, and has reached this machine"] * 2
    assert any(f"(as {three[0].host})" in each["value"] for each in well[0])
    three[1].lose(three[2])
    try:
        first, second, third = diagnose("15")
    finally:
        three[1].find(three[2])
    assert {each["verdict"] for each in first if each["area"] == "peers"} == {"ok"}
    for findings in (second, third):
        (trouble,) = [each for each in findings if each["verdict"] == "problem"]
        assert "out of reach from here" in trouble["value"]


PREEMPTIBLE = """
checkpoint = dx.Checkpoint(w=w)
handler = dx.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, os.environ["SAVED"])
print("begins at", handler.total_run_calls, flush=True)
while handler.total_run_calls < int(os.environ["STEPS"]):
    handler.run(step)
    if handler.total_run_calls == 3:
        print("ready", flush=True)
    time.sleep(0.005)
print("ends at", handler.total_run_calls, float(w.numpy()[0]), flush=True)
"""


def test_a_notice_on_one_machine_saves_on_all_and_training_is_resumed(
    cluster: Cluster, three: list[Machine], tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    workers = cluster.start(PREEMPTIBLE, machines=three[:2], SAVED=saved, STEPS="1000000000")
    for worker in workers:
        worker.wait_until_says("ready")
    workers[1].process.send_signal(signal.SIGTERM)
    for worker in workers:
        assert worker.wait() == RESTARTABLE_EXIT_CODE, worker.err
    ((steps,), (same,)) = [
        re.findall(r"told to stop; saved after (\d+) steps", worker.err) for worker in workers
    ]
    assert steps == same
    total = int(steps) + 5
    again = cluster.start(PREEMPTIBLE, machines=three[:2], SAVED=saved, STEPS=str(total))
    for worker in again:
        assert worker.wait() == 0, worker.err
        assert f"begins at {steps}" in worker.out
        assert f"ends at {total} {float(total)}" in worker.out
