"""`distribax doctor`: examines this machine and says what to fix before a program fails."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from distribax.cli.checks.clocks import answer_peers, check_clocks
from distribax.cli.checks.cluster import check_cluster
from distribax.cli.checks.devices import check_devices
from distribax.cli.checks.memory import check_memory
from distribax.cli.checks.network import check_network
from distribax.cli.checks.ray_parts import check_ray
from distribax.cli.checks.versions import check_extras, check_versions
from distribax.cli.findings import Finding, Verdict
from distribax.cli.help_format import USAGE_ERROR, add_command
from distribax.cli.terminal import make_console
from distribax.cluster.spec.address import Address, parse_full_address

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
        peers = [parse_full_address(text, "--peer") for text in options.peer]
    except ValueError as error:
        print(f"distribax doctor: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    findings = examine(peers, options.wait)
    healthy = all(finding.verdict is not Verdict.PROBLEM for finding in findings)
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
        check_network,
        partial(check_clocks, peers),
        partial(check_cluster, wait_seconds),
        check_memory,
        check_ray,
        check_devices,
    )
    return [finding for check in checks for finding in check()]


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
