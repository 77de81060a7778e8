"""Does packing small tensors into one all-reduce pay? The answer sets distribax's default."""

from __future__ import annotations

from benchmarks.cases.comparison import samples_of_ways
from distribax.cli.bench.figures import Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Side

REPLICAS = (2, 4, 8)
WAYS = ("tuple", "separate", "packed", "packed-small")
MIXES = (
    "6x128",
    "24x128",
    "96x128",
    "24x1024",
    "24x4096",
    "24x16384",
    "24x65536",
    "mlp",
    "resnet",
)


def run(settings: BenchSettings) -> Report:
    report = Report("packing")
    table = ReportTable(
        "time to sum all tensors of a mix, as a tuple and, relative to that, otherwise",
        ["mix (count x elements)", "replicas", "tuple, µs [quartiles]", *WAYS[1:]],
    )
    report.tables.append(table)
    for replicas in REPLICAS:
        side = Side(
            f"{replicas} replicas",
            "packing",
            ("--replicas", str(replicas), *MIXES),
            environment={"NPROC": str(max(8, 4 * replicas))},
        )
        samples = samples_of_ways(side, settings.pick(15, 5), report)
        if samples is None:
            continue
        for mix in MIXES:
            base = samples[f"{mix} tuple"]
            others = [compute_ratio(samples[f"{mix} {way}"], base).show() for way in WAYS[1:]]
            table.rows.append([mix, str(replicas), Spread.of(base).show(1e6, 0), *others])
    return report
