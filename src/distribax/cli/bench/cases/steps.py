"""A training step, beside hand-written JAX, TensorFlow and torch; and on more and more devices."""

from __future__ import annotations

from typing import Final

from distribax.cli.bench.cases.case import Case, add_rates, select_available
from distribax.cli.bench.charts import Chart, Point, Series
from distribax.cli.bench.figures import Report, Spread, Table
from distribax.cli.bench.harness import Settings, Side, Turns, interleave

HAND: Final = "JAX by hand (shard_map)"
OURS: Final = "distribax"
# The in-process collectives of JAX on CPU need more threads than a machine may have cores.
_POOL: Final = {"NPROC": "16"}
_QUIET: Final = {"TF_CPP_MIN_LOG_LEVEL": "3"}
_BATCH_SIZE: Final = 256
_STEPS: Final = 20
_LOSS_TOLERANCE: Final = 0.05


def _make_step_sides(settings: Settings) -> list[Side]:
    replicas = min(2, settings.max_devices)
    common = ("--batch-size", str(_BATCH_SIZE), "--replicas", str(replicas))
    return select_available(
        [
            Side(HAND, "mlp_shard_map", common, environment=_POOL),
            Side(OURS, "mlp_distribax", common, environment=_POOL),
            Side("TensorFlow", "mlp_tensorflow", common, "tensorflow", _QUIET),
            Side("torch DDP", "mlp_torch", (*common, "--threads", "1"), "torch"),
        ]
    )


def _count_step_turns(settings: Settings) -> int:
    return len(_make_step_sides(settings)) + settings.pick(15, 3)


def _measure_step(settings: Settings, turns: Turns) -> Report:
    report = Report("step")
    sides = _make_step_sides(settings)
    rounds, warmup = settings.pick(15, 3), settings.pick(20, 5)
    outcome = interleave(sides, steps=_STEPS, rounds=rounds, warmup=warmup, turns=turns)
    report.failures += outcome.failures
    report.samples = dict(outcome.seconds)
    replicas = min(2, settings.max_devices)
    title = f"training step, MLP 784-512-512-10, Adam, batch {_BATCH_SIZE}, {replicas} devices"
    add_rates(report, title, "examples/s", outcome.seconds, _BATCH_SIZE)
    losses = {name: answer["loss"] for name, answer in outcome.answers.items()}
    expected = losses.get(HAND)
    for name, loss in losses.items():
        if expected is not None and abs(loss - expected) > _LOSS_TOLERANCE * expected:
            # It has not done the same work.
            report.failures.append(f"{name}: the loss is {loss:.3g}, by hand {expected:.3g}")
    return report


def _list_sizes(settings: Settings) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 <= settings.max_devices:
        sizes.append(sizes[-1] * 2)
    return sizes


def _count_scaling_turns(settings: Settings) -> int:
    return 2 * len(_list_sizes(settings)) + settings.pick(10, 3)


def _measure_scaling(settings: Settings, turns: Turns) -> Report:
    report = Report("scaling")
    programs = {HAND: "mlp_shard_map", OURS: "mlp_distribax"}
    sides = [
        Side(
            f"{name} {size}",
            program,
            ("--batch-size", str(_BATCH_SIZE * size), "--replicas", str(size)),
            environment=_POOL,
        )
        for size in _list_sizes(settings)
        for name, program in programs.items()
    ]
    rounds, warmup = settings.pick(10, 3), settings.pick(10, 3)
    outcome = interleave(sides, steps=10, rounds=rounds, warmup=warmup, turns=turns)
    report.failures += outcome.failures
    report.samples = dict(outcome.seconds)
    title = f"examples per second by the number of devices, batch {_BATCH_SIZE} for each"
    table = Table(title, ["devices", *programs, f"{OURS}, against one device"])
    chart = Chart(title, "examples/s", "lines", "devices", [Series(name) for name in programs])
    first: float | None = None
    for size in _list_sizes(settings):
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
    return report


STEP: Final = Case(
    "step", "a training step beside other libraries", _count_step_turns, _measure_step
)
SCALING: Final = Case(
    "scaling", "a training step on 1, 2, 4 .. devices", _count_scaling_turns, _measure_scaling
)
