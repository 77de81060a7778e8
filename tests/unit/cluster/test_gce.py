"""GCEClusterResolver, against servers that answer as Compute Engine and its metadata server do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distribax.cluster import GCEClusterResolver
from tests.unit.cluster.fake_server import Answer, Call, FakeServer, serving

ZONE = "/v1/projects/my-project/zones/us-west1-a"
LIST = f"{ZONE}/instanceGroups/group-1/listInstances"
TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
ADDRESSES = {"vm-a": "10.0.0.10", "vm-b": "10.0.0.9", "vm-c": "10.0.0.100"}


def _instance(ip: str) -> dict[str, Any]:
    return {"networkInterfaces": [{"networkIP": ip}]}


def _compute_engine(call: Call) -> Answer:
    """Answers as the API does: the group in two pages, and each of its instances."""
    if call.path == LIST:
        names = ["vm-c"] if "pageToken" in call.query else ["vm-a", "vm-b"]
        page = {"items": [{"instance": f"https://x/zones/z/instances/{name}"} for name in names]}
        return 200, page if "pageToken" in call.query else page | {"nextPageToken": "p 2"}
    name = call.path.rpartition("/")[2]
    if call.path == f"{ZONE}/instances/{name}" and name in ADDRESSES:
        return 200, _instance(ADDRESSES[name])
    return 404, {"error": {"message": f"no {call.path}"}}


def _metadata(call: Call) -> Answer:
    if call.path == TOKEN_PATH and call.headers.get("metadata-flavor") == "Google":
        return 200, {"access_token": "secret", "expires_in": 3599, "token_type": "Bearer"}
    return 403, "no"


@pytest.fixture
def api() -> Iterator[FakeServer]:
    with serving(_compute_engine) as server:
        yield server


def _resolver(api: FakeServer, **options: Any) -> GCEClusterResolver:
    options = {"port": 8470, "credentials": "t"} | options
    return GCEClusterResolver(
        "my-project", "us-west1-a", "group-1", service=f"{api.url}/v1/", **options
    )


def test_the_running_instances_sorted_by_number(api: FakeServer) -> None:
    resolver = _resolver(api, task_id=2)
    assert resolver.cluster_spec() == {
        "worker": ["10.0.0.9:8470", "10.0.0.10:8470", "10.0.0.100:8470"]
    }
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "grpc")
    assert resolver.master() == "grpc://10.0.0.100:8470"
    assert resolver.master("worker", 0, rpc_layer="x") == "x://10.0.0.9:8470"


def test_what_is_asked(api: FakeServer) -> None:
    _resolver(api).cluster_spec()
    lists = [call for call in api.calls if call.path == LIST]
    assert [(call.method, call.query) for call in lists] == [
        ("POST", {}),
        ("POST", {"pageToken": "p 2"}),
    ]
    assert all(call.body == {"instanceState": "RUNNING"} for call in lists)
    assert {call.headers["authorization"] for call in api.calls} == {"Bearer t"}
    assert {call.method for call in api.calls if call not in lists} == {"GET"}


def test_it_is_asked_again_each_time(api: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = _resolver(api, task_type="ps")
    before = resolver.cluster_spec()
    monkeypatch.setitem(ADDRESSES, "vm-b", "10.0.0.1")
    assert resolver.cluster_spec() != before
    assert resolver.cluster_spec().task_address("ps", 0) == "10.0.0.1:8470"


def test_the_token_of_the_service_account(api: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(_metadata) as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", f"{metadata.host}:{metadata.port}")
        _resolver(api, credentials="default").cluster_spec()
    assert {call.headers["authorization"] for call in api.calls} == {"Bearer secret"}
    assert [call.path for call in metadata.calls] == [TOKEN_PATH]


@pytest.mark.parametrize(("credentials", "header"), [(lambda: "made", "Bearer made"), (None, None)])
def test_other_credentials(api: FakeServer, credentials: Any, header: str | None) -> None:
    _resolver(api, credentials=credentials).cluster_spec()
    assert {call.headers.get("authorization") for call in api.calls} == {header}


def test_an_empty_group() -> None:
    with serving(lambda _: (200, {"kind": "compute#instanceGroupsListInstances"})) as server:
        cluster = _resolver(server).cluster_spec()
    assert cluster.job_tasks("worker") == []


def test_names_are_quoted() -> None:
    with serving(lambda _: (200, {})) as server:
        GCEClusterResolver(
            "example.com:p", "z", "a/b", 1, credentials=None, service=server.url
        ).cluster_spec()
    path = "/projects/example.com%3Ap/zones/z/instanceGroups/a%2Fb/listInstances"
    assert [call.path for call in server.calls] == [path]


def test_the_job_cannot_be_changed(api: FakeServer) -> None:
    resolver = _resolver(api, task_type="ps")
    with pytest.raises(RuntimeError, match="You cannot reset the task_type of the GCECluster"):
        resolver.task_type = "worker"
    resolver.task_id, resolver.rpc_layer = 0, "http"
    assert resolver.master() == "http://10.0.0.9:8470"


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: (403, {"error": {"message": "may not"}})) as server:
        with pytest.raises(RuntimeError, match=r"Compute Engine refused .* with 403 .*may not"):
            _resolver(server).cluster_spec()
        monkeypatch.setenv("GCE_METADATA_HOST", f"{server.host}:{server.port}")
        with pytest.raises(RuntimeError, match=r"the metadata server refused .* with 403"):
            _resolver(server, credentials="default").cluster_spec()


def test_nobody_answers() -> None:
    with serving(_compute_engine) as server:
        resolver = _resolver(server)
    with pytest.raises(RuntimeError, match="Compute Engine did not answer at http://127"):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["not JSON"], "did not answer with JSON"),
        (["[" * 60_000], "did not answer with JSON"),
        ([{"nextPageToken": "p"}] * 2, "listInstances has no end: page 'p'"),
        (["[1]"], "did not answer with a JSON object"),
        ([{"items": [{"status": "RUNNING"}]}], r"listInstances: items\[0\].instance: no URL"),
        ([{"items": ["x"]}], r"items\[0\].instance: no URL"),
        ([{"items": [{"instance": "x/vm"}]}, {}], r"'vm' has no networkInterfaces\[0\].networkIP"),
        ([{"items": [{"instance": "x/vm"}]}, {"networkInterfaces": []}], "'vm' has no network"),
        ([{"items": [{"instance": "x/vm"}]}, _instance("a b")], r"\[0\]='a b:8470': 'a b' is not"),
    ],
)
def test_malformed_answers(answers: list[Any], message: str) -> None:
    rest = iter(answers)
    with serving(lambda _: (200, next(rest))) as server, pytest.raises(ValueError, match=message):
        _resolver(server).cluster_spec()


def test_a_token_is_missing(api: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: (200, {})) as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", f"{metadata.host}:{metadata.port}")
        with pytest.raises(ValueError, match="metadata server: the answer has no access_token"):
            _resolver(api, credentials="default").cluster_spec()


def test_wrong_arguments(api: FakeServer) -> None:
    with pytest.raises(ValueError, match="port=0: port 0 is not a port"):
        _resolver(api, port=0)
    with pytest.raises(TypeError, match=r"credentials is a int\. Expected 'default'"):
        _resolver(api, credentials=3)
    with pytest.raises(ValueError, match="task_type=''"):
        _resolver(api, task_type="")
    with pytest.raises(TypeError, match="service=<object"):
        GCEClusterResolver("p", "z", "g", 1, service=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="service='ftp://x': expected an address with https"):
        GCEClusterResolver("p", "z", "g", 1, service="ftp://x")
