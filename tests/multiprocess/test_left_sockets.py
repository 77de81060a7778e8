"""A program that uses clusters one after the other does not run out of descriptors."""

from __future__ import annotations

import json

import pytest

from tests.conftest import RunFresh

# Each starts a Ray cluster and waits for time limits: `make chaos` runs them.
pytestmark = [pytest.mark.multiprocess, pytest.mark.chaos]

PROGRAM = """
import json, os
import distribax as dx

counts = []
for _ in range(4):
    strategy = dx.ParameterServerStrategy(num_workers=1, num_ps=1)
    coordinator = dx.coordinator.ClusterCoordinator(strategy, view="none")
    coordinator.schedule(int).fetch()
    strategy.close()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    counts.append(
        sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))
    )
print(json.dumps(counts))
"""


# Takes more than 10 s: Ray is started four times.
def test_clusters_one_after_the_other_keep_no_sockets(run_fresh: RunFresh) -> None:
    counts = json.loads(run_fresh(PROGRAM).splitlines()[-1])
    assert counts[-1] <= counts[0] + 1, counts
