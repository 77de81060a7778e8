"""KubernetesClusterResolver: the official client, against a server that answers as Kubernetes."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distribax.cluster import ExecutableLocation, KubernetesClusterResolver
from tests.unit.cluster.fake_server import Answer, Call, FakeServer, serving

kubernetes = pytest.importorskip("kubernetes")

OFF_CLUSTER = ExecutableLocation.OFF_CLUSTER
WITHIN_CLUSTER = ExecutableLocation.WITHIN_CLUSTER

Pod = tuple[str, str, str | None]
"""Name, phase and address."""


class _Cluster:
    """The pods of a Kubernetes cluster by label, and the answers of its API server."""

    def __init__(self, pods: dict[str, list[Pod]]) -> None:
        self.pods = pods

    def __call__(self, call: Call) -> Answer:
        if call.path not in ("/api/v1/pods", "/api/v1/namespaces/mine/pods"):
            return 403, {"kind": "Status", "status": "Failure", "message": "forbidden"}
        pods = self.pods.get(call.query["labelSelector"], [])
        return 200, {
            "kind": "PodList",
            "apiVersion": "v1",
            "metadata": {},
            "items": [
                {
                    "metadata": {"name": n},
                    "status": {"phase": phase, "podIP": ip, "hostIP": "10.9.9.9"},
                }
                for n, phase, ip in pods
            ],
        }


@pytest.fixture
def cluster() -> _Cluster:
    return _Cluster(
        {
            "job-name=tensorflow": [
                ("train-10", "Running", "10.1.0.10"),
                ("train-9", "Running", "10.1.0.9"),
            ],
            "app=more": [("a", "Running", "10.1.0.3")],
            "app=ps": [("ps-0", "Running", "fd00::1")],
        }
    )


@pytest.fixture
def api(cluster: _Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    """Runs the API server, and a kubeconfig file that leads there."""
    with serving(cluster) as server:
        path = tmp_path / "kubeconfig"
        path.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: here\n"
            f"clusters: [{{name: c, cluster: {{server: '{server.url}'}}}}]\n"
            "users: [{name: u, user: {token: secret}}]\n"
            "contexts: [{name: here, context: {cluster: c, user: u}}]\n"
        )
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield server


def test_the_running_pods_sorted_by_number(api: FakeServer) -> None:
    resolver = KubernetesClusterResolver(executable_location=OFF_CLUSTER)
    assert resolver.cluster_spec() == {"worker": ["10.1.0.9:8470", "10.1.0.10:8470"]}
    assert [(call.method, call.path) for call in api.calls] == [("GET", "/api/v1/pods")]
    assert api.calls[0].headers["authorization"] == "Bearer secret"


def test_several_jobs_and_labels(api: FakeServer) -> None:
    resolver = KubernetesClusterResolver(
        {"worker": ["app=more", "job-name=tensorflow"], "ps": ["app=ps"]},
        tf_server_port=2222,
        executable_location=OFF_CLUSTER,
    )
    assert resolver.cluster_spec() == {
        "worker": ["10.1.0.3:2222", "10.1.0.9:2222", "10.1.0.10:2222"],
        "ps": ["[fd00::1]:2222"],
    }
    assert {call.query["labelSelector"] for call in api.calls} == {
        "app=more",
        "app=ps",
        "job-name=tensorflow",
    }


def test_the_task_is_told_by_the_user(api: FakeServer) -> None:
    resolver = KubernetesClusterResolver(executable_location=OFF_CLUSTER)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://10.1.0.10:8470"
    assert resolver.master("worker", 0, rpc_layer="") == "10.1.0.9:8470"
    assert len(api.calls) == 2


def test_it_is_asked_again_each_time(api: FakeServer, cluster: _Cluster) -> None:
    resolver = KubernetesClusterResolver(executable_location=OFF_CLUSTER, namespace="mine")
    assert resolver.cluster_spec().num_tasks("worker") == 2
    cluster.pods = {}
    assert resolver.cluster_spec().num_tasks("worker") == 0
    assert {call.path for call in api.calls} == {"/api/v1/namespaces/mine/pods"}


@pytest.mark.parametrize("phase", ["Pending", "Failed", "Succeeded"])
def test_a_pod_that_is_not_running(api: FakeServer, cluster: _Cluster, phase: str) -> None:
    cluster.pods["job-name=tensorflow"].append(("train-11", phase, None))
    with pytest.raises(RuntimeError, match=f'Pod "train-11" is not running; phase: "{phase}"'):
        KubernetesClusterResolver(executable_location=OFF_CLUSTER).cluster_spec()
    assert len(api.calls) == 1


def test_a_pod_without_an_address(api: FakeServer, cluster: _Cluster) -> None:
    cluster.pods["job-name=tensorflow"].append(("train-11", "Running", None))
    with pytest.raises(RuntimeError, match='Pod "train-11" is running and has no address yet'):
        KubernetesClusterResolver(executable_location=OFF_CLUSTER).cluster_spec()
    assert len(api.calls) == 1


def test_a_pod_that_two_labels_match(api: FakeServer) -> None:
    resolver = KubernetesClusterResolver(
        {"worker": ["app=more"], "ps": ["app=more"]}, executable_location=OFF_CLUSTER
    )
    with pytest.raises(ValueError, match=r"cluster.ps\[0\]='10.1.0.3:8470': cluster.worker\[0\]"):
        resolver.cluster_spec()
    assert len(api.calls) == 2


def test_a_refusal_is_told(api: FakeServer) -> None:
    resolver = KubernetesClusterResolver(executable_location=OFF_CLUSTER, namespace="other")
    with pytest.raises(RuntimeError, match=r"did not list the pods with 'job-name=t[\s\S]*403"):
        resolver.cluster_spec()
    assert api.calls[0].path == "/api/v1/namespaces/other/pods"


def test_without_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(RuntimeError, match="Kubernetes cannot be found: Service host/port"):
        KubernetesClusterResolver().cluster_spec()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match="Kubernetes cannot be found"):
        KubernetesClusterResolver(executable_location=OFF_CLUSTER).cluster_spec()


def test_within_the_cluster(
    cluster: _Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a pod, the service account's files and two variables lead to the server, with TLS."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    certificate, token = tmp_path / "ca.crt", tmp_path / "token"
    authority.cert_pem.write_to_path(str(certificate))
    token.write_text("pod's secret")
    # The place of these files is fixed in the client; only their path is exchanged here.
    files = sys.modules["kubernetes.config.incluster_config"]
    monkeypatch.setattr(files, "SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setattr(files, "SERVICE_TOKEN_FILENAME", str(token))
    with serving(cluster, tls) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", server.host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        resolver = KubernetesClusterResolver(executable_location=WITHIN_CLUSTER)
        assert resolver.cluster_spec() == {"worker": ["10.1.0.9:8470", "10.1.0.10:8470"]}
        token.write_text("a newer secret")
        assert resolver.cluster_spec().num_tasks("worker") == 2
    sent = [call.headers["authorization"].lower() for call in server.calls]
    assert sent == ["bearer pod's secret", "bearer a newer secret"]


def test_a_client_of_the_users() -> None:
    def pods(label_selector: str, **options: Any) -> Any:
        assert label_selector == "app=mine"
        status = SimpleNamespace(phase="Running", pod_ip="10.0.0.1")
        return SimpleNamespace(
            items=[SimpleNamespace(metadata=SimpleNamespace(name="p"), status=status)]
        )

    client = SimpleNamespace(list_pod_for_all_namespaces=pods)
    resolver = KubernetesClusterResolver({"worker": ["app=mine"]}, override_client=client)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ImportError, match="pip install kubernetes"):
        KubernetesClusterResolver()
    assert KubernetesClusterResolver(override_client=object()).task_id is None


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="executable_location=None: expected"):
        KubernetesClusterResolver(executable_location=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"job_to_label_mapping\['worker'\]='a=b': expected a list"):
        KubernetesClusterResolver({"worker": "a=b"})
    with pytest.raises(TypeError, match=r"job_to_label_mapping\['worker'\]=\[3\]"):
        KubernetesClusterResolver({"worker": [3]})  # type: ignore[list-item]
    with pytest.raises(TypeError, match="job_to_label_mapping: job name=1"):
        KubernetesClusterResolver({1: ["a=b"]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="tf_server_port=0: port 0 is not a port"):
        KubernetesClusterResolver(tf_server_port=0)
