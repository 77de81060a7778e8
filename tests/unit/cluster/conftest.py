"""An environment in which nothing describes a cluster, for every test here."""

from __future__ import annotations

import os

import pytest

_DESCRIBING = (
    "CUDA_VISIBLE_DEVICES",
    "GCE_METADATA_HOST",
    "KUBECONFIG",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "TF_CONFIG",
    "TORCHELASTIC_USE_AGENT_STORE",
    "WORLD_SIZE",
)
_PREFIXES = ("SLURM_", "JAX_COORDINATOR", "JAX_PROCESS", "TPU_WORKER_", "MEGASCALE_")


@pytest.fixture(autouse=True)
def _no_cluster_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the variables away that a test run inside a cluster would inherit."""
    for name in os.environ:
        if name in _DESCRIBING or name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    # The tests' servers are on this machine: no proxy leads there.
    monkeypatch.setenv("no_proxy", "*")
