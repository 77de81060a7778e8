"""Tracing and compiling the training step, in fresh processes, for few and many replicas."""

from __future__ import annotations

from benchmarks.fresh_processes import fresh
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Side

REPLICAS = (2, 4, 8, 16, 32)
HAND, OURS = "by hand", "distribax"
MAX_RATIO = 1.15


def run(settings: BenchSettings) -> Report:
    report = Report("compile_time")
    table = ReportTable(
        "first call of the MLP step: trace, compile, run once",
        ["replicas", "by hand, ms [quartiles]", "distribax, ms [quartiles]", "ratio [quartiles]"],
    )
    report.tables.append(table)
    for replicas in REPLICAS[:: settings.pick(1, 4)]:
        arguments = ("--replicas", str(replicas), "--batch-size", str(4 * replicas))
        pool = {"NPROC": str(max(8, 4 * replicas))}
        outcome = fresh(
            [
                Side(HAND, "mlp_shard_map", arguments, environment=pool),
                Side(OURS, "mlp_distribax", arguments, environment=pool),
            ],
            rounds=settings.pick(15, 3),
        )
        report.failures += outcome.failures
        report.samples[f"{replicas} replicas"] = outcome.seconds
        row = [str(replicas)]
        for name in (HAND, OURS):
            seconds = outcome.seconds.get(name)
            row.append(Spread.of(seconds).show(1e3, 0) if seconds else "-")
        row.append("-")
        if len(outcome.seconds) == 2:
            against = compute_ratio(outcome.seconds[OURS], outcome.seconds[HAND])
            row[-1] = against.show()
            what = f"first call against hand-written, {replicas} replicas"
            report.claims.append(Claim(what, against.median, "<=", MAX_RATIO, "x"))
        table.rows.append(row)
    return report
