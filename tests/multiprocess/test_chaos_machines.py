"""Faults of machines, networks, disks and clocks, in an order that a seed decides: `make chaos`.

DISTRIBAX_CHAOS_SEED and DISTRIBAX_CHAOS_ROUNDS change the seed and how often each kind happens.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import distribax as dx
from distribax.testing import History
from tests.multiprocess.launchers import finish, launchers
from tests.multiprocess.marked_programs import Program
from tests.multiprocess.server_machines import (
    ServerMachines,
    hear_log,
    kill_processes,
    server_machines,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.chaos, pytest.mark.timeout(3600)]

_SEED = int(os.environ.get("DISTRIBAX_CHAOS_SEED", "0"))
_ROUNDS = int(os.environ.get("DISTRIBAX_CHAOS_ROUNDS", "1"))
_CUT_SECONDS = 15.0
"""Longer than Ray waits until it gives up a machine."""

_CLOCK = """
import os, time
_time, _time_ns, _path = time.time, time.time_ns, os.environ["DX_TEST_CLOCK"]

def _offset():
    try:
        with open(_path) as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0

time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + int(_offset() * 1e9)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ServerMachines]:
    """A cluster on four machines, whose Python clocks the file "clock" shifts."""
    (tmp_path / "sitecustomize.py").write_text(_CLOCK)
    (tmp_path / "clock").write_text("0")
    settings = {
        "PYTHONPATH": str(tmp_path),
        "DX_TEST_CLOCK": str(tmp_path / "clock"),
        "DISTRIBAX_HEAD_LOST_SECONDS": "5",
        "DISTRIBAX_SERVER_ANSWER_SECONDS": "20",
    }
    with server_machines(tmp_path, **settings) as made:
        made.ask("ready")
        yield made


def _cut(cluster: ServerMachines, *numbers: int) -> None:
    for number in numbers:
        cluster.machines[number].cut()
    time.sleep(_CUT_SECONDS)
    for number in numbers:
        cluster.machines[number].heal()


def _kill_raylet(program: Program) -> None:
    assert kill_processes(program, "raylet")
    hear_log(program, "It tries to join again")


def _slow_down(cluster: ServerMachines) -> None:
    cluster.ps_machine.slow_down("1mbit")
    cluster.ask("mark 10 0")
    cluster.ps_machine.speed_up()


def _jump(cluster: ServerMachines, folder: Path) -> None:
    for offset in ("-86400", "86400", "0"):
        (folder / "clock").write_text(offset)
        cluster.ask("mark 5 0")


def test_faults_of_machines_lose_nothing(cluster: ServerMachines, tmp_path: Path) -> None:
    kinds: dict[str, Callable[[], object]] = {
        "network cut, server": lambda: _cut(cluster, 1),
        "network cut, worker": lambda: _cut(cluster, 2),
        "network cut, both workers": lambda: _cut(cluster, 2, 3),
        "network cut, server and worker": lambda: _cut(cluster, 1, 2),
        "network cut, coordinator": lambda: _cut(cluster, 0),
        "slow network, server": lambda: _slow_down(cluster),
        "kill raylet, worker": lambda: _kill_raylet(cluster.workers[0]),
        "kill raylet, server": lambda: _kill_raylet(cluster.ps),
        "kill raylet, coordinator": lambda: kill_processes(cluster.chief, "raylet"),
        "kill gcs": lambda: kill_processes(cluster.chief, "gcs_server"),
        "kill server and worker": lambda: [
            kill_processes(program, "ray::") for program in (cluster.ps, cluster.workers[1])
        ],
        "clock jumps": lambda: _jump(cluster, tmp_path),
    }
    chosen = os.environ.get("DISTRIBAX_CHAOS_KINDS", "")
    order = [kind for kind in kinds if chosen in kind] * _ROUNDS
    random.Random(_SEED).shuffle(order)
    longest: dict[str, float] = dict.fromkeys(order, 0.0)
    cluster.ask("mark 20 0")
    for kind in order:
        # What is in a snapshot must survive everything.
        cluster.ask("snapshot")
        kinds[kind]()
        began = time.monotonic()
        # Work that is acknowledged after the fault must survive it, too.
        time.sleep(1.0)
        cluster.ask("ready")
        told = cluster.ask("mark 10 0.01")
        seconds = time.monotonic() - began
        longest[kind] = max(longest[kind], seconds)
        print(f"seed {_SEED}: {kind}: works again after {seconds:.1f} s, {told}", flush=True)
        assert told["lost"] == 0, kind
    for kind, seconds in longest.items():
        print(f"| {kind} | {order.count(kind)} | {seconds:.0f} s | {_SEED} |")


def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no small disk can be made: {made.stderr.decode().strip()}")
    try:
        (disk / "ballast").write_bytes(b"x" * (250 << 10))
        strategy = dx.ParameterServerStrategy(
            num_workers=1, num_ps=1, snapshot_dir=disk, snapshot_interval=0.5
        )
        try:
            coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
            history = History(coordinator, 5000)
            for number in range(20):
                history.schedule(number)
            coordinator.join()
            with pytest.raises(OSError):
                strategy.snapshot()
            (disk / "ballast").unlink()
            assert strategy.snapshot()
            history.check()
        finally:
            strategy.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


_SYNCHRONOUS = """
import os, random, signal, sys
import numpy as np
import distribax as dx

folder, seed, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
strategy = dx.MultiWorkerMirroredStrategy()
import jax
worker = jax.process_index()
with strategy.scope():
    w = dx.Variable(np.zeros(3, np.float32), aggregation="MEAN")
    step_number = dx.Variable(0)
manager = dx.CheckpointManager(dx.Checkpoint(w=w, step=step_number), folder + "/saved", 2)
manager.restore_or_initialize()

@dx.function
def step(number):
    def replica():
        x = np.arange(3, dtype=np.float32) + 1 + number
        loss = lambda: ((w * x).sum() - 1.0) ** 2 / 100
        value, gradient = dx.value_and_grad(loss, w)()
        w.assign_sub(0.001 * gradient)
        return value
    return strategy.reduce("MEAN", strategy.run(replica), axis=None)

faults = sorted(random.Random(seed).sample(range(5, 60), kills))
while int(step_number) < 60:
    number = int(step_number)
    for index, at in enumerate(faults):
        marker = f"{folder}/fault-{index}"
        if number == at and worker == index % 2 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    loss = step(np.float32(number % 7))
    if worker == 0:
        with open(folder + "/losses", "a") as file:
            file.write(f"{number} {float(loss).hex()}\\n")
    step_number.assign_add(1)
    if int(step_number) % 5 == 0:
        manager.save()
"""


def _train(folder: Path, kills: int) -> dict[int, str]:
    """Returns the loss of each step of a training that is interrupted so often."""
    folder.mkdir()
    with launchers(folder) as start:
        options = ("--workers", "2", "--max-restarts", str(kills))
        arguments = (str(folder), str(_SEED), str(kills))
        code, _, err = finish(start(_SYNCHRONOUS, *options, arguments=arguments))
        assert code == 0, err
    lines = (folder / "losses").read_text().splitlines()
    return {int(number): loss for number, loss in map(str.split, lines)}


def test_killed_synchronous_workers_change_no_loss(tmp_path: Path) -> None:
    kills = 3 * _ROUNDS
    began = time.monotonic()
    disturbed = _train(tmp_path / "disturbed", kills)
    seconds = time.monotonic() - began
    assert disturbed == _train(tmp_path / "undisturbed", 0)
    assert sorted(disturbed) == list(np.arange(60))
    print(f"seed {_SEED}: {kills} kills of synchronous workers, {seconds:.0f} s in all, equal")
