"""What a case of `distribax bench` is, and how its figures become tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distribax.cli.bench import peers
from distribax.cli.bench.charts import Chart, Point, Series
from distribax.cli.bench.figures import Report, Spread, Table, ratio
from distribax.cli.bench.harness import Settings, Side, Turns


@dataclass(frozen=True)
class Case:
    """One subject to measure.

    Attributes:
        name: What the command line calls it.
        description: What is measured.
        count_turns: Returns how many turns it takes, for the progress bar.
        measure: Measures it.
    """

    name: str
    description: str
    count_turns: Callable[[Settings], int]
    measure: Callable[[Settings, Turns], Report]


def select_available(sides: Sequence[Side]) -> list[Side]:
    """Returns the sides whose library is installed."""
    return [side for side in sides if side.peer is None or peers.python_of(side.peer) is not None]


def add_rates(
    report: Report,
    title: str,
    unit: str,
    seconds: Mapping[str, Sequence[float]],
    amount: float,
    base: str | None = None,
) -> None:
    """Adds a table and a chart of how much each side does in a second.

    Args:
        report: Where they are added.
        title: What is measured.
        unit: What is counted.
        seconds: The times of each side, one for each round.
        amount: How much is done in that time.
        base: The side that the ratios of times refer to.
    """
    table = Table(title, ["side", f"{unit} [quartiles]", "time [ms]", "time against the first"])
    chart = Chart(title, unit, "bars")
    base = next(iter(seconds), None) if base is None else base
    for name, times in seconds.items():
        rates = Spread.of([amount / each for each in times])
        against = "" if base is None or name == base else ratio(times, seconds[base]).show()
        table.rows.append([name, rates.show(1.0, 0), Spread.of(times).show(1e3), against])
        point = Point(0.0, rates.median, rates.low, rates.high)
        chart.series.append(Series(name, [point]))
    report.tables.append(table)
    report.charts.append(chart)
