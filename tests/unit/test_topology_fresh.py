"""What topology does before JAX has started, each case in a process of its own."""

from __future__ import annotations

import pytest

from tests.conftest import RunFresh

pytestmark = pytest.mark.multiprocess

START = """
import os
import jax
from distribax import jax_private, topology

def show():
    started = jax_private.have_backends_started()
    count = len(jax.devices("cpu"))
    topology.resolve_device("CPU:0")
    print(started, count, jax_private.count_cpu_pool_threads(), os.environ.get("PJRT_NPROC"))
"""


def test_import_does_not_start_the_backend(run_fresh: RunFresh) -> None:
    printed = run_fresh(START + "print(jax_private.have_backends_started())")
    assert printed == "False"


def test_naming_cpus_makes_them(run_forked: RunFresh) -> None:
    printed = run_forked(
        START + "print(topology.resolve_devices(['CPU:0', '/device:CPU:2']))\nshow()", NPROC="1"
    )
    assert printed == "(CpuDevice(id=0), CpuDevice(id=2))\nTrue 3 6 None"


def test_naming_one_cpu_makes_it(run_forked: RunFresh) -> None:
    printed = run_forked(START + "print(topology.resolve_device('CPU:1'))\nshow()", NPROC="1")
    assert printed.endswith("True 2 4 None")


def test_virtual_devices_grow_and_never_shrink(run_forked: RunFresh) -> None:
    program = START + (
        "for n in (2, 5, 3):\n    topology.set_virtual_cpu_devices(n)\n"
        "print(os.environ['PJRT_NPROC'])\nshow()\n"
    )
    assert run_forked(program, NPROC="1") == "10\nFalse 5 10 None"


@pytest.mark.parametrize(
    "environment",
    [
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        {"JAX_NUM_CPU_DEVICES": "4"},
    ],
    ids=["flag", "variable"],
)
def test_devices_asked_for_elsewhere_stay(environment: dict[str, str], run_fresh: RunFresh) -> None:
    program = START + "topology.set_virtual_cpu_devices(2)\nshow()"
    assert run_fresh(program, NPROC="1", **environment) == "False 4 8 None"
    program = START + "topology.set_virtual_cpu_devices(6)\nshow()"
    assert run_fresh(program, NPROC="1", **environment) == "False 6 12 None"


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({"NPROC": "1"}, 1), ({"PJRT_NPROC": "1"}, 1), ({"NPROC": "3"}, 3)],
    ids=str,
)
def test_any_pool_size_is_respected_on_one_device(
    environment: dict[str, str], threads: int, run_forked: RunFresh
) -> None:
    variable = environment.get("PJRT_NPROC")
    assert run_forked(START + "show()", **environment) == f"False 1 {threads} {variable}"


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({"NPROC": "9"}, 9), ({"PJRT_NPROC": "9", "NPROC": "1"}, 9), ({"PJRT_NPROC": "2"}, 4)],
    ids=str,
)
def test_large_enough_a_pool_is_left_alone(
    environment: dict[str, str], threads: int, run_fresh: RunFresh
) -> None:
    program = START + "topology.set_virtual_cpu_devices(2)\nshow()"
    variable = environment.get("PJRT_NPROC")
    assert run_fresh(program, **environment) == f"False 2 {threads} {variable}"


def test_a_value_that_somebody_else_set_meanwhile_stays(run_forked: RunFresh) -> None:
    program = START + "topology.set_virtual_cpu_devices(2)\nos.environ['PJRT_NPROC'] = '7'\nshow()"
    assert run_forked(program, NPROC="1") == "False 2 7 7"


def test_a_bad_name_does_not_start_the_backend(run_forked: RunFresh) -> None:
    printed = run_forked(
        START
        + """
try:
    topology.resolve_devices(["CPU:0", "CPUU:1"])
except ValueError as error:
    print(error)
print(jax_private.have_backends_started())
print(topology.resolve_devices(["CPU:0", "CPU:1"]))
"""
    )
    message, started, devices = printed.splitlines()
    assert "device='CPUU:1' is not a device name" in message
    assert "Devices of this process: /job:localhost/replica:0/task:0/device:CPU:0" in message
    assert started == "False"
    assert devices == "(CpuDevice(id=0), CpuDevice(id=1))"


STRATEGIES = """
import jax
import distribax as dx

own = lambda x: x * (1.0 + 0.0 * dx.get_replica_context().replica_id_in_sync_group)
total = dx.function(
    lambda strategy, x: strategy.reduce("SUM", strategy.run(own, args=(x,)), axis=None)
)

def train(strategy):
    with strategy.scope():
        v = dx.Variable(1.0)
    double = dx.function(lambda: v * 2)
    return float(total(strategy, float(double())))
"""


def test_one_device_first_and_more_later(run_forked: RunFresh) -> None:
    program = STRATEGIES + (
        "one = dx.OneDeviceStrategy('CPU:0')\n"
        "with one.scope():\n    kept = dx.Variable(1.0)\n"
        # What nobody has named yet is nobody's.
        "print(dx.MirroredStrategy().num_replicas_in_sync)\n"
        "two = dx.MirroredStrategy(['CPU:0', 'CPU:1'])\n"
        "print(train(one), train(two), float(kept), dx.MirroredStrategy().num_replicas_in_sync)\n"
    )
    assert run_forked(program, NPROC="4") == "1\n2.0 4.0 1.0 2"


def test_jax_is_started_again_where_no_array_is_alive(run_forked: RunFresh) -> None:
    program = STRATEGIES + (
        "jax.numpy.ones(3)\n"
        "one = dx.OneDeviceStrategy('CPU:0')\n"
        "ops = dx.ReductionToOneDevice('CPU:0')\n"
        "dataset = dx.data.Dataset.range(4).batch(4)\n"
        "distributed = one.experimental_distribute_dataset(dataset)\n"
        "print(train(one))\n"
        "two = dx.MirroredStrategy(['CPU:0', 'CPU:1'], cross_device_ops=ops)\n"
        "print(train(two), len(jax.devices()))\n"
        "dx.set_virtual_cpu_devices(3)\n"
        "three = dx.MirroredStrategy()\n"
        "print(train(one), train(two), train(three), len(jax.devices()))\n"
        "print([batch.tolist() for batch in distributed])\n"
    )
    assert run_forked(program, NPROC="1").splitlines() == [
        "2.0",
        "4.0 2",
        "2.0 4.0 6.0 3",
        "[[0, 1, 2, 3]]",
    ]


def test_gpus_are_cpus_where_there_are_none(run_fresh: RunFresh) -> None:
    program = STRATEGIES + "print(train(dx.MirroredStrategy(['GPU:0', 'GPU:1', 'GPU:2'])))\n"
    assert run_fresh(program, NPROC="1", PYTHONWARNINGS="ignore") == "6.0"


def test_without_a_cpu_platform_nothing_can_be_made(run_forked: RunFresh) -> None:
    printed = run_forked(
        START
        + """
jax.devices()
def none(backend=None):
    raise RuntimeError("Unknown backend")
jax.local_devices = none
try:
    topology.set_virtual_cpu_devices(1)
except RuntimeError as error:
    print(error)
"""
    )
    assert "already started with 0 CPU device(s)" in printed
