"""Maps in worker processes; in a process of their own, as Grain keeps helper threads for them."""

from __future__ import annotations

import pytest

from tests.conftest import RunFresh

PROGRAM = """
    import json
    import multiprocessing
    import os

    from distribax.data import Dataset, Options

    def work(x):
        if x == 19:
            raise KeyError("nineteen")
        return x * 2, os.getpid()

    def make():
        rows = Dataset.range(20).shuffle(12).map(lambda x: x + 1, 2).filter(lambda x: x != 20)
        mapped = rows.filter(lambda x: x != 19).map(lambda x: x, 2).map(work, 2)
        return mapped.with_options(Options(worker_processes=2))

    with make().make_iterator() as iterator:
        seen = [next(iterator) for _ in range(7)]
        state = json.loads(json.dumps(iterator.get_state()))
        rest = list(iterator)
    pids = {int(pid) for _, pid in seen + rest}
    print(len(pids), os.getpid() in pids)
    print(sorted(int(value) for value, _ in seen + rest) == [2 * x for x in range(1, 19)])
    with make().make_iterator() as iterator:
        iterator.set_state(state)
        print([int(value) for value, _ in iterator] == [int(value) for value, _ in rest])
    faulty = Dataset.range(18, 22).map(work, 2).with_options(Options(worker_processes=1))
    with faulty.make_iterator() as iterator:
        print(int(next(iterator)[0]))
        try:
            next(iterator)
        except KeyError as error:
            print(error, "work" in error.__notes__[0])
    print(multiprocessing.active_children())
"""


# May take more than 10 s: Grain starts five fresh processes, which import all that this one has.
@pytest.mark.multiprocess
def test_processes_keep_order_resume_report_errors_and_end(run_fresh: RunFresh) -> None:
    assert run_fresh(PROGRAM).split("\n") == [
        "2 False",
        "True",
        "True",
        "36",
        "'nineteen' True",
        "[]",
    ]
