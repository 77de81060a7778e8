"""Sums between workers: of every data type, packed or not, the same to the last bit on each."""

from __future__ import annotations

import json

import pytest

from tests.multiprocess.workers import run_workers

pytestmark = pytest.mark.multiprocess

PROGRAM = """
import hashlib, json
import numpy as np, jax, jax.numpy as jnp
import distribax as dx

dx.set_virtual_cpu_devices({devices})
strategy = dx.MultiWorkerMirroredStrategy()

def replica():
    context = dx.get_replica_context()
    number = context.replica_id_in_sync_group
    # Small ones of several types, one too large for a pack, and one too large for an exchange.
    key = jax.random.fold_in(jax.random.key(0), number)
    values = {{
        "truth": jnp.asarray([True, False]) & (number >= 0),
        "whole": jnp.full((2, 2), number + 1, jnp.int32),
        "half": jnp.full((3,), number + 1, jnp.bfloat16),
        "scalar": jnp.asarray(number + 0.5, jnp.float32),
        "large": jax.random.normal(key, (200, 100)),
        "larger": jnp.full((600_000,), number + 1.0),
        "largest": jnp.full((1_200_000,), number + 1.0),
    }}
    own = jax.tree.map(lambda value: value.astype(jnp.float32), values)
    sums = {{
        "packed": context.all_reduce("SUM", values),
        "limited": context.all_reduce("SUM", values, dx.CommunicationOptions(bytes_per_pack=16)),
    }}
    return own, sums, context.all_reduce("MEAN", values["whole"])

def local(value):
    return np.asarray(strategy.experimental_local_results(value)[0])

def told(value):
    return np.unique(local(value).astype(np.float32)).tolist()

results = {{}}
for name, run in (("eager", strategy.run), ("compiled", dx.function(lambda f: strategy.run(f)))):
    own, sums, mean = run(replica)
    parts = np.asarray(strategy.gather(own["large"], axis=0)).reshape(-1, 200, 100)
    results[name] = {{"mean": told(mean)}}
    for way, values in sums.items():
        large = local(values.pop("large"))
        results[name][way] = {{key: told(value) for key, value in values.items()}}
        results[name][way + " error"] = float(abs(large - parts.sum(axis=0)).max())
        results[name][way + " digest"] = hashlib.sha256(large.tobytes()).hexdigest()
print(json.dumps(results))
"""


# With two, sums inside a worker come before those between workers.
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_sums_between_workers(devices: int) -> None:
    workers = run_workers(PROGRAM.format(devices=devices), 2)
    for worker in workers:
        assert worker.returncode == 0, f"worker {worker.worker_id}:\n{worker.stderr[-3000:]}"
    first, second = (json.loads(worker.stdout.strip().splitlines()[-1]) for worker in workers)
    # Mirrored variables stay the same only if the sums are, to the last bit.
    assert first == second
    count = 2 * devices
    total = count * (count + 1) / 2
    expected = {
        "truth": [0, count],
        "whole": [total],
        "half": [total],
        "scalar": [total - count / 2],
        "larger": [total],
        "largest": [total],
    }
    for result in first.values():
        assert result["mean"] == [total / count]
        for way in ("packed", "limited"):
            assert result[way] == expected
            assert result[f"{way} error"] < 1e-5
