"""`distribax doctor`: examines this machine and says what to fix before a program fails."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from distribax.cli.checks.clocks import answer_peers, check_clocks, parse_peer
from distribax.cli.checks.devices import check_devices
from distribax.cli.checks.memory import check_memory
from distribax.cli.checks.peers import check_peers
from distribax.cli.checks.ports import check_ports
from distribax.cli.checks.ray_parts import check_ray
from distribax.cli.checks.secret import check_secret
from distribax.cli.checks.versions import check_extras, check_versions
from distribax.cli.findings import Finding, Verdict, is_healthy
from distribax.cli.help_format import USAGE_ERROR, add_command
from distribax.cli.terminal import make_console
from distribax.cluster import ClusterResolver, resolve, training_tasks
from distribax.cluster.spec.address import Address, parse_address
from distribax.cluster.spec.host_address import find_own_address

_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = add_command(
        commands,
        "doctor",
        summary="check versions, devices, memory, network, clocks and cluster of this machine",
        description="Examines this machine and says how to fix what is wrong. With --listen on one "
        "machine and --peer on another, also compares the two: clocks and versions.",
        examples="""
distribax doctor
distribax doctor --json
distribax doctor --listen 7010            # on the machine 10.0.0.1
distribax doctor --peer 10.0.0.1:7010     # on another one""",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--listen",
        metavar="[HOST:]PORT",
        help="answer the doctors of other machines until Ctrl-C, and check nothing here; they are "
        "told the time and the versions of this machine",
    )
    parser.add_argument(
        "--peer",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="compare with the machine where a doctor listens; may be given several times",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for the doctors of the cluster's other machines, to check that all "
        "reach each other",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the findings and returns 0, or 1 if there is a problem among them."""
    try:
        if options.listen:
            answer_peers(options.listen)
            return 0
        peers = [parse_peer(text) for text in options.peer]
    except ValueError as error:
        print(f"distribax doctor: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    findings = examine(peers, options.wait)
    healthy = is_healthy(findings)
    if options.json:
        found = [finding.as_dict() for finding in findings]
        print(json.dumps({"healthy": healthy, "findings": found}, indent=2))
    else:
        _print_table(findings)
    return 0 if healthy else 1


def examine(peers: Sequence[Address] = (), wait_seconds: float = 0.0) -> list[Finding]:
    """Returns all findings about this machine and this environment.

    Args:
        peers: Where doctors of other machines listen, to compare with.
        wait_seconds: How long to wait for the doctors of the cluster's other machines.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        check_versions,
        check_extras,
        _check_network,
        check_ports,
        partial(check_clocks, peers),
        partial(_check_cluster, wait_seconds),
        check_memory,
        check_ray,
        check_devices,
    )
    return [finding for check in checks for finding in check()]


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
    hosts = [at.host for at in addresses.values()]
    yield from check_secret(hosts, has_servers="ps" in spec.jobs)
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


def _print_table(findings: Sequence[Finding]) -> None:
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
    make_console().print(table)
