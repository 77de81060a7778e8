"""SlurmClusterResolver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribax.cluster import SlurmClusterResolver
from distribax.cluster.resolvers.slurm.host_lists import expand_hostlist, expand_tasks_per_node

THREE_NODES = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "t02n[13,41,43]",
}
FIVE_TASKS = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[1-3]",
}


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides this machine's GPUs, and lets a test see what the resolver sets."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _set(monkeypatch: pytest.MonkeyPatch, *variables: dict[str, str], **more: str) -> None:
    for group in (*variables, more):
        for name, value in group.items():
            monkeypatch.setenv(name, value)


def test_everything_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, THREE_NODES)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]}
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.local_task_id == 0
    assert resolver.rpc_layer == "grpc"
    assert resolver.master() == "grpc://t02n13:8888"
    assert resolver.master("worker", 2, rpc_layer="test") == "test://t02n43:8888"
    assert resolver.num_accelerators() == {"GPU": 0}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("rank", "task", "local"),
    [(0, ("ps", 0), 0), (1, ("worker", 0), 1), (3, ("worker", 2), 1), (4, ("worker", 3), 0)],
)
def test_tasks_are_dealt_out_to_jobs(
    monkeypatch: pytest.MonkeyPatch, rank: int, task: tuple[str, int], local: int
) -> None:
    _set(monkeypatch, FIVE_TASKS, SLURM_PROCID=str(rank))
    resolver = SlurmClusterResolver(jobs={"worker": 4, "ps": 1}, port_base=7000)
    assert resolver.get_task_info() == task
    assert resolver.local_task_id == local
    assert resolver.cluster_spec() == {
        "ps": ["n1:7000"],
        "worker": ["n1:7001", "n2:7000", "n2:7001", "n3:7000"],
    }


def test_an_explicit_task_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, THREE_NODES)
    resolver = SlurmClusterResolver({"ps": 1, "worker": 2}, rpc_layer=None)
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.master() == "t02n43:8888"


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, FIVE_TASKS, SLURM_STEP_TASKS_PER_NODE="nonsense")
    resolver = SlurmClusterResolver({"worker": 3}, tasks_per_node=1)
    assert resolver.cluster_spec() == {"worker": ["n1:8888", "n2:8888", "n3:8888"]}
    _set(monkeypatch, SLURM_STEP_NODELIST="nonsense[")
    resolver = SlurmClusterResolver({"worker": 3}, tasks_per_node={"b": 1, "a": 2})
    assert resolver.cluster_spec() == {"worker": ["a:8888", "a:8889", "b:8888"]}


def test_hosts_are_sorted_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM_PROCID="1")
    resolver = SlurmClusterResolver({"worker": 3}, tasks_per_node={"c10": 1, "c9": 1, "b11": 1})
    assert resolver.cluster_spec() == {"worker": ["b11:8888", "c9:8888", "c10:8888"]}
    _set(monkeypatch, THREE_NODES, SLURM_STEP_NODELIST="c[9-11]")
    assert SlurmClusterResolver().cluster_spec() == {"worker": ["c9:8888", "c10:8888", "c11:8888"]}


def test_hosts_keep_the_order_in_which_slurm_numbers_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, THREE_NODES, SLURM_STEP_NODELIST="x,node[1-2]", SLURM_NODEID="0")
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["x:8888", "node1:8888", "node2:8888"]}


@pytest.mark.parametrize(("rank", "share"), [(0, "0,1"), (1, "2,3"), (4, "0,1")])
def test_each_task_of_a_host_gets_its_gpus(
    monkeypatch: pytest.MonkeyPatch, rank: int, share: str
) -> None:
    _set(monkeypatch, FIVE_TASKS, SLURM_PROCID=str(rank), CUDA_VISIBLE_DEVICES="0,1,2,3")
    for _ in range(2):  # The second resolver divides the same GPUs, not the first one's share.
        resolver = SlurmClusterResolver()
        assert resolver.num_accelerators() == {"GPU": 2}
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == share


def test_gpus_keep_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, FIVE_TASKS, CUDA_VISIBLE_DEVICES="4, 6")
    resolver = SlurmClusterResolver(gpus_per_node=2)
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_gpus_as_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, FIVE_TASKS)
    resolver = SlurmClusterResolver(gpus_per_node=4, gpus_per_task=1)
    assert resolver.num_accelerators("worker", 3) == {"GPU": 1}
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_gpus_are_left_alone_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, FIVE_TASKS, CUDA_VISIBLE_DEVICES="0,1")
    resolver = SlurmClusterResolver(auto_set_gpu=False)
    resolver.cluster_spec()
    assert resolver.num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_gpus_that_slurm_has_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, FIVE_TASKS, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_PER_TASK="2")
    resolver = SlurmClusterResolver()
    resolver.cluster_spec()
    assert resolver.num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("hidden", ["-1", "NoDevFiles", " "])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    _set(monkeypatch, THREE_NODES, CUDA_VISIBLE_DEVICES=hidden, SLURM_GPUS_ON_NODE="4")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 0}


def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_gpus_from_slurms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, THREE_NODES, SLURM_GPUS_ON_NODE="4")
    _no_variable(monkeypatch)
    resolver = SlurmClusterResolver(auto_set_gpu=False)
    assert resolver.num_accelerators() == {"GPU": 4}


def _nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Puts a program of that name in front of all others."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_gpus_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _set(monkeypatch, THREE_NODES)
    _no_variable(monkeypatch)
    _nvidia_smi(monkeypatch, tmp_path, "echo 'GPU 0: A'; echo 'GPU 1: A'; echo other")
    assert SlurmClusterResolver(auto_set_gpu=False).num_accelerators() == {"GPU": 2}
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert SlurmClusterResolver(auto_set_gpu=False).num_accelerators() == {"GPU": 0}


def test_nvidia_smi_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _set(monkeypatch, THREE_NODES)
    _no_variable(monkeypatch)
    _nvidia_smi(monkeypatch, tmp_path, "exit 9")
    with pytest.raises(RuntimeError, match=r"nvidia-smi --list-gpus failed.*gpus_per_node"):
        SlurmClusterResolver()
    assert SlurmClusterResolver(gpus_per_node=1, gpus_per_task=1).num_accelerators() == {"GPU": 1}


@pytest.mark.parametrize("missing", sorted(THREE_NODES))
def test_a_missing_variable(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    _set(monkeypatch, {name: value for name, value in THREE_NODES.items() if name != missing})
    with pytest.raises(ValueError, match=f"{missing} is missing. Slurm sets it") as error:
        SlurmClusterResolver()
    assert isinstance(error.value, RuntimeError)  # As in TensorFlow.


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"SLURM_PROCID": "x"}, {}, "SLURM_PROCID='x': expected a whole number"),
        ({"SLURM_PROCID": "3"}, {}, "SLURM_PROCID=3: there are 3 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "-1"}, {}, "SLURM_STEP_NUM_TASKS='-1': expected a whole"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, {}, "SLURM_STEP_NUM_TASKS: asks for 4 tasks, .* 3"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, {}, "SLURM_STEP_NODELIST: Invalid host list"),
        ({"SLURM_STEP_NODELIST": "n,m,n"}, {}, "SLURM_STEP_NODELIST: a host occurs twice"),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, {}, "TASKS_PER_NODE: is for 3 hosts, .* has 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x"}, {}, "TASKS_PER_NODE: Invalid tasks-per-node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "0(x3)"}, {}, "tasks_per_node=None: there are no tasks"),
        ({"SLURM_NODEID": "2"}, {}, "SLURM_NODEID=2: .*SLURM_PROCID=0 should be on another"),
        ({"SLURM_NODEID": "9"}, {}, "SLURM_NODEID=9: .*srun --distribution=block"),
        ({}, {"jobs": {"worker": 2}}, "jobs: asks for 2 tasks, and Slurm has started 3"),
        ({}, {"jobs": {"worker": -3}}, r"jobs\['worker'\]=-3: expected a whole number"),
        ({}, {"jobs": {"": 3}}, "jobs: job name=''"),
        ({}, {"port_base": 70000}, "port_base=70000: port 70000 is not a port"),
        ({}, {"tasks_per_node": 1.5}, "tasks_per_node=1.5: expected a whole number"),
        ({}, {"tasks_per_node": {"a": None}}, r"tasks_per_node\['a'\]=None: expected"),
        ({}, {"tasks_per_node": {}}, "tasks_per_node={}: there are no tasks"),
        ({}, {"gpus_per_node": -1}, "gpus_per_node=-1: expected a whole number"),
        ({}, {"gpus_per_task": True}, "gpus_per_task=True: expected a whole number"),
        ({}, {"gpus_per_node": 1, "gpus_per_task": 2}, "gpus_per_task=2: .* need 2 GPUs, .* has 1"),
        (
            FIVE_TASKS,
            {"port_base": 65535},
            "port_base=65535: for 2 tasks on a host: port 65536 is not a port",
        ),
    ],
)
def test_malformed(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    arguments: dict[str, Any],
    message: str,
) -> None:
    _set(monkeypatch, THREE_NODES, variables)
    with pytest.raises(ValueError, match=message):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", ["n1"]),
        ("node[1-3,7],x", ["node1", "node2", "node3", "node7", "x"]),
        ("n[1-2],m5,o[3-4,6]", ["n1", "n2", "m5", "o3", "o4", "o6"]),
        ("n[0008-0010]", ["n0008", "n0009", "n0010"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists(hostlist: str, hosts: list[str]) -> None:
    assert expand_hostlist(hostlist) == hosts


@pytest.mark.parametrize(
    "hostlist",
    [
        *("", ",a", "a,,b", "a,", "n[1", "n]1", "n[a]", "n[1-2-3]", "n[]", "n[3-1]", "a b"),
        *("n[[1]]", "n[0-99999999]", "n[1-60000]m[1-60000]", "n[" + "9" * 99 + "]"),
    ],
)
def test_malformed_host_lists(hostlist: str) -> None:
    with pytest.raises(ValueError, match="Invalid host list"):
        expand_hostlist(hostlist)


def test_tasks_per_node() -> None:
    assert expand_tasks_per_node("2") == [2]
    assert expand_tasks_per_node("3(x2),2,11(x4)") == [3, 3, 2, 11, 11, 11, 11]
    for text in ("", "x", "2(x)", "2(3)", "2,", "-1"):
        with pytest.raises(ValueError, match="Invalid tasks-per-node list"):
            expand_tasks_per_node(text)


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "rack-"]), st.integers(0, 99), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    )
)
def test_expanding_undoes_compressing(groups: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first:03}-{first + more:03}]" for name, first, more in groups)
    hosts = [f"{n}{i:03}" for n, first, more in groups for i in range(first, first + more + 1)]
    assert expand_hostlist(text) == hosts


_TEXT = st.text(st.sampled_from("nm0123[]-,(x) "), max_size=10)
_VALUES = {name: st.just(value) | _TEXT for name, value in THREE_NODES.items()}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=_VALUES | {"SLURM_NODEID": _TEXT}))
def test_any_variables_are_read_or_refused(variables: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, variables):
        try:
            resolver = SlurmClusterResolver(gpus_per_node=0)
            cluster = resolver.cluster_spec()
        except ValueError:
            return
        task_type, task_id = resolver.get_task_info()
        assert task_type == "worker" and task_id is not None
        assert cluster.task_address(task_type, task_id).endswith(
            f":{8888 + resolver.local_task_id}"
        )
