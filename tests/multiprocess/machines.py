"""Machines of a test: network namespaces on one bridge, which the test cuts, heals and slows down.

Processes of a test enter the namespace of their machine, with a host name and a hosts file of its
own. All traffic stays inside the namespaces.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_NETWORK = "10.231.7"
_NOBODY = "02:00:00:00:00:99"

_ENTRY = str(Path(__file__).with_name("machine_entry.py"))
ENTER = f"import runpy; runpy.run_path({_ENTRY!r})['enter']()\n"
"""What a program begins with that runs on a machine of a test."""


@dataclass(frozen=True)
class Machine:
    """One machine.

    Args:
        name: Its host name.
        namespace: Its network namespace.
        host: Its address.
        port: The switch's end of its cable.
        switch: The namespace of the switch.
        hosts: Its hosts file.
    """

    name: str
    namespace: str
    host: str
    port: str
    switch: str
    hosts: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables that `enter` needs."""
        return {
            "DX_TEST_NAMESPACE": f"/run/netns/{self.namespace}",
            "DX_TEST_HOST_NAME": self.name,
            "DX_TEST_HOSTS": str(self.hosts),
        }

    def cut(self) -> None:
        """Loses all packets from and to this machine, in silence."""
        _call("bridge", "-n", self.switch, "link", "set", "dev", self.port, "state", "0")

    def heal(self) -> None:
        """Ends what `cut` does."""
        _call("bridge", "-n", self.switch, "link", "set", "dev", self.port, "state", "3")

    def lose(self, other: Machine) -> None:
        """Loses all packets between this machine and another one."""
        for one, peer in ((self, other), (other, self)):
            neighbour = ["neigh", "replace", peer.host, "lladdr", _NOBODY, "dev", "eth0"]
            _call("ip", "-n", one.namespace, *neighbour, "nud", "permanent")

    def find(self, other: Machine) -> None:
        """Ends what `lose` does."""
        for one, peer in ((self, other), (other, self)):
            _call("ip", "-n", one.namespace, "neigh", "del", peer.host, "dev", "eth0")

    def slow_down(self, rate: str) -> None:
        """Bounds what this machine sends, for example to "1mbit" per second."""
        limit = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        _call("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *limit)

    def reaches(self, other: Machine) -> bool:
        """Tells whether the other machine answers this one: by a connection, or by refusing it."""
        program = (
            "import socket, sys\n"
            "try: socket.create_connection((sys.argv[1], 7777), timeout=3)\n"
            "except ConnectionRefusedError: pass"
        )
        command = [sys.executable, "-ISc", program, other.host]
        own = ["ip", "netns", "exec", self.namespace, *command]
        return subprocess.run(own, capture_output=True, check=False).returncode == 0

    def count_packets(self) -> tuple[int, int]:
        """Returns how many packets this machine has received and sent."""
        text = _call("ip", "-j", "-s", "-n", self.namespace, "link", "show", "eth0")
        counts = json.loads(text)[0]["stats64"]
        return counts["rx"]["packets"], counts["tx"]["packets"]

    def count_delays(self) -> int:
        """Returns how often a packet had to wait since `slow_down`."""
        text = _call("tc", "-j", "-s", "-n", self.namespace, "qdisc", "show", "dev", "eth0")
        return int(json.loads(text)[0]["overlimits"])

    def speed_up(self) -> None:
        """Ends what `slow_down` does."""
        _call("tc", "-n", self.namespace, "qdisc", "del", "dev", "eth0", "root")


@contextlib.contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Yields machines on a switch; skips the test where the user may not make them.

    Each knows itself as 127.0.1.1, as Debian sets it up, and the others by their addresses.

    Args:
        count: How many machines.
        folder: Where their hosts files go.
    """
    _require_namespaces()
    mark = secrets.token_hex(3)
    switch = f"dx-{mark}-switch"
    made = [
        Machine(
            f"dx-machine-{index}",
            f"dx-{mark}-{index}",
            f"{_NETWORK}.{index + 1}",
            f"port{index}",
            switch,
            folder / f"hosts-{index}",
        )
        for index in range(count)
    ]
    try:
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge0", "up")
        for machine in made:
            _connect(machine, made)
        yield made
    finally:
        for namespace in [*(machine.namespace for machine in made), switch]:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _connect(machine: Machine, everybody: list[Machine]) -> None:
    own = machine.namespace
    _call("ip", "netns", "add", own)
    cable = ["type", "veth", "peer", "name", machine.port, "netns", machine.switch]
    _call("ip", "-n", own, "link", "add", "eth0", *cable)
    _call("ip", "-n", own, "addr", "add", f"{machine.host}/24", "dev", "eth0")
    _call("ip", "-n", machine.switch, "link", "set", machine.port, "master", "bridge0", "up")
    for device in ("lo", "eth0"):
        _call("ip", "-n", own, "link", "set", device, "up")
    names = [f"{each.host} {each.name}" for each in everybody if each is not machine]
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {machine.name}", *names]
    machine.hosts.write_text("\n".join(lines) + "\n")


def _require_namespaces() -> None:
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("bridge"):
        pytest.skip("several machines: needs Linux and iproute2")
    name = f"dx-probe-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"several machines: no network namespaces ({made.stderr.strip()})")
    try:
        probe = ["ip", "-n", name, "link", "add", "bridge0", "type", "bridge"]
        bridged = subprocess.run(probe, capture_output=True, text=True, check=False)
    finally:
        _call("ip", "netns", "del", name)
    if bridged.returncode:
        pytest.skip(f"several machines: no bridges ({bridged.stderr.strip()})")


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
