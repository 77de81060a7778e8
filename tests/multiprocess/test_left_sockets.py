"""A program that uses clusters one after the other does not run out of descriptors."""

from __future__ import annotations

import json

import pytest

from tests.conftest import RunFresh

# Each starts a Ray cluster and waits for time limits: `make chaos` runs them.
pytestmark = [pytest.mark.multiprocess, pytest.mark.chaos]

PROGRAM = """
import json, os, socket, struct, threading
import distribax as dx

# Connections of the program itself that others have reset, made all the time.
own, is_over = {}, threading.Event()

def connect():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        while not is_over.wait(0.1):
            mine = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            other.close()
            own[mine] = os.fstat(mine.fileno()).st_ino

thread = threading.Thread(target=connect)
thread.start()
ages, first_seen = [], {}
for number in range(6):
    strategy = dx.ParameterServerStrategy(num_workers=1, num_ps=1)
    coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
    coordinator.schedule(int).fetch()
    if number == 0:
        is_over.set()
        thread.join()
    strategy.close()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = {os.readlink(link) for link in links if os.path.islink(link)}
    sockets = {each for each in names if each.startswith("socket:")}
    sockets -= {f"socket:[{inode}]" for inode in own.values()}
    for each in sockets:
        first_seen.setdefault(each, number)
    ages.append([number - first_seen[each] for each in sockets])
intact = [os.fstat(mine.fileno()).st_ino == name for mine, name in own.items()]
print(json.dumps([ages, len(intact), all(intact)]))
"""


# Takes more than 10 s: Ray is started six times.
def test_clusters_one_after_the_other_keep_no_sockets(run_fresh: RunFresh) -> None:
    ages, num_own, is_intact = json.loads(run_fresh(PROGRAM).splitlines()[-1])
    # None is left for more than the lives of the next two clusters.
    assert max(age for each in ages for age in each) <= 2, ages
    assert len(ages[-1]) < 10, ages
    # What the program has opened itself while Ray was connected is never closed.
    assert num_own and is_intact
