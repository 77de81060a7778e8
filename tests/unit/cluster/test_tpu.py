"""TPUClusterResolver, with GKE's variables and a server that answers as a TPU's metadata server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import distribax as dx
from distribax.cluster import ClusterSpec, TPUClusterResolver
from tests.unit.cluster.fake_server import Answer, Call, FakeServer, serving

SLICE = {"worker-network-endpoints": "t1v-0,t1v-1,10.0.0.3", "agent-worker-number": "2"}
ATTRIBUTES = "/computeMetadata/v1/instance/attributes/"

Serve = Callable[[dict[str, str]], FakeServer]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Gives a function that starts the metadata server of a machine with these attributes."""
    with ExitStack() as stack:

        def start(attributes: dict[str, str]) -> FakeServer:
            def answer(call: Call) -> Answer:
                assert call.headers["metadata-flavor"] == "Google"
                text = attributes.get(call.path.removeprefix(ATTRIBUTES))
                return (404, "not here") if text is None else (200, text)

            server = stack.enter_context(serving(answer))
            monkeypatch.setenv("GCE_METADATA_HOST", f"{server.host}:{server.port}")
            return server

        yield start


def test_machines_of_the_metadata(serve: Serve) -> None:
    server = serve(SLICE)
    resolver = TPUClusterResolver(tpu="", zone="us-central2-b", project="p")
    addresses = ["t1v-0:8482", "t1v-1:8482", "10.0.0.3:8482"]
    assert resolver.cluster_spec() == {"worker": addresses}
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "grpc://10.0.0.3:8482"
    assert {call.path for call in server.calls} == {
        f"{ATTRIBUTES}{name}" for name in (*SLICE, "tpu-env")
    }
    resolver.task_id = 0
    assert resolver.task_id == 0
    assert TPUClusterResolver.detect() is None, "nobody is asked without need"


def test_the_older_form(serve: Serve) -> None:
    serve({"worker-network-endpoints": "unknown:0:10.0.0.2,unknown:1:10.0.0.1"})
    resolver = TPUClusterResolver(job_name="chief", port=99)
    assert resolver.cluster_spec() == {"chief": ["10.0.0.2:99", "10.0.0.1:99"]}


def test_machines_of_gke(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve({})
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "tpu-0.svc, tpu-1.svc:8471")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["tpu-0.svc:8482", "tpu-1.svc:8482"]}
    assert resolver.task_id == 1
    assert not server.calls
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert TPUClusterResolver.detect() is None
    monkeypatch.delenv("TPU_WORKER_ID")
    with pytest.raises(ValueError, match="TPU_WORKER_ID is missing, although TPU_WORKER_HOSTN"):
        _ = resolver.task_id


def test_the_tpus_of_one_machine() -> None:
    resolver = TPUClusterResolver(tpu="local")
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert dx.MultiWorkerMirroredStrategy(resolver).cluster_resolver is resolver


def test_a_strategy_for_one_machine_refuses_several(serve: Serve) -> None:
    serve(SLICE)
    with pytest.raises(RuntimeError, match=r"cluster has 3 machines.*MultiWorkerMirroredStrategy"):
        dx.TPUStrategy(TPUClusterResolver())
    serve({"worker-network-endpoints": "t1v-0"})
    with pytest.raises(RuntimeError, match="JAX finds no TPU on this machine"):
        dx.TPUStrategy(TPUClusterResolver())


def test_several_slices_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"MEGASCALE_NUM_SLICES='2': .*EnvironmentClusterResolver"
    serve(SLICE | {"tpu-env": "ZONE: 'us-central2-b'\nMEGASCALE_NUM_SLICES: '2'\n"})
    with pytest.raises(RuntimeError, match=message):
        TPUClusterResolver().cluster_spec()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t0,t1")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    with pytest.raises(RuntimeError, match=message):
        TPUClusterResolver().cluster_spec()


def test_elsewhere_there_is_no_slice(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve({})
    with pytest.raises(RuntimeError, match="not part of a TPU: its metadata has no 'worker-net"):
        TPUClusterResolver().cluster_spec()
    with serving(lambda _: (500, "broken")) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"{server.host}:{server.port}")
        with pytest.raises(RuntimeError, match=r"the metadata server refused .* with 500"):
            TPUClusterResolver().cluster_spec()
    with pytest.raises(RuntimeError, match=r"the metadata server did not answer at http://127\."):
        TPUClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"worker-network-endpoints": "a b"}, "worker-network-endpoints='a b': 'a b' is not a ho"),
        ({"worker-network-endpoints": "a,a"}, "address already"),
        ({"worker-network-endpoints": "a:0:[::"}, "is not an IPv6 address"),
        (SLICE | {"agent-worker-number": "-1"}, "agent-worker-number='-1': expected the number"),
        (SLICE | {"agent-worker-number": "3"}, "worker"),
    ],
)
def test_malformed_answers(serve: Serve, attributes: dict[str, str], message: str) -> None:
    serve(attributes)
    with pytest.raises(ValueError, match=message):
        dx.MultiWorkerMirroredStrategy(TPUClusterResolver())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tpu": "my-tpu"}, "tpu='my-tpu': a program uses the TPU of the machines that it runs"),
        ({"job_name": ""}, "job_name=''"),
        ({"port": 0}, "port=0: port 0 is not a port"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TPUClusterResolver(**arguments)
