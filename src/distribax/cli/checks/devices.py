"""The devices of this machine, and the threads that run their programs."""

from __future__ import annotations

from collections.abc import Iterator

from distribax.cli.findings import Finding
from distribax.topology import check_cpu_pool, device_name, find_safe_pool_size, resolve_devices


def check_devices() -> Iterator[Finding]:
    """Yields the devices that JAX finds, and whether its thread pool is large enough for them."""
    try:
        devices = resolve_devices()
    except Exception as error:  # JAX and its plug-ins raise any exception when they start.
        fix = "check JAX_PLATFORMS, JAX_NUM_CPU_DEVICES, XLA_FLAGS, and the accelerator's driver"
        yield Finding("devices", "JAX", f"does not start: {error}", fix, is_problem=True)
        return
    names = ", ".join(device_name(device).rpartition("device:")[2] for device in devices)
    yield Finding("devices", devices[0].platform, f"{len(devices)}: {names}")
    on_cpu = sum(device.platform == "cpu" for device in devices)
    if not on_cpu:
        return
    rule = f"{on_cpu} CPU devices need {find_safe_pool_size(on_cpu)} threads"
    try:
        check_cpu_pool(devices)
    except RuntimeError as error:
        fix = "unset PJRT_NPROC and NPROC, or set them to at least that number"
        yield Finding("devices", "thread pool", f"{rule}: {error}", fix, is_problem=True)
    else:
        yield Finding("devices", "thread pool", f"large enough: {rule}")
