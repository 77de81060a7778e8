"""What a call of a compiled step costs the host, above the bare jitted call."""

from __future__ import annotations

from benchmarks.cases.mlp_step import POOL
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread
from distribax.cli.bench.harness import BenchSettings, Side, interleave

REPLICAS = (1, 2)
HAND, OURS = "bare jitted call", "distribax"
MAX_MICROSECONDS = 60.0


def run(settings: BenchSettings) -> Report:
    report = Report("call_overhead")
    table = ReportTable(
        "processor time of the calling thread, 6 variables",
        ["side", "replicas", "µs a call [quartiles]", "above bare"],
    )
    report.tables.append(table)
    for replicas in REPLICAS:
        arguments = ("--replicas", str(replicas))
        outcome = interleave(
            [
                Side(HAND, "call_shard_map", arguments, environment=POOL),
                Side(OURS, "call_distribax", arguments, environment=POOL),
            ],
            steps=500,
            rounds=settings.pick(15, 5),
            warmup=100,
        )
        report.failures += outcome.failures
        report.samples[f"{replicas} replicas"] = outcome.seconds
        for name, seconds in outcome.seconds.items():
            table.rows.append([name, str(replicas), Spread.of(seconds).show(1e6, 1), ""])
        if len(outcome.seconds) == 2:
            pairs = zip(outcome.seconds[OURS], outcome.seconds[HAND], strict=True)
            above = Spread.of([ours - bare for ours, bare in pairs])
            table.rows[-1][-1] = above.show(1e6, 1)
            what = f"processor time above the bare call, {replicas} replicas"
            report.claims.append(Claim(what, above.median * 1e6, "<=", MAX_MICROSECONDS, " µs"))
    return report
