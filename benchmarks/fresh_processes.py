"""Sides that run in a new process each time, for what happens once in a process."""

from __future__ import annotations

from collections.abc import Sequence

from distribax.cli.bench.harness import Measurement, Process, Side, SideError


def fresh(sides: Sequence[Side], *, rounds: int) -> Measurement:
    """Run one step of every side in turn, always in a new process."""
    outcome = Measurement()
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            try:
                with Process(side) as process:
                    process.wait_until_ready()
                    answer = process.run(1)
            except SideError as error:
                if str(error) not in outcome.failures:
                    outcome.failures.append(str(error))
                continue
            outcome.note(side.name, answer, 1)
    # A side that failed in some round has no partner for its ratios in that round.
    outcome.seconds = {
        name: times for name, times in outcome.seconds.items() if len(times) == rounds
    }
    return outcome
