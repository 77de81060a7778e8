"""ClusterSpec: TensorFlow's interface, and errors that name the field."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distribax.cluster import ClusterSpec
from distribax.cluster.spec.address import Address, make_natural_key, parse_address

DENSE = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["w0:2222", "w1:2222", "w2:2222"]}
SPARSE = {"ps": {3: "ps3:2222"}, "worker": {0: "w0:2222", 2: "w2:2222"}}


def test_lists_of_addresses() -> None:
    cluster = ClusterSpec(DENSE)
    assert cluster.jobs == ["ps", "worker"]
    assert cluster.as_dict() == DENSE
    assert cluster.num_tasks("worker") == 3
    assert cluster.task_indices("worker") == [0, 1, 2]
    assert cluster.task_address("worker", 2) == "w2:2222"
    assert cluster.job_tasks("ps") == ["ps0:2222", "ps1:2222"]


def test_only_some_indices() -> None:
    cluster = ClusterSpec(SPARSE)
    assert cluster.as_dict() == SPARSE
    assert cluster.num_tasks("worker") == 2
    assert cluster.task_indices("worker") == [0, 2]
    assert cluster.task_address("ps", 3) == "ps3:2222"
    assert cluster.job_tasks("worker") == ["w0:2222", None, "w2:2222"]
    assert cluster.job_tasks("ps") == [None, None, None, "ps3:2222"]


def test_a_dict_without_gaps_is_a_list() -> None:
    cluster = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}})
    assert cluster.as_dict() == {"worker": ["a:1", "b:1"]}
    assert cluster == ClusterSpec({"worker": ("a:1", "b:1")})


def test_indices_are_numbers_of_any_kind_or_the_text_of_one() -> None:
    cluster = ClusterSpec({"worker": {"1": "b:1"}, "ps": {np.int64(2): "c:1"}})
    assert cluster.task_indices("worker") == [1]
    assert cluster.task_address("ps", 2) == "c:1"


def test_a_copy_is_equal_and_stays_as_it_is() -> None:
    addresses = ["a:1"]
    cluster = ClusterSpec({"worker": addresses})
    copy = ClusterSpec(cluster)
    addresses.append("b:1")
    cluster.as_dict()["worker"] = []
    assert copy == cluster == ClusterSpec({"worker": ["a:1"]})
    assert pickle.loads(pickle.dumps(cluster)) == cluster


def test_equality() -> None:
    cluster = ClusterSpec(DENSE)
    assert cluster == ClusterSpec({job: dict(enumerate(tasks)) for job, tasks in DENSE.items()})
    assert cluster == DENSE
    assert cluster == {job: dict(enumerate(tasks)) for job, tasks in DENSE.items()}
    assert cluster != ClusterSpec(SPARSE)
    assert cluster != SPARSE
    assert cluster != "worker"
    assert ClusterSpec({"worker": {1: "a:1"}}) != ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(TypeError, match="unhashable"):
        hash(cluster)


def test_an_empty_cluster_is_false() -> None:
    assert not ClusterSpec({})
    assert ClusterSpec({"worker": []})
    assert ClusterSpec({"worker": []}).job_tasks("worker") == []
    assert ClusterSpec({"worker": []}).as_dict() == {"worker": {}}


def test_repr_has_the_jobs_sorted() -> None:
    cluster = ClusterSpec({"worker": ["a:1"], "ps": {1: "b:1"}})
    assert repr(cluster) == "ClusterSpec({'ps': {1: 'b:1'}, 'worker': ['a:1']})"
    assert eval(repr(cluster)) == cluster


def test_unknown_jobs_and_tasks() -> None:
    cluster = ClusterSpec(SPARSE)
    for ask in (cluster.num_tasks, cluster.task_indices, cluster.job_tasks):
        with pytest.raises(ValueError, match=r"No such job in cluster: 'chief'.*ps, worker"):
            ask("chief")
    with pytest.raises(ValueError, match="No such job in cluster: 'chief'"):
        cluster.task_address("chief", 0)
    with pytest.raises(ValueError, match=r"No task with index 1 in job 'worker'.*tasks 0, 2"):
        cluster.task_address("worker", 1)
    with pytest.raises(ValueError, match=r"jobs \(none\)"):
        ClusterSpec({}).num_tasks("worker")
    many = ClusterSpec({"worker": [f"w{i}:1" for i in range(20)]})
    with pytest.raises(ValueError, match=r"tasks 0, 1, 2, 3, 4, 5, 6, 7, \.\.\., 19\."):
        many.task_address("worker", 20)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (["a:1"], "cluster=.*is a list. Expected a dict"),
        (None, "cluster=None is a NoneType"),
        ({"worker": "a:1"}, "cluster.worker='a:1': is a str. Expected a list"),
        ({"worker": None}, "cluster.worker=None: is a NoneType"),
        ({"worker": ["a:1", 7]}, r"cluster.worker\[1\]=7: is a int. Expected an address"),
        ({"worker": {3: None}}, r"cluster.worker\[3\]=None: is a NoneType"),
        ({"worker": {1.5: "a:1"}}, "cluster.worker: index=1.5: is a float"),
        ({"worker": {True: "a:1"}}, "cluster.worker: index=True: is a bool"),
        ({7: ["a:1"]}, "cluster: job name=7: is a int"),
    ],
)
def test_wrong_types(cluster: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"": ["a:1"]}, "cluster: job name=''"),
        ({"worker": {-1: "a:1"}}, "cluster.worker: index=-1: expected an index from 0"),
        ({"worker": {10**9: "a:1"}}, "cluster.worker: index=1000000000: expected an index"),
        ({"worker": {"x": "a:1"}}, "cluster.worker: index='x': expected an index"),
        ({"worker": {"1": "a:1", 1: "b:1"}}, "cluster.worker: an index occurs twice"),
        ({"worker": ["a:1", "A:1"]}, r"worker\[1\]='A:1': cluster.worker\[0\] has this address"),
        ({"worker": ["a:1"], "p s": ["a:1"]}, r"cluster\['p s'\]\[0\]='a:1': cluster.worker\[0\]"),
        ({"worker": [""]}, r"cluster.worker\[0\]='': '' is not a host"),
        ({"worker": [":22"]}, r"cluster.worker\[0\]=':22': '' is not a host"),
        ({"worker": ["a b:1"]}, "'a b' is not a host"),
        ({"worker": ["a/b:1"]}, "'a/b' is not a host"),
        ({"worker": ["grpc://a:1"]}, "'grpc://a:1': an address has no protocol"),
        ({"worker": ["a:"]}, r"cluster.worker\[0\]='a:': port '' is not a port \(1-65535\)"),
        ({"worker": ["a:x"]}, "port 'x' is not a port"),
        ({"worker": ["a:0"]}, "port 0 is not a port"),
        ({"worker": ["a:99999"]}, r"\[0\]='a:99999': port 99999 is not a port \(1-65535\)"),
        ({"worker": ["a:" + "9" * 9999]}, "is not a port"),
        ({"worker": ["a:²"]}, "port '²' is not a port"),
        ({"worker": ["a:-1"]}, "port '-1' is not a port"),
        ({"worker": ["::1:2222"]}, "more than one ':'"),
        ({"worker": ["[::1:2222"]}, "is not an IPv6 address"),
        ({"worker": ["[a]:2222"]}, "'a' is not an IPv6 address"),
        ({"worker": ["[::1]2222"]}, "'2222' follows the host"),
    ],
)
def test_malformed_values(cluster: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSpec(cluster)


def test_hosts_of_all_kinds() -> None:
    texts = ["w0.example.com:2222", "10.0.0.1:1", "my_host:65535", "[fd00::1]:80", "host", "[::1]"]
    assert ClusterSpec({"worker": texts}).as_dict() == {"worker": texts}
    assert [str(parse_address(text, "field")) for text in texts] == texts
    assert parse_address("[fd00::1]:80", "field") == Address("fd00::1", 80)
    assert parse_address("host", "field") == Address("host", None)


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    names = ["c10", "c9", "c1", "b2-10", "b2-9", "x", "c", "c09"]
    assert sorted(names, key=make_natural_key) == [
        "b2-9",
        "b2-10",
        "c",
        "c1",
        "c09",
        "c9",
        "c10",
        "x",
    ]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
_ADDRESSES = st.text(st.sampled_from("ab1:[].-/ "), max_size=8)


@given(
    _JSON
    | st.dictionaries(
        st.sampled_from(["worker", "ps", "a b"]),
        st.lists(_ADDRESSES, max_size=3) | st.dictionaries(st.integers(-1, 4), _ADDRESSES),
    )
)
def test_anything_is_a_cluster_or_refused(cluster: Any) -> None:
    complaint = ""
    try:
        spec = ClusterSpec(cluster)
    except (TypeError, ValueError) as error:
        complaint = str(error)
    if complaint:
        assert complaint.startswith("cluster")
        return
    assert spec == cluster
    assert ClusterSpec(spec.as_dict()) == spec
    for job in spec.jobs:
        known = [a for a in spec.job_tasks(job) if a is not None]
        assert len(known) == spec.num_tasks(job)
        assert known == [spec.task_address(job, i) for i in spec.task_indices(job)]
