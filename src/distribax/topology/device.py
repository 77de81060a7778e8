"""Device names: TensorFlow's names for JAX devices."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import jax

from distribax import jax_private
from distribax.topology import cpu_pool, restart
from distribax.topology.virtual import (
    count_cpu_devices,
    count_used_cpu_devices,
    name_cpu_devices,
)

_PLATFORMS: Final = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
_KNOWN: Final = "|".join(_PLATFORMS)
_LOCAL_JOBS: Final = ("localhost", "worker")
_NAME: Final = re.compile(
    r"(?:/job:(?P<job>[a-z_]\w*))?"
    r"(?:/replica:(?P<replica>\d+))?"
    r"(?:/task:(?P<task>\d+))?"
    rf"/?(?:device:)?(?P<platform>{_KNOWN})(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_soft_placement = True


def set_soft_device_placement(enabled: bool) -> None:
    """Says whether CPU devices stand in for named GPUs on a machine that has none.

    They do by default, with a warning, so that a program for GPUs can be tried anywhere.

    Args:
        enabled: False makes a name such as "GPU:0" an error where there are no GPUs.
    """
    global _soft_placement
    _soft_placement = bool(enabled)


def get_soft_device_placement() -> bool:
    """Tells whether CPU devices stand in for GPUs where there are none.

    Returns:
        What `set_soft_device_placement` has set; True by default.
    """
    return _soft_placement


@dataclass(frozen=True)
class _DeviceSpec:
    """The parts of a device name."""

    platform: str
    index: int
    task: int

    @property
    def name(self) -> str:
        return (
            f"/job:localhost/replica:0/task:{self.task}/device:{self.platform.upper()}:{self.index}"
        )


def _parse(name: str) -> _DeviceSpec:
    """Returns the parts of a device name, which must be one of this process."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise ValueError(
            f"device={name!r} is not a device name. Expected a platform and an index, such as "
            "'GPU:0', '/gpu:0', 'CPU:1' or '/job:localhost/replica:0/task:0/device:GPU:0'."
            + _list_devices()
        )
    here = jax_private.get_process_id()
    task = here if match["task"] is None else int(match["task"])
    job = (match["job"] or "localhost").lower()
    if job not in _LOCAL_JOBS or task != here or int(match["replica"] or 0) != 0:
        raise ValueError(
            f"device={name!r} is a device of another process. This process is "
            f"/job:localhost/replica:0/task:{here}, and a strategy is given the devices of its own "
            "process; leave the job, replica and task out, for example "
            f"'{match['platform'].upper()}:{match['index'] or 0}'." + _list_devices()
        )
    return _DeviceSpec(_PLATFORMS[match["platform"].lower()], int(match["index"] or 0), task)


def _find_devices(platform: str | None) -> list[jax.Device]:
    """Returns the devices of this process on a platform, or on JAX's default platform."""
    if not jax_private.have_backends_started():
        cpu_pool.size_pool(count_cpu_devices())
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX has no such platform.
        if platform is None:
            raise  # JAX could not start at all.
        return []
    finally:
        cpu_pool.restore_environment()


def _list_devices() -> str:
    """Returns a sentence that names the devices of this process, without starting the backend.

    An error about a name must not start it: after that, no CPU devices could be created, and a
    program that handles the error would fail, too.
    """
    if jax_private.have_backends_started():
        platforms = dict.fromkeys(_PLATFORMS.values())
        names = [device_name(d) for platform in platforms for d in _find_devices(platform)]
        more = ""
    else:
        here = jax_private.get_process_id()
        names = [_DeviceSpec("cpu", i, here).name for i in range(count_cpu_devices())]
        more = ", and the accelerators that JAX finds when it starts"
    return f" Devices of this process: {', '.join(names)}{more}."


def _make_missing_error(spec: _DeviceSpec, device: str, wanted: int) -> ValueError:
    hint = ""
    if spec.platform == "cpu":
        obstacle = restart.explain_obstacle()
        hint = (
            f" It is too late to create more CPU devices: JAX has started, and {obstacle}. Call "
            f"distribax.set_virtual_cpu_devices({wanted}) before the first JAX computation, at the "
            "top of the program."
        )
    elif not _find_devices(spec.platform):
        hint = (
            f" JAX has no {spec.platform.upper()} here: is its plug-in installed (for example "
            "pip install 'jax[cuda13]'), and does JAX_PLATFORMS allow it?"
        )
    return ValueError(f"device={device!r} does not exist.{_list_devices()}{hint}")


def _look_up(names: Sequence[str]) -> list[jax.Device]:
    """Returns the devices with some names; those that a program uses together."""
    specs = [_parse(name) for name in names]
    if _soft_placement:
        specs = _replace_gpus(specs)
    wanted = max((spec.index + 1 for spec in specs if spec.platform == "cpu"), default=0)
    if wanted:
        name_cpu_devices(wanted)
    found = []
    for name, spec in zip(names, specs, strict=True):
        devices = _find_devices(spec.platform)
        if spec.index >= len(devices):
            raise _make_missing_error(spec, name, wanted)
        found.append(devices[spec.index])
    return found


def _replace_gpus(specs: list[_DeviceSpec]) -> list[_DeviceSpec]:
    """Returns the specs with CPU devices in the place of GPUs, if JAX has no GPUs."""
    gpus = sorted({spec.index for spec in specs if spec.platform == "gpu"})
    if not gpus:
        return specs
    # GPU:i is CPU:i; CPUs that are named as well keep their numbers.
    taken = {spec.index for spec in specs if spec.platform == "cpu"}
    stand_ins: dict[int, int] = {}
    for index in gpus:
        stand_in = index
        while stand_in in taken:
            stand_in += 1
        taken.add(stand_in)
        stand_ins[index] = stand_in
    if not jax_private.have_backends_started():
        # Before JAX starts, nobody knows whether there are GPUs, and then it would be too late.
        name_cpu_devices(max(taken) + 1)
    if _find_devices("gpu"):
        return specs
    warnings.warn(
        "There is no GPU on this machine: "
        + ", ".join(f"CPU:{cpu} is used for GPU:{gpu}" for gpu, cpu in stand_ins.items())
        + ". To have an error instead, call distribax.set_soft_device_placement(False).",
        RuntimeWarning,
        stacklevel=_count_own_frames(),
    )
    return [
        replace(spec, platform="cpu", index=stand_ins[spec.index])
        if spec.platform == "gpu"
        else spec
        for spec in specs
    ]


def _count_own_frames() -> int:
    """Returns the `stacklevel` with which a warning shows the user's line."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, count = frame.f_back, count + 1
    return count


def _check_type(device: object) -> str | jax.Device:
    if isinstance(device, (str, jax.Device)):
        return device
    raise TypeError(
        f"device={device!r} is a {type(device).__name__}. Expected a device name such as 'GPU:0', "
        "or a jax.Device."
    )


def resolve_device(device: str | jax.Device) -> jax.Device:
    """Returns the JAX device with that name; an index counts this process' devices of a platform.

    CPU devices that do not exist yet are created, as long as that is possible; where there are no
    GPUs, they stand in for those.

    Args:
        device: A name, such as "GPU:0", or a device, which is returned.

    Raises:
        TypeError: `device` is neither.
        ValueError: There is no such device, or it belongs to another process.

    >>> resolve_device("/device:CPU:0") == resolve_device("cpu:0") == resolve_device("CPU")
    True
    """
    device = _check_type(device)
    if isinstance(device, jax.Device):
        return device
    return _look_up([device])[0]


def resolve_devices(devices: Iterable[str | jax.Device] | None = None) -> tuple[jax.Device, ...]:
    """Returns the JAX devices with those names; by default all accelerators, or else all CPUs.

    Args:
        devices: Names and devices.

    Raises:
        TypeError: `devices` is not a list of names and devices.
        ValueError: A device does not exist, is named twice, or belongs to another process.

    >>> resolve_devices(["CPU:0"])
    (CpuDevice(id=0),)
    """
    if isinstance(devices, (str, jax.Device)):
        name = repr(devices) if isinstance(devices, str) else "the device"
        raise ValueError(
            f"devices={devices!r} is one device. Expected a list of devices: write [{name}]."
        )
    if devices is not None and not isinstance(devices, Iterable):
        raise TypeError(
            f"devices={devices!r} is a {type(devices).__name__}. Expected a list of device names "
            "such as ['GPU:0', 'GPU:1'], or of jax.Devices, or None for all."
        )
    given = [_check_type(device) for device in (() if devices is None else devices)]
    if not given:
        # JAX's default platform is the fastest one, or the first in JAX_PLATFORMS.
        found = _find_devices(None)
        return tuple(found[: count_used_cpu_devices()] if found[0].platform == "cpu" else found)
    named = iter(_look_up([device for device in given if isinstance(device, str)]))
    resolved: list[jax.Device] = []
    for device in given:
        found_device = next(named) if isinstance(device, str) else device
        if found_device in resolved:
            raise ValueError(
                f"devices={given!r} names {device_name(found_device)} twice. Give each "
                "device once; for several replicas on one processor create virtual devices with "
                "distribax.set_virtual_cpu_devices(n) and name CPU:0, CPU:1 and so on."
            )
        resolved.append(found_device)
    return tuple(resolved)


def device_name(device: jax.Device) -> str:
    """Returns the full name of a device, in TensorFlow's form.

    >>> device_name(jax.local_devices(backend="cpu")[0])
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    platform = _PLATFORMS.get(device.platform, device.platform)
    if device.process_index == jax_private.get_process_id():
        index = _find_devices(platform).index(device)
    else:
        peers = [d for d in jax.devices(platform) if d.process_index == device.process_index]
        index = peers.index(device)
    return _DeviceSpec(platform, index, device.process_index).name


def complete_device_name(device: str | jax.Device) -> str:
    """Returns the full form of a device name; the device need not exist.

    >>> complete_device_name("gpu:1")
    '/job:localhost/replica:0/task:0/device:GPU:1'
    """
    device = _check_type(device)
    if isinstance(device, str):
        return _parse(device).name
    return device_name(device)
