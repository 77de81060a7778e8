"""TFConfigClusterResolver."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distribax.cluster import ClusterSpec, TFConfigClusterResolver

TWO = {"worker": ["w0:2222", "w1:2222"]}
EXAMPLE = {"cluster": TWO, "task": {"type": "worker", "index": 1}}


def _set(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))


def _everything(resolver: TFConfigClusterResolver) -> tuple[Any, ...]:
    return (
        resolver.cluster_spec(),
        resolver.task_type,
        resolver.task_id,
        resolver.rpc_layer,
        resolver.master(),
    )


def test_cluster_and_task(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, EXAMPLE | {"rpc_layer": "grpc", "environment": "cloud", "job": {"x": 1}})
    resolver = TFConfigClusterResolver()
    assert _everything(resolver) == (TWO, "worker", 1, "grpc", "grpc://w1:2222")
    assert resolver.environment is None
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 0) == {}
    assert resolver.master("worker", 0, rpc_layer="x") == "x://w0:2222"


@pytest.mark.parametrize("config", [None, "{}", '{"cluster": {}}', '{"cluster": null}'])
def test_without_a_cluster_it_is_a_single_process(
    monkeypatch: pytest.MonkeyPatch, config: str | None
) -> None:
    if config is not None:
        _set(monkeypatch, config)
    assert _everything(TFConfigClusterResolver()) == (ClusterSpec({}), None, None, None, "")


def test_the_variable_is_read_at_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    _set(monkeypatch, EXAMPLE)
    assert resolver.cluster_spec() == TWO
    assert resolver.task_id == 1
    _set(monkeypatch, {"cluster": {"ps": ["p0:1", "p1:1"]}, "task": {"type": "ps", "index": 0}})
    assert _everything(resolver) == ({"ps": ["p0:1", "p1:1"]}, "ps", 0, None, "p0:1")


def test_an_explicit_argument_wins_and_zero_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"cluster": TWO | {"chief": ["c:1"]}, "task": {"type": "worker", "index": 1}})
    resolver = TFConfigClusterResolver("chief", 0, rpc_layer="http", environment="google")
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert (resolver.rpc_layer, resolver.environment) == ("http", "google")
    assert resolver.master() == "http://c:1"
    assert TFConfigClusterResolver(task_id=0).master() == "w0:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, ""
    assert resolver.master() == "w1:2222"


def test_an_explicit_argument_wins_over_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"cluster": TWO, "task": {"type": 3, "index": "x"}, "rpc_layer": 7})
    resolver = TFConfigClusterResolver(task_type="worker", task_id=0, rpc_layer="grpc")
    assert _everything(resolver) == (TWO, "worker", 0, "grpc", "grpc://w0:2222")


def test_forms_that_tensorflow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(
        monkeypatch, {"cluster": {"worker": {"1": "a:1"}}, "task": {"type": "worker", "index": "1"}}
    )
    resolver = TFConfigClusterResolver()
    assert _everything(resolver) == ({"worker": {1: "a:1"}}, "worker", 1, None, "a:1")
    _set(monkeypatch, EXAMPLE | {"session_master": "elsewhere:1"})
    assert resolver.master() == resolver.master("worker", 0) == "elsewhere:1"
    _set(monkeypatch, {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert resolver.master() == ""


def test_an_evaluator_need_not_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"cluster": TWO, "task": {"type": "evaluator", "index": 0}})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == TWO
    assert (resolver.task_type, resolver.task_id) == ("evaluator", 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "TF_CONFIG is not JSON: Expecting value.*unset the variable"),
        ("{'cluster': 1}", "TF_CONFIG is not JSON"),
        ("[" * 100_000, "TF_CONFIG is not JSON"),
        ('{"task": {}, "task": {}}', "TF_CONFIG is not JSON: the key 'task' occurs twice"),
        ("[]", "TF_CONFIG is a JSON list. Expected an object"),
        ("3", "TF_CONFIG is a JSON int"),
        ({"cluster": ["a:1"]}, r"TF_CONFIG: cluster=\['a:1'\]: is a list. Expected an object"),
        ({"cluster": {"worker": "a:1"}}, "TF_CONFIG: cluster.worker='a:1': is a str"),
        ({"cluster": {"worker": [1]}}, r"TF_CONFIG: cluster.worker\[0\]=1: is a int"),
        ({"cluster": {"worker": {"x": "a:1"}}}, "TF_CONFIG: cluster.worker: index='x'"),
        (
            {"cluster": {"worker": ["a:1", "host:99999"]}},
            r"TF_CONFIG: cluster.worker\[1\]='host:99999': port 99999 is not a port \(1-65535\)",
        ),
        (
            {"cluster": {"worker": ["a:1", "host"]}},
            r"TF_CONFIG: cluster.worker\[1\]='host': the port is missing",
        ),
        (
            {"cluster": {"worker": ["a:1"], "ps": ["a:1"]}},
            r"TF_CONFIG: cluster.ps\[0\]='a:1': cluster.worker\[0\] has this address already",
        ),
        ({"cluster": TWO, "task": [1]}, r"TF_CONFIG: task=\[1\]: is a list"),
        ({"cluster": TWO, "task": {"type": 1.5}}, "TF_CONFIG: task.type=1.5: is a float"),
        (
            {"cluster": TWO, "task": {"type": "wroker", "index": 0}},
            "TF_CONFIG: task.type='wroker': the cluster has no such job; it has 'worker'",
        ),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": 2}},
            "TF_CONFIG: task.index=2: the job 'worker' has the tasks 0 to 1",
        ),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": -1}},
            "TF_CONFIG: task.index=-1: expected an index",
        ),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": True}},
            "TF_CONFIG: task.index=True: is a bool",
        ),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": None}},
            "TF_CONFIG: task.index=None: is a NoneType",
        ),
    ],
)
def test_malformed(monkeypatch: pytest.MonkeyPatch, config: Any, message: str) -> None:
    _set(monkeypatch, config)
    with pytest.raises(ValueError, match=message):
        TFConfigClusterResolver().cluster_spec()
    with pytest.raises(ValueError, match=message):
        _ = TFConfigClusterResolver().task_id


def test_malformed_text_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, EXAMPLE | {"rpc_layer": 3, "session_master": ["x"]})
    with pytest.raises(ValueError, match=r"TF_CONFIG: rpc_layer=3: is a int. Expected text"):
        _ = TFConfigClusterResolver().rpc_layer
    with pytest.raises(ValueError, match=r"TF_CONFIG: session_master=\['x'\]"):
        TFConfigClusterResolver().master()


def test_an_argument_that_does_not_fit_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, EXAMPLE)
    with pytest.raises(ValueError, match="task_id=5: the job 'worker' has the tasks 0 to 1"):
        TFConfigClusterResolver(task_id=5).cluster_spec()
    with pytest.raises(ValueError, match="task_type='ps': the cluster has no such job"):
        TFConfigClusterResolver(task_type="ps").cluster_spec()


def test_the_address_of_an_unknown_task(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"cluster": TWO})
    resolver = TFConfigClusterResolver()
    assert resolver.master("worker", 1) == "w1:2222"
    with pytest.raises(ValueError, match=r"TF_CONFIG: task.type is missing"):
        resolver.master()
    with pytest.raises(ValueError, match=r"TF_CONFIG: task.index is missing"):
        resolver.master("worker")


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=10,
)
_ADDRESS = st.sampled_from(["a:1", "b:1", "c:70000", "d", "[::1]:3", "", "x y:1", "e:2"]) | _JSON
_TASKS = st.lists(_ADDRESS, max_size=3) | st.dictionaries(
    st.sampled_from(["0", "1", "7", "-1", "x", "9" * 30]), _ADDRESS
)
_JOBS = st.sampled_from(["worker", "chief", "ps", "evaluator", "odd job"])
_CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(_JOBS, _TASKS | _JSON, max_size=3) | _JSON,
        "task": st.fixed_dictionaries(
            {}, optional={"type": _JOBS | _JSON, "index": st.integers(-1, 3) | _JSON}
        )
        | _JSON,
        "rpc_layer": st.sampled_from(["grpc", ""]) | _JSON,
        "session_master": _JSON,
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=_TEXT | _JSON.map(json.dumps) | _CONFIG.map(json.dumps),
    task_type=st.none() | _JOBS,
    task_id=st.none() | st.integers(0, 3),
)
def test_any_text_is_read_or_refused(text: str, task_type: str | None, task_id: int | None) -> None:
    resolver = TFConfigClusterResolver(task_type, task_id)
    asks = {
        "cluster": resolver.cluster_spec,
        "type": lambda: resolver.task_type,
        "id": lambda: resolver.task_id,
        "rpc_layer": lambda: resolver.rpc_layer,
        "master": resolver.master,
    }
    answers: dict[str, Any] = {}
    complaints: dict[str, str] = {}
    with mock.patch.dict(os.environ, {"TF_CONFIG": text}):
        for name, ask in asks.items():
            try:
                answers[name] = ask()
            except ValueError as error:
                complaints[name] = str(error)
    # The address of a task that is not in the cluster is not TF_CONFIG's fault.
    complaints.pop("master", None)
    assert all(text.startswith("TF_CONFIG") for text in complaints.values())
    if "cluster" in answers:
        cluster = answers["cluster"]
        if cluster and answers["type"] in cluster.jobs and answers["id"] is not None:
            assert cluster.task_address(answers["type"], answers["id"])


def test_a_job_may_be_named_by_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"cluster": {"0": ["w0:1", "w1:1"]}, "task": {"type": 0, "index": "1"}})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("0", 1, "w1:1")
    assert TFConfigClusterResolver(task_type=0).task_type == "0"
    assert TFConfigClusterResolver(environment="google").environment == "google"
