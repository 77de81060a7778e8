"""A training step, compared with JAX by hand, TensorFlow and torch, and on more devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from distribax.cli.bench.cases.case import Case, Contest, add_rates, select_available
from distribax.cli.bench.charts import Chart, Point, Series
from distribax.cli.bench.figures import Report, ReportTable, Spread
from distribax.cli.bench.harness import BenchSettings, Measurement, Side

HAND: Final = "JAX by hand (shard_map)"
OURS: Final = "distribax"
_PROGRAMS: Final = {HAND: "mlp_shard_map", OURS: "mlp_distribax"}
# The in-process collectives of JAX on CPU need more threads than a machine may have cores.
_POOL: Final = {"NPROC": "16"}
_QUIET: Final = {"TF_CPP_MIN_LOG_LEVEL": "3"}
_BATCH_SIZE: Final = 256
_LOSS_TOLERANCE: Final = 0.05


def _plan_step(settings: BenchSettings, folder: str) -> list[Contest]:
    replicas = min(2, settings.max_devices)
    common = ("--batch-size", str(_BATCH_SIZE), "--replicas", str(replicas))
    sides = [
        Side(HAND, "mlp_shard_map", common, environment=_POOL),
        Side(OURS, "mlp_distribax", common, environment=_POOL),
        Side("TensorFlow", "mlp_tensorflow", common, "tensorflow", _QUIET),
        Side("torch DDP", "mlp_torch", (*common, "--threads", "1"), "torch"),
    ]
    title = f"training step, MLP 784-512-512-10, Adam, batch {_BATCH_SIZE}, {replicas} devices"
    rounds, warmup = settings.pick(15, 3), settings.pick(20, 5)
    sides = select_available(sides)
    return [Contest(title, sides, 20, rounds, warmup, amount=_BATCH_SIZE, show=_show_step)]


def _show_step(report: Report, contest: Contest, outcome: Measurement) -> None:
    add_rates(report, contest, outcome)
    losses = {name: answer["loss"] for name, answer in outcome.answers.items()}
    expected = losses.get(HAND)
    for name, loss in losses.items():
        if expected is not None and abs(loss - expected) > _LOSS_TOLERANCE * expected:
            # It has not done the same work.
            report.failures.append(f"{name}: the loss is {loss:.3g}, by hand {expected:.3g}")


def _plan_scaling(settings: BenchSettings, folder: str) -> list[Contest]:
    sizes = [1]
    while sizes[-1] * 2 <= settings.max_devices:
        sizes.append(sizes[-1] * 2)
    sides = [
        Side(
            f"{name} {size}",
            program,
            ("--batch-size", str(_BATCH_SIZE * size), "--replicas", str(size)),
            environment=_POOL,
        )
        for size in sizes
        for name, program in _PROGRAMS.items()
    ]
    title = f"examples per second by the number of devices, batch {_BATCH_SIZE} for each"
    rounds = settings.pick(10, 3)
    return [Contest(title, sides, 10, rounds, warmup=rounds, show=partial(_show_scaling, sizes))]


def _show_scaling(
    sizes: Sequence[int], report: Report, contest: Contest, outcome: Measurement
) -> None:
    title = contest.title
    table = ReportTable(title, ["devices", *_PROGRAMS, f"{OURS}, against one device"])
    chart = Chart(title, contest.unit, "lines", "devices", [Series(name) for name in _PROGRAMS])
    first: float | None = None
    for size in sizes:
        cells: list[str] = []
        ours = None
        for series in chart.series:
            seconds = outcome.seconds.get(f"{series.name} {size}")
            if seconds is None:
                cells.append("-")
                continue
            rates = Spread.of([_BATCH_SIZE * size / each for each in seconds])
            series.points.append(Point(size, rates.median, rates.low, rates.high))
            cells.append(rates.show(1.0, 0))
            ours = rates.median if series.name == OURS else ours
        first = ours if first is None else first
        cells.append("-" if ours is None or not first else f"{ours / first:.2f}x")
        table.rows.append([str(size), *cells])
    report.tables.append(table)
    report.charts.append(chart)


STEP: Final = Case("step", "a training step, compared with other libraries", _plan_step)
SCALING: Final = Case("scaling", "a training step on 1, 2, 4 .. devices", _plan_scaling)
