"""A last batch that the replicas cannot share evenly: its step beside that of a full batch."""

from __future__ import annotations

from benchmarks.cases.mlp_step import POOL, REPLICAS
from benchmarks.fresh_processes import fresh
from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Side, interleave

FULL = 256
UNEVEN = (255, 161)
MODULES = {
    "distribax, dx.Variable": "mlp_distribax",
    "distribax, pytrees": "mlp_distribax_pytrees",
    "distribax, Flax NNX": "mlp_nnx",
}
OURS = "distribax, dx.Variable"
TENSORFLOW = {
    "TensorFlow, Keras model": (),
    "TensorFlow, fused Adam op": ("--model", "variables", "--optimizer", "raw"),
}

MAX_PER_EXAMPLE = 1.5
MIN_TENSORFLOW = 1.0


def _sides(batch_size: int) -> list[Side]:
    common = ("--batch-size", str(batch_size), "--replicas", str(REPLICAS))
    return [
        *(
            Side(_name(what, batch_size), module, common, environment=POOL)
            for what, module in MODULES.items()
        ),
        *(
            Side(_name(what, batch_size), "mlp_tensorflow", (*common, *more), peer="tensorflow")
            for what, more in TENSORFLOW.items()
        ),
    ]


def _name(what: str, batch_size: int) -> str:
    return f"{what}, {batch_size} examples"


def run(settings: BenchSettings) -> Report:
    report = Report("uneven_batch")
    sizes = (FULL, *UNEVEN)
    sides = [side for size in sizes for side in _sides(size)]
    steps = interleave(sides, steps=10, rounds=settings.pick(15, 4), warmup=settings.pick(10, 3))
    first = fresh(
        [side for side in _sides(UNEVEN[0]) if side.name.startswith((OURS, "TensorFlow"))],
        rounds=settings.pick(5, 2),
    )
    report.failures += [*steps.failures, *first.failures]
    report.samples.update(steps=steps.seconds, first_call=first.seconds)
    table = ReportTable(
        f"{REPLICAS} replicas; time for an example, that of a full batch = 1",
        ["side", *(f"{size} examples, ms [quartiles]" for size in sizes), "ratios"],
    )
    report.tables.append(table)
    for what in (*MODULES, *TENSORFLOW):
        times = [steps.seconds.get(_name(what, size)) for size in sizes]
        row = [what, *("-" if each is None else Spread.of(each).show(1e3) for each in times), ""]
        ratios = []
        for size, seconds in zip(UNEVEN, times[1:], strict=True):
            if seconds is None or times[0] is None:
                continue
            value = compute_ratio(seconds, times[0]).median * FULL / size
            ratios.append(f"{value:.2f}")
            if what in MODULES:
                claim = f"{what}, an example of {size} against one of {FULL}"
                report.claims.append(Claim(claim, value, "<=", MAX_PER_EXAMPLE, "x"))
            ours = steps.seconds.get(_name(OURS, size))
            if what in TENSORFLOW and ours is not None:
                faster = compute_ratio(seconds, ours).median
                claim = f"examples/s against {what}, {size} examples"
                report.claims.append(Claim(claim, faster, ">=", MIN_TENSORFLOW, "x"))
        row[-1] = ", ".join(ratios)
        table.rows.append(row)
    table = ReportTable(f"first call with {UNEVEN[0]} examples", ["side", "ms [quartiles]"])
    report.tables.append(table)
    for name, seconds in first.seconds.items():
        table.rows.append([name, Spread.of(seconds).show(1e3, 0)])
    return report
