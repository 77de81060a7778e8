"""Steps with many all-reduces on virtual CPU devices never dead-lock, however few the threads."""

from __future__ import annotations

import pytest

from tests.conftest import RunFresh
from tests.environment import QUICK_COMPILATION

pytestmark = pytest.mark.multiprocess

# Dispatched without waiting, so that the queue of programs fills up: with one thread less than
# `find_safe_pool_size` this dead-locks, and XLA ends the process after the time set in XLA_FLAGS.
TRAIN = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from distribax import topology

WEIGHTS = 5
mesh = topology.make_replica_mesh(devices)
topology.check_cpu_pool(devices)

@jax.jit
def step(weights, batch):
    def replica(weights, x):
        for _ in range(ROUNDS):  # Each round needs the last: their all-reduces cannot be merged.
            sums = [jax.lax.psum(jnp.tanh(x @ w).T @ x, topology.REPLICA_AXIS) for w in weights]
            weights = [0.9 * w + 1e-3 * s for w, s in zip(weights, sums)]
        return weights
    return jax.shard_map(replica, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P())(
        weights, batch
    )

weights = [
    jax.device_put(jnp.full((96, 96), 0.01 * (i + 1)), NamedSharding(mesh, P()))
    for i in range(WEIGHTS)
]
batch = jax.device_put(jnp.ones((64 * len(devices), 96)), NamedSharding(mesh, P("replica")))
for _ in range(STEPS):
    weights = step(weights, batch)
assert all(bool(jnp.isfinite(w).all()) for w in weights)
print(len(devices), "devices,", STEPS * ROUNDS * WEIGHTS, "all-reduces")
"""

STUCK_AFTER_SECONDS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=10 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=20"
)


def _train(
    run: RunFresh,
    num_devices: int,
    make_devices: str,
    steps: int = 5,
    rounds: int = 1,
    **environment: str,
) -> None:
    """Trains, by default little: the program checks the pool, and other tests fill the queue."""
    program = f"{make_devices}\nSTEPS, ROUNDS = {steps}, {rounds}\n{TRAIN}"
    flags = f"{environment.pop('XLA_FLAGS', '')} {QUICK_COMPILATION} {STUCK_AFTER_SECONDS}"
    printed = run(program, XLA_FLAGS=flags, **environment)
    assert printed == f"{num_devices} devices, {steps * rounds * 5} all-reduces"


def _named(num_devices: int) -> str:
    """Returns code that makes the devices by naming them."""
    return (
        "from distribax import topology\n"
        f"devices = topology.resolve_devices([f'CPU:{{i}}' for i in range({num_devices})])"
    )


# With two devices, below in two threads.
@pytest.mark.parametrize(
    "num_devices", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 4)), 8]
)
def test_step_with_many_all_reduces_ends(num_devices: int, run_forked: RunFresh) -> None:
    _train(run_forked, num_devices, _named(num_devices), steps=40, rounds=12)


@pytest.mark.parametrize(
    "environment",
    [
        {"NPROC": "1"},
        pytest.param({"NPROC": "2"}, marks=pytest.mark.thorough),
        pytest.param({"PJRT_NPROC": "1"}, marks=pytest.mark.thorough),
        {"PJRT_NPROC": "3", "NPROC": "64"},
    ],
    ids=str,
)
def test_too_small_a_pool_set_by_the_user_is_raised(
    environment: dict[str, str], run_forked: RunFresh
) -> None:
    _train(run_forked, 2, _named(2), **environment)


IMPORT = "from distribax import topology\n"
ALL_LOCAL = IMPORT + "devices = topology.resolve_devices()\n"
CONFIGURE = "import jax\njax.config.update('jax_num_cpu_devices', 4)\n"


@pytest.mark.parametrize(
    ("make_devices", "environment"),
    [
        (ALL_LOCAL, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}),
        (ALL_LOCAL, {"JAX_NUM_CPU_DEVICES": "4"}),
        (CONFIGURE + ALL_LOCAL, {}),
        (IMPORT + CONFIGURE + ALL_LOCAL, {}),
        (CONFIGURE + IMPORT + "devices = jax.devices()\n", {"NPROC": "2"}),
    ],
    ids=["flag", "variable", "config_before_import", "config_after_import", "user_starts_jax"],
)
def test_devices_that_the_user_made_are_safe_as_well(
    make_devices: str, environment: dict[str, str], run_fresh: RunFresh
) -> None:
    _train(run_fresh, 4, make_devices, **environment)


def test_backend_started_with_too_small_a_pool_is_refused(run_fresh: RunFresh) -> None:
    printed = run_fresh(
        """
        import jax

        jax.config.update("jax_num_cpu_devices", 3)
        devices = jax.devices()

        from distribax import topology

        topology.check_cpu_pool(devices[:1])
        try:
            topology.check_cpu_pool(devices)
        except RuntimeError as error:
            print(error)
        """,
        NPROC="2",
    )
    assert "JAX has started with 3 threads for them, and 6 are needed" in printed
    assert "distribax.set_virtual_cpu_devices(3)" in printed
    assert "PJRT_NPROC=6" in printed


def test_two_threads_that_take_the_launch_lock_do_not_dead_lock(run_forked: RunFresh) -> None:
    # Without the lock, two threads that start programs need 3 threads a device instead of 2.
    training = TRAIN.replace("for _ in range(STEPS):\n    weights = step(weights, batch)\n", "")
    program = f"""{_named(2)}
STEPS, ROUNDS = 60, 12
{training}
import threading

compiled = step.lower(weights, batch).compile()
finished = []

def loop():
    mine = weights
    for _ in range(STEPS):
        with topology.launch_lock:
            mine = compiled(mine, batch)
    jax.block_until_ready(mine)
    finished.append(True)

threads = [threading.Thread(target=loop) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(finished), "threads")
"""
    printed = run_forked(program, XLA_FLAGS=f"{QUICK_COMPILATION} {STUCK_AFTER_SECONDS}")
    assert printed.endswith("2 threads")
