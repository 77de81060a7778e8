"""`distribax doctor`: what it finds, how it judges that, and the fixes it names."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from distribax.cli import main
from distribax.cli.checks import clocks, devices, memory, ray_parts
from distribax.cluster.peers.cluster_secret import SECRET_VARIABLE
from distribax.cluster.ray import ports
from distribax.cluster.spec.address import Address
from distribax.cluster.spec.host_address import listen
from tests.forked import start_forked

_VARIABLES = ("TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = [name for name in os.environ if name.startswith(("SLURM_", "JAX_COORDINATOR"))]
    for name in (*cluster, *_VARIABLES, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


def diagnose(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs the doctor; returns the exit code and the findings by 'area subject'."""
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] == (code == 0)
    findings = {f"{each['area']} {each['subject']}": each for each in told["findings"]}
    for finding in findings.values():
        assert bool(finding["fix"]) == (finding["verdict"] != "ok"), finding
    return code, findings


def set_task(monkeypatch: pytest.MonkeyPatch, address: str, index: int | None = 0) -> None:
    task = {} if index is None else {"type": "worker", "index": index}
    cluster = {"worker": [address, "127.0.0.1:9"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


def install(monkeypatch: pytest.MonkeyPatch, needs: list[str], **versions: str) -> None:
    """Pretends that these packages are installed, and that distribax needs those."""

    def version(name: str) -> str:
        try:
            return versions[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    monkeypatch.setattr(metadata, "version", version)


def test_this_machine_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = diagnose(capsys)
    assert code == 0, findings
    assert findings["devices cpu"]["value"].startswith("8: CPU:0, CPU:1")
    assert findings["devices thread pool"]["value"] == (
        "large enough: 8 CPU devices need 16 threads"
    )
    assert "a single process" in findings["cluster resolver"]["value"]
    assert {"versions python", "versions jax", "versions jaxlib"} <= findings.keys()
    assert findings["network 127.0.0.1"]["verdict"] == "ok"


def test_table_has_findings_and_fixes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "versions: jax " in shown and "devices: cpu" in shown
    # The host name leads to this machine only, which is worth a word and no failure.
    assert "warning" in shown and "fix: when other machines take part" in shown


def test_versions_are_compared_with_what_was_tested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = [
        "jax<0.11,>=0.10.2",
        "numpy (>=2.0)",
        "optax>=0.2.5",
        "keras>=3.6; extra == 'keras'",
        'ray[default]>=2.40; python_version > "3.8" and extra == "ray"',
        "torch==2.13.0; extra == 'torch'",
        "mkdocs>=1.6; extra == 'docs'",
    ]
    versions = {"distribax": "1", "jax": "0.11.0rc1", "jaxlib": "0.10.2", "numpy": "2"}
    install(monkeypatch, needs, **versions, keras="3.5.9", torch="2.13.0+cpu")
    code, findings = diagnose(capsys)
    assert code == 1
    assert (
        findings["versions jax"]["value"] == "0.11.0rc1, outside of the tested range <0.11,>=0.10.2"
    )
    assert findings["versions jax"]["fix"] == "pip install 'jax<0.11,>=0.10.2'"
    assert findings["versions jaxlib"]["verdict"] == "problem"
    assert findings["versions numpy"]["verdict"] == "ok"
    assert findings["versions optax"]["value"] == "not installed"
    assert findings["versions optax"]["verdict"] == "problem"
    assert findings["extras keras: keras"]["verdict"] == "warning"
    assert findings["extras torch: torch"]["verdict"] == "ok"
    assert "pip install 'distribax[ray]'" in findings["extras ray: ray"]["value"]
    assert findings["extras ray: ray"]["verdict"] == "ok"
    assert not any("mkdocs" in subject for subject in findings)


def test_running_from_source_is_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    packages = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain", "rich")
    install(monkeypatch, [], **dict.fromkeys(packages, "1.2"))
    monkeypatch.setattr(metadata, "requires", requires)
    code, findings = diagnose(capsys)
    assert code == 0
    assert findings["versions distribax"]["verdict"] == "warning"
    assert findings["versions grain"]["value"] == "1.2 (tested: not known)"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_cluster_of_the_environment(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen(host.strip("[]"), 0) as server:
        address = f"{host}:{server.getsockname()[1]}"
        set_task(monkeypatch, address)
        code, findings = diagnose(capsys)
        assert code == 1
        assert f"cannot listen on {address}" in findings["cluster own address"]["value"]
        set_task(monkeypatch, address, index=1)
        code, findings = diagnose(capsys)
        assert code == 0, "only worker 0 listens"
        assert findings["cluster this task"]["value"] == "worker 1"
    set_task(monkeypatch, address)
    code, findings = diagnose(capsys)
    assert code == 0
    assert (
        "TFConfigClusterResolver, because: TF_CONFIG is set"
        in (findings["cluster resolver"]["value"])
    )
    assert "is free" in findings["cluster own address"]["value"]
    assert address in findings["cluster tasks"]["value"]


def test_the_secret_of_the_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_task(monkeypatch, "127.0.0.1:8")
    assert "cluster secret" not in diagnose(capsys)[1], "nobody else reaches it"
    # A name that is not known, so that nothing is sent to anybody.
    set_task(monkeypatch, "host.invalid:8", index=1)
    finding = diagnose(capsys)[1]["cluster secret"]
    assert finding["verdict"] == "warning" and "openssl rand -hex 32" in finding["fix"]
    monkeypatch.setenv(SECRET_VARIABLE, "too short")
    code, findings = diagnose(capsys)
    assert code == 1 and "9 characters" in findings["cluster secret"]["value"]
    monkeypatch.setenv(SECRET_VARIABLE, "a secret that nobody can guess")
    assert diagnose(capsys)[1]["cluster secret"]["verdict"] == "ok"
    cluster = {"worker": ["127.0.0.1:8"], "ps": ["127.0.0.1:9"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    finding = diagnose(capsys)[1]["cluster secret"]
    assert finding["verdict"] == "problem" and "RAY_AUTH_TOKEN" in finding["fix"]
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    assert diagnose(capsys)[1]["cluster secret"]["verdict"] == "ok"


@pytest.mark.parametrize("broken", ["{", '{"cluster": {"worker": ["host0"]}}'])
def test_broken_description_of_the_cluster_is_a_problem(
    broken: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", broken)
    code, findings = diagnose(capsys)
    assert code == 1
    assert "TF_CONFIG" in findings["cluster description"]["value"]


def test_task_that_is_not_known_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_task(monkeypatch, "127.0.0.1:8", index=None)
    code, findings = diagnose(capsys)
    assert code == 1
    assert '"task"' in findings["cluster this task"]["fix"]


def test_network_that_does_not_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setattr(socket, "gethostbyname", refuse)
    code, findings = diagnose(capsys)
    assert code == 1
    assert "not permitted" in findings["network 127.0.0.1"]["value"]
    assert findings["network host name"]["verdict"] == "warning"


def test_host_name_that_others_can_reach_is_fine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    _, findings = diagnose(capsys)
    assert findings["network host name"]["value"] == "localhost is 10.0.0.7"
    assert findings["network host name"]["verdict"] == "ok"


def test_devices_that_do_not_start_or_could_dead_lock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("as in a bad dream")

    monkeypatch.setattr(devices, "check_cpu_pool", fail)
    code, findings = diagnose(capsys)
    assert code == 1
    assert "as in a bad dream" in findings["devices thread pool"]["value"]
    monkeypatch.setattr(devices, "resolve_devices", fail)
    code, findings = diagnose(capsys)
    assert code == 1
    assert findings["devices JAX"]["value"] == "does not start: as in a bad dream"
    assert "JAX_PLATFORMS" in findings["devices JAX"]["fix"]


def test_shared_memory_files_ports_and_ray_are_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, findings = diagnose(capsys)
    assert findings["memory shared memory"]["value"] == "can be created and written"
    assert findings["memory /dev/shm"]["value"].endswith("MiB free")
    assert findings["ray programs"]["verdict"] == "ok"
    assert "handed out" in findings["network ports"]["value"]

    def refuse(*args: object) -> int:
        raise OSError("not permitted")

    few_ports = tmp_path / "range"
    few_ports.write_text("40000\t40100\n")
    long_folder = tmp_path / ("long" * 10)
    long_folder.mkdir()
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(memory, "_ENOUGH_BYTES", 1 << 60)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, -1))
    monkeypatch.setattr(ports, "_RANGE_FILE", few_ports)
    monkeypatch.setattr(ray_parts, "_PROGRAMS", ("no/such/program",))
    monkeypatch.setattr(ray_parts.tempfile, "gettempdir", lambda: str(long_folder))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    code, findings = diagnose(capsys)
    assert code == 1, "Ray cannot start"
    assert "not permitted" in findings["memory shared memory"]["value"]
    assert "--shm-size" in findings["memory /dev/shm"]["fix"]
    assert findings["memory open files"]["fix"].startswith("ulimit -n 65536")
    assert findings["network ports"]["verdict"] == "warning"
    assert "no/such/program" in findings["ray programs"]["value"]
    assert findings["ray socket folder"]["fix"] == "export TMPDIR=/tmp"
    assert "10.0.0.1" in findings["ray RAY_ADDRESS"]["value"]

    monkeypatch.setattr(memory, "can_share", lambda: False)
    monkeypatch.setattr(ray_parts.tempfile, "gettempdir", lambda: "/no/such/folder")
    _, findings = diagnose(capsys)
    assert "on this platform" in findings["memory shared memory"]["value"]
    assert "TMPDIR" in findings["ray socket folder"]["fix"]

    monkeypatch.setattr(ports, "_RANGE_FILE", tmp_path / "missing")
    monkeypatch.setattr(ray_parts.importlib.util, "find_spec", lambda name: None)
    _, findings = diagnose(capsys)
    assert not any(name.startswith("ray ") or name == "network ports" for name in findings)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_two_machines_compare_clocks_and_versions(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"from distribax.cli import main\nmain(['doctor', '--listen', '{host}:0'])"
    listener = start_forked(program, os.environ)
    try:
        assert listener.stdout is not None
        peer = f"{host}:{listener.stdout.readline().rpartition(':')[2].strip()}"
        code = main(["doctor", "--json", "--peer", peer])
        told = json.loads(capsys.readouterr().out)
        listener.send_signal(signal.SIGINT)
        listener.communicate()
        assert listener.returncode == 0, "Ctrl-C ends it in order"
    finally:
        listener.kill()
    findings = {f"{each['area']} {each['subject']}": each for each in told["findings"]}
    assert code == 0
    assert "round trip" in findings[f"peer {peer}"]["value"]
    assert findings[f"clock {peer}"]["verdict"] == "ok"
    assert findings[f"versions {peer}"]["value"] == "the same as here"


@pytest.mark.parametrize("is_doctor", [True, False])
def test_other_clock_other_versions_and_no_doctor(is_doctor: bool) -> None:
    def serve() -> None:
        link, _ = server.accept()
        with link, link.makefile("rwb") as stream:
            while is_doctor and stream.readline():
                answer = {"time": time.time() + 3600, "host": "far", "versions": {"jax": "0.1"}}
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        peer = Address("127.0.0.1", server.getsockname()[1])
        found = {finding.area: finding for finding in clocks.check_clocks([peer])}
        thread.join()
    if is_doctor:
        assert found["clock"].value.startswith("+3600") and "timedatectl" in found["clock"].fix
        assert "0.1 there" in found["versions"].value
    else:
        assert "distribax doctor --listen" in found["peer"].fix


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "host"], "--peer='host': the port is missing"),
        (["--listen", "x"], "--listen='x': expected a port"),
        (["--listen", "256.0.0.1:80"], "--listen='256.0.0.1:80': "),
    ],
)
def test_wrong_addresses_of_peers(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
