"""EnvironmentClusterResolver: the variables of torchrun and of JAX programs."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribax.cluster import ClusterSpec, EnvironmentClusterResolver

TORCH = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "host9:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
}


def _set(monkeypatch: pytest.MonkeyPatch, *variables: dict[str, str], **more: str) -> None:
    for group in (*variables, more):
        for name, value in group.items():
            monkeypatch.setenv(name, value)


def test_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, TORCH, LOCAL_RANK="0")
    resolver = EnvironmentClusterResolver(rpc_layer="grpc")
    assert resolver.cluster_spec() == {
        "worker": ["host0:29500", "rank-1.invalid:29500", "rank-2.invalid:29500"]
    }
    assert (resolver.task_type, resolver.task_id, resolver.local_task_id) == ("worker", 1, 0)
    assert resolver.master("worker", 0) == "grpc://host0:29500"


def test_the_variables_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, JAX)
    resolver = EnvironmentClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["host9:1234", "rank-1.invalid:1234"]}
    assert (resolver.task_type, resolver.task_id, resolver.local_task_id) == ("worker", 0, None)


def test_jax_wins_over_torch_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, TORCH, JAX_COORDINATOR_ADDRESS="host9:1234")
    resolver = EnvironmentClusterResolver()
    assert resolver.cluster_spec().job_tasks("worker")[0] == "host9:1234"
    assert (resolver.cluster_spec().num_tasks("worker"), resolver.task_id) == (3, 1)
    _set(monkeypatch, JAX)
    assert (resolver.cluster_spec().num_tasks("worker"), resolver.task_id) == (2, 0)


def test_they_are_read_at_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = EnvironmentClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    _set(monkeypatch, TORCH)
    assert resolver.task_id == 1
    _set(monkeypatch, RANK="2")
    assert resolver.task_id == 2


def test_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, JAX, JAX_PROCESS_ID="1", LOCAL_RANK="1")
    resolver = EnvironmentClusterResolver("[::1]:99", num_processes=4, process_id=0)
    assert resolver.task_id == 0
    assert resolver.cluster_spec().num_tasks("worker") == 4
    assert resolver.cluster_spec().task_address("worker", 0) == "[::1]:99"
    resolver.task_id = 3
    assert resolver.task_id == 3


def test_one_of_torchs_names_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, WORLD_SIZE="8", MASTER_ADDR="host0")
    assert not EnvironmentClusterResolver().cluster_spec()


def test_a_single_process_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK="0", WORLD_SIZE="1")
    assert EnvironmentClusterResolver().cluster_spec() == {"worker": ["localhost"]}


@pytest.mark.parametrize(
    ("host", "port", "agent", "address"),
    [
        ("::1", "29500", "False", "[::1]:29500"),
        ("[::1]", " 29500 ", "False", "[::1]:29500"),
        # torchrun's own store is at the port then.
        ("host0", "29500", "True", "host0:29501"),
        ("host0", "65535", "True", "host0:65534"),
    ],
)
def test_the_address_of_process_0(
    monkeypatch: pytest.MonkeyPatch, host: str, port: str, agent: str, address: str
) -> None:
    _set(monkeypatch, TORCH, MASTER_ADDR=host, MASTER_PORT=port)
    _set(monkeypatch, TORCHELASTIC_USE_AGENT_STORE=agent)
    assert EnvironmentClusterResolver().cluster_spec().task_address("worker", 0) == address


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCH | {"RANK": "3"}, "RANK=3: there are 3 processes, with the numbers 0 to 2"),
        (TORCH | {"RANK": "one"}, "RANK='one': expected a whole number"),
        (TORCH | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0': expected a whole number, at least 1"),
        (TORCH | {"WORLD_SIZE": "9999999"}, "WORLD_SIZE=9999999: expected at most 1000000"),
        (TORCH | {"MASTER_PORT": "x"}, "MASTER_PORT='x': port 'x' is not a port"),
        (TORCH | {"MASTER_PORT": "0"}, "MASTER_PORT='0': port 0 is not a port"),
        (TORCH | {"MASTER_ADDR": "a b"}, "MASTER_ADDR='a b': 'a b' is not a host"),
        (TORCH | {"MASTER_ADDR": "a:1"}, "MASTER_ADDR='a:1': has a port"),
        (TORCH | {"MASTER_ADDR": "a:1:2"}, "MASTER_ADDR=.*is not an IPv6 address"),
        (JAX | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2: there are 2 processes"),
        (JAX | {"JAX_NUM_PROCESSES": "1.5"}, "JAX_NUM_PROCESSES='1.5': expected a whole"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "a"}, "JAX_COORDINATOR_ADDRESS='a': the port is miss"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "a:0"}, "JAX_COORDINATOR_ADDRESS='a:0': port 0"),
    ],
)
def test_malformed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    _set(monkeypatch, variables)
    with pytest.raises(ValueError, match=message):
        EnvironmentClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    ("variables", "missing", "message"),
    [
        (JAX, "JAX_NUM_PROCESSES", r"JAX_NUM_PROCESSES \(or WORLD_SIZE\) is missing"),
        (JAX, "JAX_PROCESS_ID", r"JAX_PROCESS_ID \(or RANK\) is missing"),
        (JAX, "JAX_COORDINATOR_ADDRESS", r"ADDRESS \(MASTER_ADDR is missing too\) is missing"),
        (TORCH, "MASTER_ADDR", r"ADDRESS \(MASTER_ADDR is missing too\) is missing"),
        (TORCH, "MASTER_PORT", r"ADDRESS \(MASTER_PORT is missing too\) is missing"),
    ],
)
def test_missing(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], missing: str, message: str
) -> None:
    _set(monkeypatch, {name: value for name, value in variables.items() if name != missing})
    with pytest.raises(ValueError, match=message):
        EnvironmentClusterResolver().cluster_spec()


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="coordinator_address=3 is a int"):
        EnvironmentClusterResolver(3)  # type: ignore[arg-type]
    for number in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"num_processes={number!r}: expected a whole number"):
            EnvironmentClusterResolver(num_processes=number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="process_id=2: there are 2 processes"):
        EnvironmentClusterResolver("a:1", num_processes=2, process_id=2).cluster_spec()


_TEXT = st.text(st.sampled_from("host019:.[] -"), max_size=6)
_NAMES: dict[str, Any] = {k: st.just(v) | _TEXT for k, v in (TORCH | JAX).items()}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=_NAMES))
def test_any_variables_are_read_or_refused(variables: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, variables):
        resolver = EnvironmentClusterResolver()
        complaint = ""
        try:
            cluster = resolver.cluster_spec()
        except ValueError as error:
            complaint = str(error)
        if complaint:
            assert any(name in complaint for name in _NAMES)
        elif cluster:
            assert resolver.task_id in cluster.task_indices("worker")
