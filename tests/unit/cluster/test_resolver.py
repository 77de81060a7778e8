"""The base class, SimpleClusterResolver and UnionResolver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

import distribax as dx
from distribax import topology
from distribax.cluster import ClusterSpec
from distribax.cluster_resolver import ClusterResolver, SimpleClusterResolver, UnionResolver

CLUSTER = ClusterSpec({"ps": ["ps0:2222", "ps1:2222"], "worker": ["w0:2222", "w1:2222", "w2:2222"]})


class _Fixed(ClusterResolver):
    def cluster_spec(self) -> ClusterSpec:
        return CLUSTER


def _simple(cluster: dict[str, Any], **options: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **options)


def test_the_module_is_public() -> None:
    assert dx.cluster_resolver.SimpleClusterResolver is SimpleClusterResolver
    missing = [n for n in dx.cluster_resolver.__all__ if not hasattr(dx.cluster_resolver, n)]
    assert missing == []


def test_a_subclass_needs_only_the_cluster() -> None:
    resolver = _Fixed()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.environment == ""
    assert resolver.local_task_id is None
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "w1:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "grpc"
    assert resolver.master() == "grpc://w0:2222"
    assert resolver.master(task_id=2) == "grpc://w2:2222"
    assert resolver.master("ps", 1, rpc_layer="http") == "http://ps1:2222"
    assert resolver.master("ps", 1, rpc_layer="") == "ps1:2222"
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()  # type: ignore[abstract]


def test_what_is_not_a_task_is_refused() -> None:
    resolver = _Fixed()
    with pytest.raises(TypeError, match="task_type=3: is a int"):
        resolver.task_type = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="task_type=''"):
        resolver.task_type = ""
    with pytest.raises(ValueError, match="task_id=-1: expected an index"):
        resolver.task_id = -1
    with pytest.raises(TypeError, match=r"task_id=1.5: is a float"):
        resolver.task_id = 1.5  # type: ignore[assignment]
    resolver.task_id = 1
    resolver.task_id = None
    assert resolver.task_id is None


def test_accelerators_do_not_count_cpus() -> None:
    assert _Fixed().num_accelerators() == {}


def test_accelerators_of_this_task_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(platform: str, process: int) -> Any:
        return SimpleNamespace(platform=platform, process_index=process)

    mine = (device("cuda", 1), device("cuda", 1), device("cpu", 1))
    theirs = (device("tpu", 0), device("gpu", 2))
    monkeypatch.setattr(topology, "resolve_devices", lambda: mine)
    monkeypatch.setattr(jax, "devices", lambda: [*mine, *theirs])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    resolver = _Fixed()
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.num_accelerators() == {"GPU": 2}
    assert resolver.num_accelerators()["TPU"] == 0
    assert resolver.num_accelerators("worker", 1) == {"GPU": 2}
    assert resolver.num_accelerators("worker", 0) == {"TPU": 1}
    assert resolver.num_accelerators("worker", 2) == {"GPU": 1}
    assert resolver.num_accelerators("ps", 0) == {}
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    assert resolver.num_accelerators("worker", 0) == {}


def test_simple_answers_what_it_was_given() -> None:
    resolver = SimpleClusterResolver(
        CLUSTER,
        master="m:1",
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    assert resolver.cluster_spec() is CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 0) == {"GPU": 8}
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker", 0) == "grpc://w0:2222"
    assert resolver.master("worker", 2, rpc_layer="http") == "http://w2:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, None
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, None)
    assert resolver.master() == "m:1"


def test_simple_knows_nothing_more() -> None:
    resolver = SimpleClusterResolver(CLUSTER)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.num_accelerators() == {}
    assert resolver.master() == resolver.master(rpc_layer="grpc") == ""
    with pytest.raises(ValueError, match="No task with index 3 in job 'worker'"):
        resolver.master("worker", 3)


def test_simple_refuses_wrong_types() -> None:
    with pytest.raises(TypeError, match=r"cluster_spec=.*is a dict. Expected a ClusterSpec"):
        SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="master=None is a NoneType"):
        SimpleClusterResolver(CLUSTER, master=None)  # type: ignore[arg-type]


def test_union_asks_the_first_for_everything_but_the_cluster() -> None:
    first = _simple(
        {"ps": ["ps0:1"]},
        master="m:1",
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    second = _simple({"worker": ["w0:1"]}, task_type="worker", task_id=2, rpc_layer="http")
    union = UnionResolver(first, second)
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 1, "grpc")
    assert (union.environment, union.local_task_id) == ("cloud", None)
    assert union.num_accelerators() == {"GPU": 8}
    assert union.master() == "grpc://m:1"
    assert union.master("worker", 0) == "grpc://w0:1"
    assert union.master("worker", 0, rpc_layer="x") == "x://w0:1"
    union.task_type, union.task_id, union.rpc_layer = "worker", 2, "http"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 2, "http")
    assert union.master() == "http://m:1"


def test_an_override_of_zero_is_an_override() -> None:
    first = _simple({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=1)
    union = UnionResolver(first, task_type="chief", task_id=0, rpc_layer="")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 0, "")


@pytest.mark.parametrize(
    ("clusters", "joined"),
    [
        ([{"ps": ["p0:1"]}, {"worker": ["w0:1"]}], {"ps": ["p0:1"], "worker": ["w0:1"]}),
        (
            [{"worker": ["w4:1", "w5:1"]}, {"worker": ["w0:1"]}],
            {"worker": ["w4:1", "w5:1", "w0:1"]},
        ),
        ([{"worker": {5: "a:1", 9: "b:1"}}], {"worker": {5: "a:1", 9: "b:1"}}),
        (
            [{"worker": {5: "a:1", 9: "b:1"}}, {"worker": {3: "c:1", 6: "d:1"}}],
            {"worker": {3: "c:1", 5: "a:1", 6: "d:1", 9: "b:1"}},
        ),
        (
            [{"worker": ["a:1", "b:1"]}, {"worker": {3: "c:1"}}],
            {"worker": {0: "a:1", 1: "b:1", 3: "c:1"}},
        ),
        ([{"worker": []}, {"worker": ["a:1"]}, {"worker": ["b:1"]}], {"worker": ["a:1", "b:1"]}),
        # The same cluster twice: one resolver changes what the other says of it.
        ([{"worker": ["a:1", "b:1"]}] * 2, {"worker": ["a:1", "b:1"]}),
        ([{"worker": {1: "a:1"}}] * 2, {"worker": {1: "a:1"}}),
    ],
)
def test_union_joins_clusters(clusters: list[dict[str, Any]], joined: dict[str, Any]) -> None:
    assert UnionResolver(*map(_simple, clusters)).cluster_spec() == joined


@pytest.mark.parametrize(
    "clusters",
    [
        [{"worker": {7: "a:1"}}, {"worker": {3: "b:1", 7: "c:1"}}],
        [{"worker": ["a:1", "b:1"]}, {"worker": {1: "c:1", 3: "d:1"}}],
    ],
)
def test_union_refuses_two_addresses_for_a_task(clusters: list[dict[str, Any]]) -> None:
    with pytest.raises(KeyError, match=r"the task [17] of the job 'worker'"):
        UnionResolver(*map(_simple, clusters)).cluster_spec()


def test_union_refuses_one_address_for_two_tasks() -> None:
    union = UnionResolver(_simple({"worker": ["a:1"]}), _simple({"ps": ["a:1"]}))
    with pytest.raises(ValueError, match=r"cluster.ps\[0\]='a:1': cluster.worker\[0\] has this"):
        union.cluster_spec()


def test_union_needs_resolvers() -> None:
    with pytest.raises(ValueError, match="at least one resolver"):
        UnionResolver()
    with pytest.raises(TypeError, match=r"resolvers\[1\]=.*is a ClusterSpec"):
        UnionResolver(_Fixed(), CLUSTER)  # type: ignore[arg-type]


def test_union_has_no_other_parameters() -> None:
    with pytest.raises(ValueError, match=r"UnionResolver: there are no parameters 'environment'"):
        UnionResolver(_Fixed(), environment="cloud")


def test_an_environment_may_be_none() -> None:
    assert SimpleClusterResolver(CLUSTER, environment=None).environment is None
