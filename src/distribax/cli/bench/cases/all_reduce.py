"""All-reduces by size and algorithm: how long they take, and how much they move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from distribax.cli.bench.cases.case import Case, Contest
from distribax.cli.bench.charts import Chart, Point, Series, format_bytes
from distribax.cli.bench.figures import Report, ReportTable, Spread
from distribax.cli.bench.harness import BenchSettings, Measurement, Side

_SIZES: Final = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)
_STEPS: Final = 3
_LIMIT: Final = "memory copy (limit)"


def _plan(settings: BenchSettings, folder: str) -> list[Contest]:
    replicas = max(2, min(settings.max_devices, 4))
    sizes = _SIZES[:4] if settings.quick else _SIZES
    side = Side(
        f"{replicas} devices",
        "all_reduce",
        ("--replicas", str(replicas), "--sizes", *map(str, sizes)),
        environment={"NPROC": str(4 * replicas)},
    )
    title = f"all-reduce of one array over {replicas} devices"
    show = partial(_show, replicas, sizes)
    return [Contest(title, [side], _STEPS, settings.pick(10, 3), warmup=1, show=show)]


def _show(
    replicas: int, sizes: Sequence[int], report: Report, contest: Contest, outcome: Measurement
) -> None:
    if not outcome.seconds:
        return  # It has failed.
    (answers,) = outcome.history.values()
    names = list(dict.fromkeys(name.rpartition(" ")[0] for name in answers[0]["ways"]))
    # As NCCL's tests count it: each device sends and receives so much, whatever the algorithm.
    moved = 2 * (replicas - 1) / replicas
    samples = {way: [answer["ways"][way] for answer in answers] for way in answers[0]["ways"]}
    copies = [answer["copy"] for answer in answers]
    report.samples = samples | {_LIMIT: copies}
    times, rates = (
        Chart(
            f"{contest.title}, {what}",
            unit,
            "lines",
            "size of the array",
            is_log=True,
            is_in_bytes=True,
        )
        for what, unit in (("latency", "µs"), ("bandwidth", "GB/s"))
    )
    table = ReportTable(
        f"all-reduce over {replicas} devices; memory copies reach "
        f"{Spread.of(copies).median / 1e9:.1f} GB/s",
        ["algorithm", *(f"{format_bytes(size)}: µs, GB/s" for size in sizes)],
    )
    for name in names:
        time_series, rate_series, cells = Series(name), Series(name), []
        for size in sizes:
            spread = Spread.of(samples[f"{name} {size}"])
            low, middle, high = spread.low, spread.median, spread.high
            time_series.points.append(Point(size, middle * 1e6, low * 1e6, high * 1e6))
            rate = Point(size, *(moved * size / each / 1e9 for each in (middle, high, low)))
            rate_series.points.append(rate)
            cells.append(f"{middle * 1e6:,.0f}, {rate.value:.2f}")
        times.series.append(time_series)
        rates.series.append(rate_series)
        table.rows.append([name, *cells])
    limit = Spread.of([each / 1e9 for each in copies])
    points = [Point(size, limit.median, limit.low, limit.high) for size in sizes]
    rates.series.append(Series(_LIMIT, points))
    report.tables.append(table)
    report.charts += [times, rates]


ALL_REDUCE: Final = Case("all_reduce", "all-reduce by size and algorithm, and the limit", _plan)
