"""Sums between workers: of every data type, packed or not, the same to the last bit on each."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from distribax.testing import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

PROGRAM = """
import json
import numpy as np, jax, jax.numpy as jnp
import distribax as dx

dx.set_virtual_cpu_devices({devices})
strategy = dx.MultiWorkerMirroredStrategy()

def replica():
    context = dx.get_replica_context()
    number = context.replica_id_in_sync_group
    # Small ones of two types, and two that are too large for a pack.
    key = jax.random.fold_in(jax.random.key(0), number)
    values = {{
        "truth": jnp.asarray([True, False]) & (number >= 0),
        "whole": jnp.full((2, 2), number + 1, jnp.int32),
        "half": jnp.full((3,), number + 1, jnp.bfloat16),
        "scalar": jnp.asarray(number + 0.5, jnp.float32),
        "large": jax.random.normal(key, (200, 100)),
        "larger": jnp.full((30_000,), number + 1.0),
    }}
    own = jax.tree.map(lambda value: value.astype(jnp.float32), values)
    sums = {{
        "packed": context.all_reduce("SUM", values),
        "limited": context.all_reduce("SUM", values, dx.CommunicationOptions(bytes_per_pack=16)),
    }}
    return own, sums, context.all_reduce("MEAN", values["whole"])

def told(value):
    return np.asarray(strategy.experimental_local_results(value)[0]).astype(np.float32).tolist()

results = {{}}
for name, run in (("eager", strategy.run), ("compiled", dx.function(lambda f: strategy.run(f)))):
    own, sums, mean = run(replica)
    gathered = strategy.gather(own["large"], axis=0)
    results[name] = {{
        "sums": jax.tree.map(told, sums, is_leaf=lambda x: isinstance(x, dx.DistributedValues)),
        "mean": told(mean),
        "parts": np.asarray(gathered).reshape(-1, 200, 100).tolist(),
    }}
print(json.dumps(results))
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_sums_between_workers(devices: int) -> None:
    workers = run_workers(PROGRAM.format(devices=devices), 2, timeout=150)
    for worker in workers:
        assert worker.returncode == 0, f"worker {worker.worker_id}:\n{worker.stderr[-3000:]}"
    first, second = (json.loads(worker.stdout.strip().splitlines()[-1]) for worker in workers)
    # Mirrored variables stay the same only if the sums are, to the last bit.
    assert first == second
    total = devices * (2 * devices + 1)
    expected: dict[str, Any] = {
        "truth": [2 * devices, 0],
        "whole": [[total] * 2] * 2,
        "half": [total] * 3,
        "scalar": sum(number + 0.5 for number in range(2 * devices)),
        "larger": [total] * 30_000,
    }
    for result in first.values():
        assert result["mean"] == [[total / (2 * devices)] * 2] * 2
        for sums in result["sums"].values():
            large = sums.pop("large")
            assert sums == expected
            np.testing.assert_allclose(large, np.sum(result["parts"], axis=0), atol=1e-5)
