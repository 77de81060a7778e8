"""Parameter-server training whose machines are cut off and come back, in network namespaces."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.multiprocess.server_machines import (
    SERVER_PROCESS,
    ServerMachines,
    describe_end,
    hear_log,
    kill_processes,
    server_machines,
)

# Each starts a Ray cluster and waits for time limits: `make chaos` runs them.
pytestmark = [pytest.mark.multiprocess, pytest.mark.chaos]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerMachines]:
    """One cluster for all tests of this file: it takes many seconds to start."""
    limits = {"DISTRIBAX_HEAD_LOST_SECONDS": "5", "DISTRIBAX_SERVER_ANSWER_SECONDS": "10"}
    with server_machines(tmp_path_factory.mktemp("machines"), **limits) as made:
        made.ask("ready")
        yield made


def test_a_server_that_was_cut_off_goes_on_with_what_it_had(cluster: ServerMachines) -> None:
    before = cluster.ask("add 20 0")["total"]
    cluster.ask("snapshot")
    assert cluster.ask("add 5 0")["total"] == before + 5
    cluster.ask("counted 25")
    cluster.ps_machine.cut()
    hear_log(cluster.ps, "It tries to join again")
    cluster.chief.say("add 7 0")
    cluster.ps_machine.heal()
    # It has saved when it had lost the cluster.
    assert cluster.hear_answer()["total"] >= before + 12
    lost = cluster.ask("lost 1")["lost"]
    assert "parameter server 0 died and was restarted from its snapshot" in lost
    assert "Lost are none" in lost


def test_a_worker_that_was_cut_off_is_back_in_service(cluster: ServerMachines) -> None:
    cluster.ask("ready")
    machine = cluster.get_worker_machine(0)
    machine.cut()
    cluster.chief.say("add 40 0.1")
    hear_log(cluster.workers[0], "It tries to join again")
    assert 1 in cluster.hear_answer()["workers"]
    machine.heal()
    cluster.ask("ready")
    assert cluster.ask("add 40 0.1")["workers"] == [0, 1]


def test_a_worker_that_cannot_reach_a_server_is_set_aside(cluster: ServerMachines) -> None:
    cluster.ask("ready")
    machine = cluster.get_worker_machine(0)
    before = cluster.ask("add 1 0")["total"]
    machine.lose(cluster.ps_machine)
    try:
        # None of them fails: what the lost worker was given, the other one does.
        cluster.chief.say("add 40 0.1")
        said = hear_log(cluster.chief, "Worker 0 is set aside")
        assert "parameter server 0" in said and "did not answer" in said
        assert cluster.hear_answer()["total"] >= before + 40
    finally:
        machine.find(cluster.ps_machine)
    cluster.ask("ready")
    assert cluster.ask("add 40 0.1")["workers"] == [0, 1]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_training_goes_on_after_a_server_was_cut_off_for_a_minute(
    cluster: ServerMachines, is_killed: bool
) -> None:
    cluster.ask("ready")
    cluster.ask("work")
    cluster.ask("save")
    time.sleep(3.0)
    before = cluster.ask("check")
    cluster.ps_machine.cut()
    # Without the time to save, what came after the snapshot is lost.
    dead = kill_processes(cluster.ps, SERVER_PROCESS) if is_killed else []
    assert bool(dead) is is_killed
    time.sleep(60.0)
    cluster.ps_machine.heal()
    recovered = cluster.ask(f"recovered 0 {' '.join(map(str, dead))}")
    assert recovered == {"workers": [0, 1]}, describe_end(cluster.ps)
    after = cluster.ask("finish")
    assert after["finished"] > before["finished"] and not after["error"]
    assert after["restarts"] > before["restarts"] and after["unsafe"] == []
    missing = after["missing"]
    reported = after["reported"] - before["reported"]
    again = after["retried"] - before["retried"]
    said = cluster.ask("lost 1")["lost"]
    print(f"cut of 60 s: {missing} missing, {reported} reported: {said}")
    assert missing <= reported <= missing + again + 3
    assert bool(reported) is is_killed
    assert f"Lost are {reported} x assign_add (" in said if is_killed else "Lost are none" in said


def test_servers_end_with_the_chief_and_leave_nothing(cluster: ServerMachines) -> None:
    cluster.chief.say("end")
    while "closed" not in cluster.chief.hear():
        pass
    for program in (cluster.ps, *cluster.workers):
        while "ended" not in (told := program.hear()):
            pass
        assert told == {"ended": True}
        assert program.process.wait() == 0
    assert cluster.chief.process.wait() == 0
    assert cluster.programs.left() == []
