"""Which resolver wins, and the reason that is given."""

from __future__ import annotations

import json

import pytest

from distribax.cluster import (
    ClusterSpec,
    EnvironmentClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    resolve,
)

SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "CUDA_VISIBLE_DEVICES": "",
}
GKE = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_nothing_describes_a_cluster() -> None:
    found = resolve()
    assert found.resolver.cluster_spec() == ClusterSpec({})
    assert found.reason.startswith("a single process: neither TF_CONFIG nor")


def test_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM)
    found = resolve()
    assert isinstance(found.resolver, SlurmClusterResolver)
    assert found.reason == "SLURM_PROCID, SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS are set"

    _set(monkeypatch, GKE)
    found = resolve()
    assert isinstance(found.resolver, TPUClusterResolver)
    assert found.reason.startswith("TPU_WORKER_HOSTNAMES, TPU_WORKER_ID are set; this comes before")
    for name in GKE:
        monkeypatch.delenv(name)

    _set(monkeypatch, TORCH)
    found = resolve()
    assert isinstance(found.resolver, EnvironmentClusterResolver)
    assert found.reason.startswith(
        "MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK are set; this comes be"
    )

    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"]}}))
    found = resolve()
    assert isinstance(found.resolver, TFConfigClusterResolver)
    assert found.resolver.cluster_spec() == {"worker": ["a:1"]}
    assert found.reason == (
        "TF_CONFIG is set; this comes before MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and "
        "SLURM_PROCID, SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS, which are set too"
    )

    given = SimpleClusterResolver(ClusterSpec({}))
    found = resolve(given)
    assert found.resolver is given
    assert found.reason == "a SimpleClusterResolver was given"
    assert resolve(EnvironmentClusterResolver()).reason.startswith("an EnvironmentClusterResolver")


def test_each_resolver_detects_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    detectable = (
        TFConfigClusterResolver,
        EnvironmentClusterResolver,
        TPUClusterResolver,
        SlurmClusterResolver,
    )
    assert [resolver.detect() for resolver in detectable] == [None] * 4
    assert SimpleClusterResolver.detect() is None

    _set(monkeypatch, SLURM | TORCH | GKE | {"TF_CONFIG": "{}"})
    for resolver in detectable:
        assert type(resolver.detect()) is resolver
    assert SimpleClusterResolver.detect() is None


def test_the_variables_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    found = resolve()
    assert isinstance(found.resolver, EnvironmentClusterResolver)
    assert found.reason == "JAX_PROCESS_ID is set"


@pytest.mark.parametrize("change", ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"])
def test_one_task_of_slurm_is_a_single_process(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    _set(monkeypatch, SLURM)
    if change == "SLURM_STEP_NUM_TASKS":
        monkeypatch.setenv(change, "1")
    else:
        monkeypatch.delenv(change)
    assert resolve().reason.startswith("a single process")


def test_what_is_no_resolver() -> None:
    with pytest.raises(
        TypeError, match=r"cluster_resolver='x' is a str. Expected a ClusterResolver"
    ):
        resolve("x")  # type: ignore[arg-type]
