"""What a training loop loses to its input, and whether a long loop keeps its memory."""

from __future__ import annotations

from benchmarks.cases.mlp_step import POOL, REPLICAS
from benchmarks.figures import Claim, Report, Spread, Table, ratio
from benchmarks.harness import Process, Settings, Side, SideError, interleave

FIXED, FED = "one batch that stays", "distributed data set"
# The MLP's step takes about 5 ms with this batch on the machine of docs/benchmarks.md.
LOOP_BATCH_SIZE = 192
MAX_LOSS = 1.03

NUM_BATCHES = 10_000
NUM_PARTS = 10
MAX_GROWTH_MB = 10.0


def loop(settings: Settings) -> Report:
    """A loop with a step of 5 ms: the share of its time that goes to input."""
    report = Report("input_loop")
    table = Table("a loop's time a step", ["step", "input", "ms a step [quartiles]", "ratio"])
    report.tables.append(table)
    for step in ("mlp", "wait"):
        common = ("--replicas", str(REPLICAS), "--batch-size", str(LOOP_BATCH_SIZE), "--step", step)
        outcome = interleave(
            [
                Side(FIXED, "loop_distribax", (*common, "--feed", "fixed"), environment=POOL),
                Side(FED, "loop_distribax", (*common, "--feed", "dataset"), environment=POOL),
            ],
            steps=100,
            rounds=settings.pick(15, 5),
            warmup=50,
        )
        report.failures += outcome.failures
        report.samples[step] = outcome.seconds
        for name, seconds in outcome.seconds.items():
            table.rows.append([step, name, Spread.of(seconds).show(1e3), ""])
        if len(outcome.seconds) == 2:
            against = ratio(outcome.seconds[FED], outcome.seconds[FIXED])
            table.rows[-1][-1] = against.show(1, 3)
            what = f"time of the fed loop against the unfed, step {step}"
            report.claims.append(Claim(what, against.median, "<=", MAX_LOSS, "x"))
    return report


def memory(settings: Settings) -> Report:
    """10,000 batches through one process: its memory must not grow."""
    report = Report("input_leak")
    total = settings.pick(NUM_BATCHES, NUM_BATCHES // 10)
    side = Side("distribax", "input_distribax", ("--replicas", str(REPLICAS)), environment=POOL)
    resident: list[float] = []
    try:
        with Process(side) as process:
            process.ready()
            for _ in range(NUM_PARTS):
                resident.append(process.run(total // NUM_PARTS)["resident"] / 1e6)
    except SideError as error:
        report.failures.append(str(error))
        return report
    report.samples["resident MB"] = resident
    table = Table(f"resident memory over {total:,} batches", ["after batches", "MB"])
    for number, megabytes in enumerate(resident, 1):
        table.rows.append([f"{number * total // NUM_PARTS:,}", f"{megabytes:.1f}"])
    report.tables.append(table)
    # The first part fills caches and pools; a leak goes on after it.
    growth = resident[-1] - resident[0]
    report.claims.append(Claim("growth after the first tenth", growth, "<=", MAX_GROWTH_MB, " MB"))
    return report
