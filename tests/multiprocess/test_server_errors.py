"""What `dx.Server` and the coordinator refuse, and the waits that end with a name."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import distribax as dx
from distribax.cluster import ClusterSpec, ServerConfig, SimpleClusterResolver, missing_tasks
from distribax.cluster.ray import cluster_token, engine
from distribax.cluster.ray.ports import find_quiet_ports

pytestmark = pytest.mark.multiprocess

SPEC = ClusterSpec({"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]})


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def _spec(**jobs: int) -> ClusterSpec:
    ports = iter(find_quiet_ports(sum(jobs.values())))
    return ClusterSpec(
        {job: [f"127.0.0.1:{next(ports)}" for _ in range(size)] for job, size in jobs.items()}
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SPEC,), ValueError, "job_name=None: the cluster has the jobs chief, worker, ps"),
        ((SPEC, "boss"), ValueError, "job_name='boss': the cluster has no such job"),
        ((SPEC, "chief"), ValueError, "the chief is the coordinator"),
        ((SPEC, "worker"), ValueError, "task_index=None: the job 'worker' has 2 tasks"),
        ((SPEC, "worker", 2), ValueError, "task_index=2: the job 'worker' has the tasks 0 to 1"),
        ((SPEC, "worker", "x"), ValueError, "task_index='x': expected an index"),
        ((SPEC, "ps", 0, "grpc+verbs"), ValueError, r"protocol='grpc\+verbs': expected 'grpc'"),
        ((SPEC, "ps", 0, None, {}), TypeError, "config={} is a dict. Expected a .*ServerConfig"),
        ((["h:1"],), TypeError, "Expected a dict from job names to addresses"),
        (({"cluster": SPEC, "job_name": "ps", "x": 1},), ValueError, "has the key 'x'"),
        (({"worker": ["localhost"]},), ValueError, "the port is missing"),
        (({"worker": ["no.such.host.invalid:1"]},), RuntimeError, "is not known here"),
        (({"worker": ["192.0.2.77:1"]},), RuntimeError, "is not an address of this machine"),
    ],
)
def test_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dx.Server(*arguments)


def test_config() -> None:
    with pytest.raises(ValueError, match="token: expected a text"):
        ServerConfig(token=" ")
    with pytest.raises(ValueError, match="join_timeout_seconds=0: expected more than 0"):
        ServerConfig(join_timeout_seconds=0)


def test_a_server_that_was_not_started() -> None:
    definition = {"cluster": {"ps": ["127.0.0.1:4"]}, "job_name": "ps", "task_index": 0}
    server = dx.Server(definition, start=False)
    assert server.target == "grpc://127.0.0.1:4"
    assert dx.Server(server.server_def, start=False).server_def == server.server_def
    assert server.server_def.cluster == dx.ClusterSpec(definition["cluster"]).as_cluster_def()
    with pytest.raises(RuntimeError, match=r"ps 0 \(127.0.0.1:4\)\) is not running"):
        server.join()
    server.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        server.start()


def test_a_server_waits_for_its_chief_for_a_bounded_time() -> None:
    spec = _spec(chief=1, worker=1, ps=1)
    chief = spec.task_address("chief", 0)
    with (
        dx.Server(spec, "worker", config=ServerConfig(join_timeout_seconds=0.5)) as server,
        pytest.raises(RuntimeError, match=f"worker 0 waited 0.5 s for chief 0 at {chief}"),
    ):
        server.join()


def _kill_keeper() -> None:
    """Kills the process that looks after the one node of this process, once there is one."""
    while not (keepers := [each for each in psutil.Process().children() if _is_keeper(each)]):
        time.sleep(0.01)
    for keeper in keepers:
        keeper.kill()


def _is_keeper(process: psutil.Process) -> bool:
    try:
        return "node_main.py" in " ".join(process.cmdline())
    except psutil.Error:  # It has ended.
        return False


def test_a_server_whose_node_fails_tries_again_a_few_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with dx.Server(_spec(chief=1, worker=1, ps=1), "worker") as server:
        for number in (1, 2):
            _kill_keeper()
            while caplog.text.count("It tries again") < number:
                assert server.join(timeout=0.1) is False
        _kill_keeper()
        with pytest.raises(RuntimeError, match=r"worker 0: Ray failed .* looks after it has ended"):
            server.join()


def test_a_port_that_is_taken() -> None:
    spec = _spec(ps=1, worker=1)
    host, _, port = spec.task_address("ps", 0).rpartition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(RuntimeError, match=r"ps 0 cannot have its address .*: it is in use"),
    ):
        dx.Server(spec, "ps")


def test_the_coordinator_names_the_tasks_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(missing_tasks, "REMIND_SECONDS", 0.0)
    spec = _spec(chief=1, worker=2, ps=1)
    resolver = SimpleClusterResolver(spec, task_type="chief", task_id=0)
    missing = rf"worker 0 \({spec.task_address('worker', 0)}\), worker 1 .*, ps 0 .* did not join"
    with pytest.raises(RuntimeError, match=missing + ".*joined: nobody.*set RAY_AUTH_TOKEN"):
        engine.from_resolver(resolver, timeout=0.5)
    # The log has it while the coordinator waits.
    assert re.search(rf"still waiting for {missing[:-12]}", caplog.text)


@pytest.mark.parametrize(
    ("jobs", "task", "message"),
    [
        ({"worker": ["h:1"]}, None, "no task in the job 'ps'"),
        ({"ps": ["h:1"], "worker": []}, None, "no task in the job 'worker'"),
        ({"chief": ["h:1", "h:2"], "ps": ["h:3"], "worker": ["h:4"]}, None, "has 2 chiefs"),
        ({"ps": ["h:3"], "worker": ["h:4"]}, "worker", "this process is worker 0, but"),
        ({"ps": ["h:3"], "worker": ["h:4"]}, "boss", "the cluster has no such job"),
    ],
)
def test_clusters_without_a_place_for_a_coordinator(
    jobs: dict[str, list[str]], task: str | None, message: str
) -> None:
    resolver = SimpleClusterResolver(ClusterSpec(jobs), task_type=task, task_id=0)
    with pytest.raises(ValueError, match=message):
        engine.from_resolver(resolver)


def test_where_the_token_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cluster_token.find_token() is None
    assert cluster_token.get_process_token() == cluster_token.get_process_token()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("in the home folder\n")
    assert cluster_token.get_process_token() == "in the home folder"
    (tmp_path / "token").write_text("in a file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert cluster_token.find_token() == "in a file"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"RAY_AUTH_TOKEN_PATH=.*nowhere.*cannot be read"):
        cluster_token.find_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "in a variable")
    assert cluster_token.find_token() == "in a variable"


def test_threads_that_use_ray_leave_the_environment_to_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster_token.import_ray()
    is_over = threading.Event()

    def use_ray() -> None:
        while not is_over.is_set():
            cluster_token.import_ray()

    thread = threading.Thread(target=use_ray)
    thread.start()
    try:
        for number in range(200):
            monkeypatch.setenv("OF_THE_PROGRAM", str(number))
            time.sleep(0)
            assert os.environ["OF_THE_PROGRAM"] == str(number)
    finally:
        is_over.set()
        thread.join()
    # While Ray is connected or started again, its own variables are restored, and no others.
    with cluster_token.keep_environment():
        monkeypatch.setenv("OF_THE_PROGRAM", "set meanwhile")
        os.environ["RAY_OF_ITS_OWN"] = "1"
    assert os.environ["OF_THE_PROGRAM"] == "set meanwhile" and "RAY_OF_ITS_OWN" not in os.environ


def test_ports_that_nobody_is_given_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_quiet_ports(5)
    assert len(set(found)) == 5
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(found) < first
    # Whoever looks for ports before these are used finds others, even with the same luck.
    with monkeypatch.context() as patch:
        patch.setattr(random, "SystemRandom", lambda: random.Random(0))
        chosen = [port for _ in range(20) for port in find_quiet_ports(5)]
    assert all(len(set(chosen[i : i + 60])) == 60 for i in range(40))

    def occupied(*_: Any) -> socket.socket:
        raise OSError("in use")

    monkeypatch.setattr(socket, "create_server", occupied)
    with pytest.raises(OSError, match="0 are free; 2 are needed"):
        find_quiet_ports(2)
