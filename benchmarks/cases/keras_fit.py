"""Keras's `fit` under strategies, beside steps by hand, Keras without them, and TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.cases.comparison import BATCH_SIZES
from benchmarks.cases.mlp_step import POOL, REPLICAS
from benchmarks.cases.parameter_server import GUIDE, QUIET
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Side, interleave

HAND = "JAX by hand (shard_map)"
MIRRORED, ONE_DEVICE = "fit, MirroredStrategy", "fit, OneDeviceStrategy"
DATA_PARALLEL, PLAIN = "fit, Keras DataParallel", "fit, Keras alone on one device"
TENSORFLOW = "fit, TensorFlow MirroredStrategy"
UNDER = {
    MIRRORED: "mirrored",
    ONE_DEVICE: "one_device",
    DATA_PARALLEL: "data_parallel",
    PLAIN: "nothing",
}
UNEVEN = 255
EPOCH = 100
"""Steps of one `fit`. TensorFlow takes more than a second for each, beside its steps."""
SERVED, SERVED_TENSORFLOW = "fit, parameter servers", "fit, TensorFlow parameter servers"

# The step by hand has its batch on the devices already, and `fit` brings it there.
MAX_OF_HAND = {256: 1.08, 1024: 1.03}
MAX_OF_PLAIN = 1.03
MIN_DATA_PARALLEL = 1.1
MIN_TENSORFLOW = 1.3
MAX_PER_EXAMPLE = 1.5
MIN_SERVED = 2.5

Bound = tuple[str, str, str, float]
"""What is measured against what, and what the ratio of their times should be."""


def run(settings: BenchSettings) -> Report:
    report = Report("keras_fit")
    for batch_size in BATCH_SIZES:
        bounds = [
            (MIRRORED, HAND, "<=", MAX_OF_HAND[batch_size]),
            (DATA_PARALLEL, MIRRORED, ">=", MIN_DATA_PARALLEL),
            (ONE_DEVICE, PLAIN, "<=", MAX_OF_PLAIN),
            (TENSORFLOW, MIRRORED, ">=", MIN_TENSORFLOW),
        ]
        tensorflow = Side(
            TENSORFLOW, "keras_fit_tensorflow", _sizes(batch_size), "tensorflow", QUIET
        )
        sides = [*_sides("mlp", batch_size, UNDER), tensorflow]
        _measure(report, f"MLP, global batch {batch_size}", sides, bounds, settings, EPOCH)
    small = BATCH_SIZES[0]
    under = {name: UNDER[name] for name in (MIRRORED, DATA_PARALLEL)}
    sides = _sides("convnet", small, under)
    bounds = [(MIRRORED, HAND, "<=", MAX_OF_HAND[small])]
    _measure(report, f"convnet, global batch {small}", sides, bounds, settings, 20)
    _measure_uneven(report, settings)
    _measure_served(report, settings)
    return report


def _sizes(batch_size: int) -> tuple[str, ...]:
    return ("--batch-size", str(batch_size), "--replicas", str(REPLICAS))


def _sides(model: str, batch_size: int, under: Mapping[str, str]) -> list[Side]:
    common = _sizes(batch_size)
    return [
        Side(HAND, f"{model}_shard_map", common, environment=POOL),
        *(
            Side(
                name,
                "keras_fit_distribax",
                (*common, "--under", how, "--model", model),
                environment=POOL,
            )
            for name, how in under.items()
        ),
    ]


def _measure(
    report: Report,
    title: str,
    sides: list[Side],
    bounds: list[Bound],
    settings: BenchSettings,
    steps: int,
) -> None:
    rounds, warmup = settings.pick(9, 3), settings.pick(20, 5)
    outcome = interleave(sides, steps=steps, rounds=rounds, warmup=warmup)
    report.failures += outcome.failures
    _add(report, title, outcome.seconds)
    report.claims += _claims(title, outcome.seconds, bounds)


def _measure_uneven(report: Report, settings: BenchSettings) -> None:
    """Measures a batch that two replicas cannot share evenly, beside one that they can."""
    even = BATCH_SIZES[0]
    names = {size: f"{MIRRORED}, {size} examples" for size in (even, UNEVEN)}
    sides = [
        Side(
            name,
            "keras_fit_distribax",
            (*_sizes(size), "--under", "mirrored"),
            environment=POOL,
        )
        for size, name in names.items()
    ]
    rounds, warmup = settings.pick(9, 3), settings.pick(20, 5)
    outcome = interleave(sides, steps=EPOCH, rounds=rounds, warmup=warmup)
    report.failures += outcome.failures
    _add(report, "MLP, uneven batch", outcome.seconds)
    if len(outcome.seconds) == len(names):
        times = compute_ratio(outcome.seconds[names[UNEVEN]], outcome.seconds[names[even]]).median
        what = f"{MIRRORED}, an example of {UNEVEN} against one of {even}"
        value = times * even / UNEVEN
        report.claims.append(Claim(what, value, "<=", MAX_PER_EXAMPLE, "x"))


def _measure_served(report: Report, settings: BenchSettings) -> None:
    """Measures parameter servers; with them TensorFlow's `fit` is that of tf_keras."""
    loop = ("--work", "mlp", "--way", "keras")
    sides = [
        Side(SERVED, "ps_keras_fit_distribax"),
        Side(SERVED_TENSORFLOW, "ps_keras_fit_tensorflow", (), "tensorflow", QUIET),
        Side(GUIDE, "ps_tensorflow", loop, "tensorflow", QUIET),
    ]
    steps = settings.pick(500, 100)
    outcome = interleave(sides, steps=steps, rounds=settings.pick(15, 3), warmup=steps)
    report.failures += outcome.failures
    title = "MLP, SGD, batch 128, 2 workers and 1 server"
    _add(report, title, outcome.seconds)
    # Its own `fit` decides if it runs, else its loop.
    other = SERVED_TENSORFLOW if SERVED_TENSORFLOW in outcome.seconds else GUIDE
    report.claims += _claims(title, outcome.seconds, [(other, SERVED, ">=", MIN_SERVED)])


def _add(report: Report, title: str, seconds: Mapping[str, list[float]]) -> None:
    report.samples[title] = dict(seconds)
    table = ReportTable(title, ["side", "ms a step [quartiles]"])
    table.rows += [[name, Spread.of(each).show(1e3)] for name, each in seconds.items()]
    report.tables.append(table)


def _claims(title: str, seconds: Mapping[str, list[float]], bounds: list[Bound]) -> Iterator[Claim]:
    for ours, other, symbol, bound in bounds:
        if ours in seconds and other in seconds:
            value = compute_ratio(seconds[ours], seconds[other]).median
            yield Claim(f"{ours} against {other}, {title}", value, symbol, bound, "x")
