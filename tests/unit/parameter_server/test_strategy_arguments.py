"""What a `ParameterServerStrategy` cannot be made with is told before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

import distribax as dx


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, r"num_workers=0\. Expected a number of at least 1"),
        ({"num_workers": True}, r"num_workers=True\. Expected a number of at least 1"),
        ({"num_ps": 1.5}, r"num_ps=1\.5\. Expected a number of at least 1"),
        ({"snapshot_interval": 0}, r"snapshot_interval=0\. Expected .* or None for no snapshots"),
        ({"snapshot_interval": "10"}, r"snapshot_interval='10'\. Expected a positive number"),
        ({"snapshot_interval": True}, r"snapshot_interval=True\. Expected a positive number"),
        ({"server_timeout": -1}, r"server_timeout=-1\. Expected a positive number of seconds\."),
        ({"server_timeout": None}, r"server_timeout=None\. Expected a positive number"),
        ({"server_timeout": float("nan")}, r"server_timeout=nan\. Expected a positive number"),
        (
            {"round_timeout": 0, "synchronous": True},
            r"round_timeout=0\. .* wait for all",
        ),
        ({"round_timeout": 5.0}, r"round_timeout=5\.0 without synchronous=True"),
    ],
)
def test_wrong_numbers(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"ParameterServerStrategy: {message}"):
        dx.ParameterServerStrategy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster_resolver": 2}, r"cluster_resolver=2\. Expected a resolver.*num_workers=2"),
        ({"cluster_resolver": {"worker": ["a:1"]}}, r"cluster_resolver=\{'worker'.*a resolver"),
        ({"address": 6379}, r"address=6379\. Expected the address of a Ray cluster"),
        ({"variable_partitioner": 2}, r"variable_partitioner=2 is not a partitioner"),
        (
            {"variable_partitioner": dx.partitioners.MinSizePartitioner},
            r"variable_partitioner=<class .* is not a partitioner",
        ),
        ({"snapshot_dir": 5}, r"snapshot_dir=5\. Expected the path"),
        ({"synchronous": "yes"}, r"synchronous='yes'\. Expected True or False"),
    ],
)
def test_wrong_types(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"ParameterServerStrategy: {message}"):
        dx.ParameterServerStrategy(**arguments)


def test_a_resolver_and_numbers() -> None:
    spec = dx.ClusterSpec({"worker": ["localhost:1"], "ps": ["localhost:2"]})
    resolver = dx.cluster_resolver.SimpleClusterResolver(spec)
    for arguments in ({"num_workers": 2}, {"num_ps": 1}, {"address": "auto"}):
        with pytest.raises(ValueError, match="drop num_workers, num_ps and address"):
            dx.ParameterServerStrategy(resolver, **arguments)  # type: ignore[arg-type]


def test_unknown_jobs_are_not_waited_for() -> None:
    jobs = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    resolver = dx.cluster_resolver.SimpleClusterResolver
    with pytest.raises(ValueError, match=r"the cluster has the job 'wroker'\. Expected only"):
        dx.ParameterServerStrategy(resolver(dx.ClusterSpec(jobs | {"wroker": ["127.0.0.1:3"]})))
    with pytest.raises(ValueError, match=r"task_type='boss' of cluster_resolver is no job"):
        dx.ParameterServerStrategy(resolver(dx.ClusterSpec(jobs), task_type="boss", task_id=0))
