"""A training step of the MLP on two processes with one CPU device each, and how to pack for it."""

from __future__ import annotations

from benchmarks.cases.comparison import Comparison, samples_of_ways
from distribax.cli.bench.figures import Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Side

PROCESSES = 2
# The two processes are meant for two cores: each library gets one thread a process to compute.
ONE_THREAD = {"PJRT_NPROC": "1"}

HAND = "JAX by hand (jax.distributed)"
OURS = "distribax, dx.Variable"
TENSORFLOW = ("TensorFlow, Keras", "TensorFlow, fused Adam op", "TensorFlow, default threads")
DDP = ("torch DDP", "torch DDP, fused Adam")

MIN_TENSORFLOW = 1.3
MIN_DDP = 1.1

PACKS = ("0 0", "64 0", "2048 4096", "1048576 0")
"""How large a tensor in a pack and the pack itself may be, in KiB."""
MIXES = ("24x128", "24x1024", "24x4096", "24x16384", "24x65536", "6x262144", "4x2097152", "mlp")
POOLS = (1, 4)


def sides(batch_size: int) -> list[Side]:
    common = ("--batch-size", str(batch_size), "--replicas", str(PROCESSES))
    one = (*common, "--threads", "1")
    fused = ("--model", "variables", "--optimizer", "raw")
    return [
        Side(HAND, "multi_worker_jax", common, environment=ONE_THREAD),
        Side(OURS, "multi_worker_distribax", common, environment=ONE_THREAD),
        Side(TENSORFLOW[0], "multi_worker_tensorflow", one, peer="tensorflow"),
        Side(TENSORFLOW[1], "multi_worker_tensorflow", (*one, *fused), peer="tensorflow"),
        Side(TENSORFLOW[2], "multi_worker_tensorflow", (*common, *fused), peer="tensorflow"),
        Side(DDP[0], "mlp_torch", one, peer="torch"),
        Side(DDP[1], "mlp_torch", (*one, "--fused"), peer="torch"),
    ]


def step(settings: BenchSettings) -> Report:
    comparison = Comparison(
        f"{PROCESSES} processes; ratios of time, distribax = 1",
        hand=HAND,
        ours=(OURS,),
        base=OURS,
        peers={TENSORFLOW: MIN_TENSORFLOW, DDP: MIN_DDP},
    )
    return comparison.measure("multi_worker", sides, 21, settings)


def packing(settings: BenchSettings) -> Report:
    """Up to which size does a tensor belong in a pack? The answer sets distribax's default."""
    report = Report("multi_worker_packing")
    ways = [f"{name} {limits}" for name in ("all-reduce", "exchange") for limits in PACKS]
    for pool in POOLS:
        table = ReportTable(
            f"{PROCESSES} processes, pools of {pool}; time to sum all tensors of a mix, each by an "
            "all-reduce, and relative to that otherwise (KiB of a tensor in a pack, and of a pack)",
            ["mix (count x elements)", f"{ways[0]}, µs [quartiles]", *ways[1:]],
        )
        report.tables.append(table)
        side = Side(
            f"pools of {pool}",
            "multi_worker_packing",
            ("--replicas", str(PROCESSES), "--mixes", *MIXES, "--ways", *ways),
            environment={"PJRT_NPROC": str(pool)},
        )
        samples = samples_of_ways(side, settings.pick(15, 4), report)
        if samples is None:
            continue
        for mix in MIXES:
            base = samples[f"{mix} {ways[0]}"]
            others = [
                f"{compute_ratio(samples[f'{mix} {way}'], base).median:.2f}" for way in ways[1:]
            ]
            table.rows.append([mix, Spread.of(base).show(1e6, 0), *others])
    return report
