"""`distribax doctor`: examines this machine and says what to fix before a program fails."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Final

from distribax.cli.findings import Finding, Verdict, is_healthy
from distribax.cli.peer_checks import check_peers
from distribax.cli.version_ranges import Requirement, is_in_range, parse_requirement
from distribax.cluster import ClusterResolver, resolve, training_tasks
from distribax.cluster.spec.address import parse_address
from distribax.cluster.spec.host_address import find_own_address
from distribax.topology import check_cpu_pool, device_name, resolve_devices, safe_pool_size

_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}
_NEEDED: Final = ("jax", "numpy", "optax", "orbax-checkpoint", "grain", "rich")
"""The packages to look for if distribax is not installed, so that its requirements are unknown."""

_TOOLS: Final = ("all", "docs", "test")
"""Extras for those who work on distribax itself; users do not need them."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "doctor", help="check devices, versions, network and cluster of this machine"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for the doctors of the cluster's other machines, to check that all "
        "reach each other (0)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the findings and returns 0, or 1 if there is a problem among them."""
    findings = examine(options.wait)
    healthy = is_healthy(findings)
    if options.json:
        found = [finding.as_dict() for finding in findings]
        print(json.dumps({"healthy": healthy, "findings": found}, indent=2))
    else:
        _print_table(findings)
    return 0 if healthy else 1


def examine(wait_seconds: float = 0.0) -> list[Finding]:
    """Returns all findings about this machine and this environment.

    Args:
        wait_seconds: How long to wait for the doctors of other machines.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _check_versions,
        _check_extras,
        _check_network,
        functools.partial(_check_cluster, wait_seconds),
        _check_devices,
    )
    return [finding for check in checks for finding in check()]


def _read_requirements() -> list[Requirement]:
    try:
        lines = metadata.requires("distribax") or []
    except metadata.PackageNotFoundError:
        lines = list(_NEEDED)
    return [parse_requirement(line) for line in lines]


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_versions() -> Iterator[Finding]:
    yield Finding("versions", "python", platform.python_version())
    own = _find_version("distribax")
    if own is None:
        yield Finding(
            "versions",
            "distribax",
            "runs from its source and is not installed: the versions it needs are not known",
            Verdict.WARNING,
            "pip install . in the folder of the source",
        )
    else:
        yield Finding("versions", "distribax", own)
    for needed in _read_requirements():
        if needed.extra is None:
            yield _check_version("versions", needed, Verdict.PROBLEM)
            if needed.name == "jax":
                yield _check_jaxlib()


def _check_version(area: str, needed: Requirement, otherwise: Verdict) -> Finding:
    """Returns whether a package is installed, in a version that distribax is tested with."""
    found = _find_version(needed.name)
    install = f"pip install '{needed.name}{needed.range}'"
    if found is None:
        return Finding(area, needed.name, "not installed", otherwise, install)
    if not is_in_range(found, needed.range):
        value = f"{found}, outside of the tested range {needed.range}"
        return Finding(area, needed.name, value, otherwise, install)
    return Finding(area, needed.name, f"{found} (tested: {needed.range or 'not known'})")


def _check_jaxlib() -> Finding:
    jax, jaxlib = _find_version("jax"), _find_version("jaxlib")
    if jax is None or jaxlib is None or jax.split(".")[:2] != jaxlib.split(".")[:2]:
        value = f"{jaxlib or 'not installed'}, with jax {jax}"
        fix = f"pip install 'jaxlib=={jax}'"
        return Finding("versions", "jaxlib", value, Verdict.PROBLEM, fix)
    return Finding("versions", "jaxlib", jaxlib)


def _check_extras() -> Iterator[Finding]:
    for needed in _read_requirements():
        if needed.extra is None or needed.extra in _TOOLS:
            continue
        subject = f"{needed.extra}: {needed.name}"
        found = _find_version(needed.name)
        if found is None:
            # Nobody needs all extras, so this is not a warning; the table says how to get it.
            how = f"pip install 'distribax[{needed.extra}]'"
            yield Finding("extras", subject, f"not installed; if you need it: {how}")
        else:
            judged = _check_version("extras", needed, Verdict.WARNING)
            yield Finding("extras", subject, judged.value, judged.verdict, judged.fix)


def _check_network() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        yield Finding(
            "network",
            "127.0.0.1",
            f"no connection to this machine itself: {error}",
            Verdict.PROBLEM,
            "allow local TCP connections (firewall, sandbox): workers need them",
        )
    else:
        yield Finding("network", "127.0.0.1", "free ports can be opened and reached")
    yield _check_host_name()


def _check_host_name() -> Finding:
    name = socket.gethostname()
    fix = (
        "when other machines take part, give MASTER_ADDR or --rdzv-endpoint this machine's IP "
        "address; a TF_CONFIG may have its name, as the others' addresses tell which one is meant"
    )
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("network", "host name", f"{name}: {error}", Verdict.WARNING, fix)
    value = f"{name} is {address}"
    if address.startswith("127."):
        value += " here (as Debian sets it up), which other machines cannot reach"
        return Finding("network", "host name", value, Verdict.WARNING, fix)
    return Finding("network", "host name", value)


def _check_cluster(wait_seconds: float) -> Iterator[Finding]:
    try:
        found = resolve()
        spec = found.resolver.cluster_spec()
        task = (found.resolver.task_type, found.resolver.task_id)
    except (ValueError, RuntimeError, OSError) as error:
        fix = "correct the variable that the message names, or unset it to run a single process"
        yield Finding("cluster", "description", str(error), Verdict.PROBLEM, fix)
        return
    name = type(found.resolver).__name__
    yield Finding("cluster", "resolver", f"{name}, because: {found.reason}")
    if not spec:
        return
    yield Finding("cluster", "tasks", json.dumps(spec.as_dict()))
    if task[0] is None or task[1] is None:
        yield Finding(
            "cluster",
            "this task",
            f"type {task[0]}, index {task[1]}",
            Verdict.PROBLEM,
            'say which task this is: "task": {"type": "worker", "index": 0} in TF_CONFIG',
        )
        return
    yield Finding("cluster", "this task", f"{task[0]} {task[1]}")
    own = (task[0], task[1])
    addresses = {
        each: parse_address(spec.task_address(*each), "address")
        for each in ((job, index) for job in spec.jobs for index in spec.task_indices(job))
    }
    if own not in addresses:
        return  # An evaluator need not be in it.
    others = {f"{job} {index}": at for (job, index), at in addresses.items() if (job, index) != own}
    own_host = find_own_address(addresses[own].host, [at.host for at in others.values()])
    yield from _check_leader(found.resolver, own, own_host)
    port = addresses[own].port or 0
    yield from check_peers(f"{own[0]} {own[1]}", own_host, port, others, wait_seconds)


def _check_leader(
    resolver: ClusterResolver, task: tuple[str, int], own_host: str | None
) -> Iterator[Finding]:
    """Checks that this task can listen at its address, if the other tasks connect to it."""
    tasks = training_tasks(resolver.cluster_spec())
    if len(tasks) < 2 or task != tasks[0]:
        return
    text = resolver.cluster_spec().task_address(*task)
    address = parse_address(text, "address")
    try:
        with socket.create_server((own_host or address.host, address.port or 0)):
            where = "" if own_host in (None, address.host) else f" (as {own_host})"
            yield Finding(
                "cluster", "own address", f"{text} is free{where}; the others will connect to it"
            )
    except OSError as error:
        yield Finding(
            "cluster",
            "own address",
            f"cannot listen on {text}: {error}",
            Verdict.PROBLEM,
            "end the program that uses the port, choose another port, or correct the host",
        )


def _check_devices() -> Iterator[Finding]:
    try:
        devices = resolve_devices()
    except Exception as error:  # JAX and its plug-ins raise any exception when they start.
        yield Finding(
            "devices",
            "JAX",
            f"does not start: {error}",
            Verdict.PROBLEM,
            "check JAX_PLATFORMS, JAX_NUM_CPU_DEVICES, XLA_FLAGS, and the accelerator's driver",
        )
        return
    names = ", ".join(device_name(device).rpartition("device:")[2] for device in devices)
    yield Finding("devices", devices[0].platform, f"{len(devices)}: {names}")
    on_cpu = sum(device.platform == "cpu" for device in devices)
    if not on_cpu:
        return
    rule = f"{on_cpu} CPU devices need {safe_pool_size(on_cpu)} threads"
    try:
        check_cpu_pool(devices)
    except RuntimeError as error:
        fix = "unset PJRT_NPROC and NPROC, or set them to at least that number"
        yield Finding("devices", "thread pool", f"{rule}: {error}", Verdict.PROBLEM, fix)
    else:
        yield Finding("devices", "thread pool", f"large enough: {rule}")


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="distribax doctor")
    for title in ("", "what", "found"):
        table.add_column(title)
    area = ""
    for finding in findings:
        if area not in ("", finding.area):
            table.add_section()
        area = finding.area
        table.add_row(
            Text(finding.verdict.value, style=_STYLES[finding.verdict]),
            # As Text, so that the brackets of extras are not taken for mark-up.
            Text(f"{finding.area}: {finding.subject}"),
            Text(f"{finding.value}\nfix: {finding.fix}" if finding.fix else finding.value),
        )
    Console().print(table)
