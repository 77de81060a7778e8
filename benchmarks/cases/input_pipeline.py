"""Batches from memory and from TFRecord files to two replicas: distribax against TensorFlow."""

from __future__ import annotations

from benchmarks import RESULTS
from benchmarks.cases.mlp_step import POOL, REPLICAS
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Measurement, Side, interleave
from distribax.cli.bench.sides import input_problem

OURS = "distribax"
TENSORFLOW = "TensorFlow"
PYTHON, NATIVE = "TensorFlow, Python map", "TensorFlow, native ops"

MIN_MEMORY = 2.0
MIN_PYTHON = 1.0
MIN_NATIVE = 0.5

FOLDER = RESULTS / "tfrecords"
NUM_RECORDS = input_problem.NUM_FILES * input_problem.RECORDS_PER_FILE


def batches_of(num_examples: int) -> int:
    return -(-num_examples // input_problem.BATCH_SIZE)


def memory(settings: BenchSettings) -> Report:
    """60,000 x 784 float32 in memory, shuffled, in batches of 256."""
    report = Report("input_memory")
    replicas = ("--replicas", str(REPLICAS))
    outcome = interleave(
        [
            Side(OURS, "input_distribax", replicas, environment=POOL),
            Side(TENSORFLOW, "input_tensorflow", replicas, peer="tensorflow"),
        ],
        # Whole epochs, so that filling the shuffle's buffer is in every round alike.
        steps=batches_of(input_problem.NUM_IMAGES),
        rounds=settings.pick(11, 3),
        warmup=batches_of(input_problem.NUM_IMAGES),
    )
    _fill(report, outcome, "in-memory arrays, shuffle and batch 256, one epoch")
    _claim(report, outcome, TENSORFLOW, MIN_MEMORY)
    return report


def records(settings: BenchSettings) -> Report:
    """100,000 TFRecords, decoded and reshaped in a map, in batches of 256."""
    report = Report("input_tfrecord")
    input_problem.write_records(FOLDER)
    common = ("--replicas", str(REPLICAS), "--folder", str(FOLDER), "--source")
    outcome = interleave(
        [
            Side(OURS, "input_distribax", (*common, "records"), environment=POOL),
            Side(PYTHON, "input_tensorflow", (*common, "python"), peer="tensorflow"),
            Side(NATIVE, "input_tensorflow", (*common, "native"), peer="tensorflow"),
        ],
        steps=batches_of(NUM_RECORDS),
        rounds=settings.pick(7, 2),
        warmup=batches_of(NUM_RECORDS) if not settings.quick else 10,
    )
    _fill(report, outcome, "100,000 TFRecords, decode and reshape, batch 256, one epoch")
    _claim(report, outcome, PYTHON, MIN_PYTHON)
    _claim(report, outcome, NATIVE, MIN_NATIVE)
    return report


def _fill(report: Report, outcome: Measurement, title: str) -> None:
    report.failures += outcome.failures
    report.samples = dict(outcome.seconds)
    table = ReportTable(title, ["side", "ms a batch [quartiles]", "batches/s", "examples/s"])
    report.tables.append(table)
    for name, seconds in outcome.seconds.items():
        spread = Spread.of(seconds)
        examples = input_problem.BATCH_SIZE / spread.median
        table.rows.append(
            [name, spread.show(1e3, 3), f"{1 / spread.median:,.0f}", f"{examples:,.0f}"]
        )
    # All sides must have seen the same examples, whatever their order.
    seen = {(answer["examples"], answer["checksum"]) for answer in outcome.answers.values()}
    if len(seen) > 1:
        report.failures.append(f"the sides saw different data: {outcome.answers}")


def _claim(report: Report, outcome: Measurement, peer: str, minimum: float) -> None:
    if OURS in outcome.seconds and peer in outcome.seconds:
        value = compute_ratio(outcome.seconds[peer], outcome.seconds[OURS]).median
        report.claims.append(Claim(f"batches/s against {peer}", value, ">=", minimum, "x"))
