"""Training steps that are not compiled, on two replicas: distribax and TensorFlow."""

from __future__ import annotations

from benchmarks.cases.mlp_step import OURS, POOL, REPLICAS, TENSORFLOW
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Side, interleave

NNX = "distribax, Flax NNX"
MIN_TENSORFLOW = 1.8
# The MLP of the other benchmarks, and one whose time is all overhead.
SIZES = {
    "784-512-512-10, batch 256": ((784, 512, 512, 10), 256),
    "8-8-2, batch 16": ((8, 8, 2), 16),
}


def sides(layers: tuple[int, ...], batch_size: int) -> list[Side]:
    sizes = ("--layers", *map(str, layers), "--batch-size", str(batch_size))
    common = (*sizes, "--replicas", str(REPLICAS), "--eager")
    variables = (*common, "--model", "variables")
    raw = (*variables, "--optimizer", "raw")
    return [
        Side(OURS, "mlp_distribax", common, environment=POOL),
        Side(NNX, "mlp_distribax_nnx", common, environment=POOL),
        Side(TENSORFLOW[0], "mlp_tensorflow", common, peer="tensorflow"),
        Side(TENSORFLOW[1], "mlp_tensorflow", variables, peer="tensorflow"),
        Side(TENSORFLOW[2], "mlp_tensorflow", raw, peer="tensorflow"),
    ]


def run(settings: BenchSettings) -> Report:
    report = Report("eager_step")
    for title, size in SIZES.items():
        outcome = interleave(
            sides(*size), steps=10, rounds=settings.pick(15, 4), warmup=settings.pick(10, 3)
        )
        report.failures += outcome.failures
        report.samples[title] = outcome.seconds
        table = ReportTable(
            f"{title}, {REPLICAS} replicas", ["side", "ms a step [quartiles]", "ratio"]
        )
        report.tables.append(table)
        ours = outcome.seconds.get(OURS)
        for name, seconds in outcome.seconds.items():
            against = "" if ours is None else compute_ratio(seconds, ours).show()
            table.rows.append([name, Spread.of(seconds).show(1e3), against])
        for name in TENSORFLOW:
            if ours is not None and name in outcome.seconds:
                value = compute_ratio(outcome.seconds[name], ours).median
                what = f"steps/s against {name}, {title}"
                report.claims.append(Claim(what, value, ">=", MIN_TENSORFLOW, "x"))
    return report
