"""What a training loop loses to its input, and whether a long loop keeps its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from benchmarks.cases.mlp_step import POOL, REPLICAS
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Process, Side, SideError, interleave

RESIDENT, FED = "batches on the devices", "distributed data set"
# The MLP's step takes about 5 ms with this batch on the machine of docs/benchmarks.md.
LOOP_BATCH_SIZE = 192
# XLA's flag for matrix products on one thread does not reach those that it computes by YNNPACK.
ONE_CORE = {"NPROC": "1"}


@dataclass(frozen=True)
class LoopStep:
    """A step to feed, and how many times as long the fed loop may take as the unfed."""

    name: str
    step: str
    max_loss: float
    replicas: int = REPLICAS
    environment: Mapping[str, str] = field(default_factory=lambda: POOL)


LOOP_STEPS = (
    # The input thread takes its time from the replicas.
    LoopStep("mlp on all cores", "mlp", 1.10),
    # Stands for a machine with a core to spare.
    LoopStep("mlp on one core", "mlp", 1.03, replicas=1, environment=ONE_CORE),
    LoopStep("wait", "wait", 1.03),
)

NUM_BATCHES = 10_000
NUM_PARTS = 10
# The allocator's pools fill up during these; they are not counted.
SETTLING_BATCHES = 5_000
LEAK_SIDES = {"a new iterator each epoch": (), "one endless iterator": ("--endless",)}
MAX_GROWTH_MB = 10.0


def loop(settings: BenchSettings) -> Report:
    """A loop with a step of 5 ms: the share of its time that goes to input."""
    report = Report("input_loop")
    table = ReportTable(
        "a loop's time per step", ["step", "input", "ms per step [quartiles]", "ratio"]
    )
    report.tables.append(table)
    for step in LOOP_STEPS:
        common = (
            *("--replicas", str(step.replicas)),
            *("--batch-size", str(LOOP_BATCH_SIZE)),
            *("--step", step.step),
        )
        outcome = interleave(
            [
                Side(name, "loop_distribax", (*common, "--feed", feed), None, step.environment)
                for name, feed in ((RESIDENT, "resident"), (FED, "dataset"))
            ],
            steps=100,
            rounds=settings.pick(15, 5),
            warmup=50,
        )
        report.failures += outcome.failures
        report.samples[step.name] = outcome.seconds
        for name, seconds in outcome.seconds.items():
            table.rows.append([step.name, name, Spread.of(seconds).show(1e3), ""])
        if len(outcome.seconds) == 2:
            against = compute_ratio(outcome.seconds[FED], outcome.seconds[RESIDENT])
            table.rows[-1][-1] = against.show(1, 3)
            what = f"time of the fed loop against the unfed, step {step.name}"
            report.claims.append(Claim(what, against.median, "<=", step.max_loss, "x"))
    return report


def memory(settings: BenchSettings) -> Report:
    """10,000 batches through one process: its memory must not grow."""
    report = Report("input_leak")
    total = settings.pick(NUM_BATCHES, NUM_BATCHES // 10)
    held: dict[str, list[float]] = {}
    for name, arguments in LEAK_SIDES.items():
        side = Side(
            name,
            "input_distribax",
            ("--replicas", str(REPLICAS), "--weigh", *arguments),
            environment=POOL,
        )
        try:
            with Process(side) as process:
                process.wait_until_ready()
                process.run(settings.pick(SETTLING_BATCHES, SETTLING_BATCHES // 10))
                held[name] = [
                    process.run(total // NUM_PARTS)["resident"] / 1e6 for _ in range(NUM_PARTS)
                ]
        except SideError as error:
            report.failures.append(str(error))
    report.samples["resident MB"] = held
    table = ReportTable(f"resident memory in MB over {total:,} batches", ["after batches", *held])
    for number in range(NUM_PARTS):
        parts = [f"{megabytes[number]:.1f}" for megabytes in held.values()]
        table.rows.append([f"{(number + 1) * total // NUM_PARTS:,}", *parts])
    report.tables.append(table)
    for name, megabytes in held.items():
        # Medians of the halves: a single reading wavers by some megabytes, a leak moves both.
        growth = median(megabytes[NUM_PARTS // 2 :]) - median(megabytes[: NUM_PARTS // 2])
        what = f"growth from the first half to the second, {name}"
        report.claims.append(Claim(what, growth, "<=", MAX_GROWTH_MB, " MB"))
    return report
