"""`import distribax` against `import jax`, in fresh processes."""

from __future__ import annotations

from benchmarks.fresh_processes import fresh
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Side

HAND, OURS = "import jax", "import distribax"
MAX_RATIO = 1.2


def run(settings: BenchSettings) -> Report:
    report = Report("import_time")
    table = ReportTable("first import", ["side", "ms [quartiles]", "modules", "ratio [quartiles]"])
    report.tables.append(table)
    outcome = fresh(
        [Side(HAND, "imports", ("jax",)), Side(OURS, "imports", ("distribax",))],
        rounds=settings.pick(15, 5),
    )
    report.failures += outcome.failures
    report.samples = dict(outcome.seconds)
    for name, seconds in outcome.seconds.items():
        modules = str(outcome.answers[name]["modules"])
        table.rows.append([name, Spread.of(seconds).show(1e3, 0), modules, ""])
    if len(outcome.seconds) == 2:
        against = compute_ratio(outcome.seconds[OURS], outcome.seconds[HAND])
        table.rows[-1][-1] = against.show()
        report.claims.append(
            Claim("import time against jax's", against.median, "<=", MAX_RATIO, "x")
        )
    return report
