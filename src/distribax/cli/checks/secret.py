"""Whether the processes of the cluster have a secret, so that nobody else can join them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distribax.cli.findings import Finding, Verdict
from distribax.cluster.peers.cluster_secret import HOW_TO, find_secret
from distribax.cluster.ray.cluster_token import TOKEN_VARIABLE, find_token
from distribax.cluster.spec.host_address import find_ip_address, is_loopback


def check_secret(hosts: Sequence[str], *, has_servers: bool) -> Iterator[Finding]:
    """Checks that this process was given what all processes of its cluster must have.

    Args:
        hosts: The hosts of all tasks.
        has_servers: Whether there are parameter servers: then Ray's token is the secret.
    """
    try:
        is_given = bool(find_token() if has_servers else find_secret())
    except ValueError as error:
        fix = "correct the file or the variable that the message names"
        yield Finding("cluster", "secret", str(error), Verdict.PROBLEM, fix)
        return
    if is_given:
        yield Finding("cluster", "secret", "given; all tasks must have the same one")
    elif has_servers:
        fix = f"set {TOKEN_VARIABLE} to the same long random text in all: openssl rand -hex 32"
        value = "none: every process makes a token of its own, and they cannot join each other"
        yield Finding("cluster", "secret", value, Verdict.PROBLEM, fix)
    elif len(hosts) > 1 and not all(map(is_loopback, map(find_ip_address, hosts))):
        value = "none: whoever reaches the first worker can join or end the training"
        yield Finding("cluster", "secret", value, Verdict.WARNING, HOW_TO)
