"""Device names, virtual CPU devices and meshes, with the eight devices of the test process."""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import numpy as np
import pytest

import distribax as dx
from distribax import jax_private, topology

FULL = "/job:localhost/replica:0/task:0/device:CPU:{}"


@pytest.mark.parametrize(
    "name",
    [
        "CPU:3",
        "cpu:3",
        "/cpu:3",
        "/CPU:3",
        "device:CPU:3",
        "/device:CPU:3",
        "/device:cpu:3",
        " CPU:3 ",
        "/task:0/cpu:3",
        "/replica:0/task:0/device:CPU:3",
        "/job:localhost/device:CPU:3",
        "/job:localhost/replica:0/task:0/device:CPU:3",
        "/job:worker/replica:0/task:0/device:CPU:3",
    ],
)
def test_names_of_one_device(name: str) -> None:
    device = topology.resolve_device(name)
    assert device == jax.local_devices(backend="cpu")[3]
    assert topology.resolve_device(device) is device
    assert topology.device_name(device) == FULL.format(3)
    assert (
        topology.complete_device_name(name)
        == topology.complete_device_name(device)
        == FULL.format(3)
    )


def test_a_platform_alone_is_its_first_device() -> None:
    assert topology.resolve_device("CPU") == topology.resolve_device("/device:CPU:0")


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("GPU:1", "/job:localhost/replica:0/task:0/device:GPU:1"),
        ("cuda:1", "/job:localhost/replica:0/task:0/device:GPU:1"),
        ("/tpu:0", "/job:localhost/replica:0/task:0/device:TPU:0"),
        ("cpu:99", FULL.format(99)),
    ],
)
def test_canonical_name_of_a_device_that_need_not_exist(name: str, canonical: str) -> None:
    assert topology.complete_device_name(name) == canonical


@pytest.mark.parametrize("name", ["", "x", "CPU:", "CPU:x", "CPU:-1", "CPU:0:1", "NPU:0", "/job:a"])
def test_bad_name_lists_the_devices(name: str) -> None:
    with pytest.raises(ValueError, match="is not a device name") as error:
        topology.resolve_device(name)
    assert repr(name) in str(error.value)
    assert "'GPU:0'" in str(error.value)
    for index in range(8):
        assert FULL.format(index) in str(error.value)


@pytest.mark.parametrize("name", ["/job:ps/cpu:0", "/task:1/cpu:0", "/replica:1/task:0/cpu:0"])
def test_device_of_another_process(name: str) -> None:
    with pytest.raises(ValueError, match="is a device of another process") as error:
        topology.resolve_device(name)
    assert "This process is /job:localhost/replica:0/task:0" in str(error.value)
    assert "for example 'CPU:0'" in str(error.value)


def test_missing_cpu_says_how_to_make_it() -> None:
    in_use = jax.numpy.ones(3)  # Otherwise JAX would be started again, with more devices.
    with pytest.raises(ValueError, match=r"device='CPU:11' does not exist") as error:
        topology.resolve_device("CPU:11")
    assert FULL.format(7) in str(error.value)
    assert re.search(r"too late .*\d+ array\(s\) are alive \(.*\)", str(error.value))
    assert "set_virtual_cpu_devices(12)" in str(error.value)
    with pytest.raises(
        ValueError, match=r"device='CPU:9' does not .*set_virtual_cpu_devices\(15\)"
    ):
        topology.resolve_devices(["CPU:0", "CPU:9", "CPU:14"])
    del in_use


def test_missing_accelerator_names_the_devices_there_are() -> None:
    with pytest.raises(ValueError, match=r"device='TPU:64' does not exist") as error:
        topology.resolve_device("TPU:64")
    assert FULL.format(0) in str(error.value)
    assert "too late" not in str(error.value)


without_accelerators = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="needs a machine without accelerators"
)


@without_accelerators
@pytest.mark.parametrize(
    ("names", "stand_ins"),
    [
        (["GPU:0", "GPU:1"], [0, 1]),
        (["/gpu:2", "device:GPU:0"], [2, 0]),
        # A CPU that is named as well is another device.
        (["GPU:0", "CPU:0", "GPU:1"], [1, 0, 2]),
    ],
)
def test_cpus_stand_in_for_gpus_with_one_warning(names: list[str], stand_ins: list[int]) -> None:
    with pytest.warns(RuntimeWarning, match="no GPU on this machine") as warned:
        devices = topology.resolve_devices(names)
    assert devices == tuple(jax.local_devices(backend="cpu")[index] for index in stand_ins)
    assert [(str(each.filename), len(warned)) for each in warned] == [(__file__, 1)]


@without_accelerators
def test_missing_platform_says_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dx.get_soft_device_placement()
    monkeypatch.setattr("distribax.topology.device._soft_placement", True)
    dx.set_soft_device_placement(False)
    assert not dx.get_soft_device_placement()
    with pytest.raises(ValueError, match=r"JAX has no GPU here.*JAX_PLATFORMS"):
        topology.resolve_device("GPU:0")


@pytest.mark.parametrize("device", [3, None, ("CPU", 0)])
def test_device_of_wrong_type(device: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected a device name such as 'GPU:0', or a jax.Device"):
        topology.resolve_device(device)
    with pytest.raises(TypeError, match="Expected a device name"):
        topology.resolve_devices([device])
    with pytest.raises(TypeError, match="Expected a device name"):
        topology.complete_device_name(device)


@pytest.mark.parametrize("devices", [None, [], ()])
def test_no_devices_given_means_all(devices: Any) -> None:
    assert topology.resolve_devices(devices) == tuple(jax.local_devices())


def test_devices_keep_their_order_and_may_be_mixed() -> None:
    cpus = jax.local_devices(backend="cpu")
    assert topology.resolve_devices(["CPU:2", cpus[0], "/cpu:1"]) == (cpus[2], cpus[0], cpus[1])
    assert topology.resolve_devices(f"CPU:{i}" for i in range(2)) == tuple(cpus[:2])
    assert topology.resolve_devices(np.array(cpus[:2])) == tuple(cpus[:2])


@pytest.mark.parametrize("twice", [["CPU:1", "/cpu:1"], ["CPU:1", "CPU:0", "device:CPU:1"]])
def test_device_given_twice(twice: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{FULL.format(1)} twice") as error:
        topology.resolve_devices(twice)
    assert repr(twice) in str(error.value)


def test_one_device_instead_of_a_list() -> None:
    with pytest.raises(ValueError, match=r"write \['CPU:0'\]"):
        topology.resolve_devices("CPU:0")
    with pytest.raises(ValueError, match="is one device"):
        topology.resolve_devices(jax.devices()[0])  # type: ignore[arg-type]


def test_something_that_is_not_a_list_of_devices() -> None:
    with pytest.raises(TypeError, match=r"devices=2 is a int. Expected a list of device names"):
        topology.resolve_devices(2)  # type: ignore[arg-type]


def test_enough_virtual_devices_are_no_error() -> None:
    topology.set_virtual_cpu_devices(8)
    topology.set_virtual_cpu_devices(1)
    assert len(jax.local_devices(backend="cpu")) == 8


def test_more_virtual_devices_are_too_late() -> None:
    in_use = jax.numpy.ones(3)
    with pytest.raises(RuntimeError, match=r"already started with 8 CPU device") as error:
        topology.set_virtual_cpu_devices(9)
    assert "JAX_NUM_CPU_DEVICES=9" in str(error.value)
    with pytest.raises(RuntimeError, match="a JAX transformation is running"):
        jax.make_jaxpr(lambda: topology.set_virtual_cpu_devices(9))()
    del in_use


@pytest.mark.parametrize("number", [0, -1])
def test_number_of_virtual_devices_must_be_positive(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_devices={number}: expected"):
        topology.set_virtual_cpu_devices(number)


@pytest.mark.parametrize("number", [2.0, "2", True, None])
def test_number_of_virtual_devices_must_be_an_int(number: Any) -> None:
    with pytest.raises(TypeError, match="Expected an int"):
        topology.set_virtual_cpu_devices(number)


def test_mesh_has_one_axis_and_keeps_the_order() -> None:
    devices = topology.resolve_devices(["CPU:3", "CPU:1"])
    mesh = topology.make_replica_mesh(devices)
    assert mesh.axis_names == (topology.REPLICA_AXIS,) == ("replica",)
    assert tuple(mesh.devices) == devices
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)


def test_mesh_of_no_devices() -> None:
    with pytest.raises(ValueError, match="needs at least one"):
        topology.make_replica_mesh([])


def test_pool_serves_the_devices_of_the_tests() -> None:
    topology.check_cpu_pool(topology.resolve_devices())
    threads = jax_private.count_cpu_pool_threads()
    assert threads is None or threads >= topology.find_safe_pool_size(8) == 16


def test_pool_is_judged_by_the_environment_where_threads_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax_private, "count_cpu_pool_threads", lambda: None)
    monkeypatch.setenv("PJRT_NPROC", "not a number")
    monkeypatch.setenv("NPROC", "3")
    devices = topology.resolve_devices(["CPU:0", "CPU:1"])
    topology.check_cpu_pool(devices[:1])
    with pytest.raises(RuntimeError, match="started with 3 threads for them, and 4 are needed"):
        topology.check_cpu_pool(devices)
    monkeypatch.setenv("NPROC", "4")
    topology.check_cpu_pool(devices)


def test_environment_is_as_the_user_left_it() -> None:
    # The conftest has made eight devices, for which PJRT_NPROC was set and taken back.
    assert os.environ.get("PJRT_NPROC") != "16"
