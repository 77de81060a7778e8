"""Keras's `fit` of the MLP under strategies, beside a step by hand and Keras without them."""

from __future__ import annotations

from benchmarks.cases.comparison import BATCH_SIZES
from benchmarks.cases.mlp_step import POOL, REPLICAS
from distribax.cli.bench.figures import Claim, Report, Spread, Table, ratio
from distribax.cli.bench.harness import Settings, Side, interleave

HAND = "JAX by hand (shard_map)"
MIRRORED, ONE_DEVICE = "fit, MirroredStrategy", "fit, OneDeviceStrategy"
DATA_PARALLEL, PLAIN = "fit, Keras DataParallel", "fit, Keras alone on one device"
UNDER = {
    MIRRORED: "mirrored",
    ONE_DEVICE: "one_device",
    DATA_PARALLEL: "data_parallel",
    PLAIN: "nothing",
}

# The step by hand has its batch on the devices already, and `fit` brings it there.
MAX_OF_HAND = {256: 1.08, 1024: 1.03}
MAX_OF_PLAIN = 1.03
MIN_DATA_PARALLEL = 1.1


def _sides(batch_size: int) -> list[Side]:
    common = ("--batch-size", str(batch_size), "--replicas", str(REPLICAS))
    return [
        Side(HAND, "mlp_shard_map", common, environment=POOL),
        *(
            Side(name, "mlp_keras_fit", (*common, "--under", under), environment=POOL)
            for name, under in UNDER.items()
        ),
    ]


def run(settings: Settings) -> Report:
    report = Report("keras_fit")
    for batch_size in BATCH_SIZES:
        outcome = interleave(
            _sides(batch_size), steps=20, rounds=settings.pick(15, 4), warmup=settings.pick(20, 5)
        )
        report.failures += outcome.failures
        seconds = outcome.seconds
        report.samples[f"batch {batch_size}"] = seconds
        table = Table(f"global batch {batch_size}", ["side", "ms a step [quartiles]"])
        table.rows += [[name, Spread.of(each).show(1e3)] for name, each in seconds.items()]
        report.tables.append(table)
        for ours, other, symbol, bound in (
            (MIRRORED, HAND, "<=", MAX_OF_HAND[batch_size]),
            (ONE_DEVICE, PLAIN, "<=", MAX_OF_PLAIN),
            (DATA_PARALLEL, MIRRORED, ">=", MIN_DATA_PARALLEL),
        ):
            if ours in seconds and other in seconds:
                value = ratio(seconds[ours], seconds[other]).median
                claim = f"{ours} against {other}, batch {batch_size}"
                report.claims.append(Claim(claim, value, symbol, bound, "x"))
    return report
