"""What a case of `distribax bench` is, and how its figures become tables and charts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distribax.cli.bench import peer_libraries
from distribax.cli.bench.charts import Chart, Point, Series
from distribax.cli.bench.figures import Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Measurement, Side, Turns, interleave


def add_rates(report: Report, contest: Contest, outcome: Measurement) -> None:
    """Adds a table and a chart of how much each side does in a second."""
    title, unit = contest.title, contest.unit
    table = ReportTable(
        title, ["side", f"{unit} [quartiles]", "time [ms]", "time against the first"]
    )
    chart = Chart(title, unit, "bars")
    first = next(iter(outcome.seconds.values()), [])
    for name, times in outcome.seconds.items():
        rates = Spread.of([contest.amount / each for each in times])
        against = "" if times is first else compute_ratio(times, first).show()
        table.rows.append([name, rates.show(1.0, 0), Spread.of(times).show(1e3), against])
        point = Point(0.0, rates.median, rates.low, rates.high)
        chart.series.append(Series(name, [point]))
    report.tables.append(table)
    report.charts.append(chart)


@dataclass(frozen=True)
class Contest:
    """Sides that take turns, and what their figures mean.

    Attributes:
        title: What is measured.
        sides: The programs.
        steps: How many steps a turn has.
        rounds: How many turns each side has.
        warmup: How many steps a side runs before the first turn.
        unit: What is counted in a second.
        amount: How many of them a step does.
        name: What tells its samples from those of the case's other contests.
        show: Adds its tables and charts to the report.
    """

    title: str
    sides: Sequence[Side]
    steps: int
    rounds: int
    warmup: int
    unit: str = "examples/s"
    amount: int = 1
    name: str = ""
    show: Callable[[Report, Contest, Measurement], None] = add_rates


@dataclass(frozen=True)
class Case:
    """One subject to measure.

    Attributes:
        name: What the command line calls it.
        description: What is measured.
        plan: Returns what to measure; sides may use the folder for their files.
    """

    name: str
    description: str
    plan: Callable[[BenchSettings, str], Sequence[Contest]]

    def count_turns(self, settings: BenchSettings) -> int:
        """Returns how many turns the case takes, for the progress bar."""
        contests = self.plan(settings, "")
        return sum(len(contest.sides) + contest.rounds for contest in contests)

    def measure(self, settings: BenchSettings, turns: Turns) -> Report:
        """Measures it."""
        report = Report(self.name)
        with tempfile.TemporaryDirectory(prefix="distribax-bench-") as folder:
            for contest in self.plan(settings, folder):
                outcome = interleave(
                    contest.sides,
                    steps=contest.steps,
                    rounds=contest.rounds,
                    warmup=contest.warmup,
                    turns=turns,
                )
                report.failures += outcome.failures
                seconds = outcome.seconds
                report.samples |= {contest.name: seconds} if contest.name else seconds
                contest.show(report, contest, outcome)
        return report


def select_available(sides: Sequence[Side]) -> list[Side]:
    """Returns the sides whose library is installed."""
    return [
        side
        for side in sides
        if side.peer is None or peer_libraries.find_python(side.peer) is not None
    ]
