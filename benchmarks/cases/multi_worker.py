"""A training step of the MLP on two processes with one CPU device each, and how to pack for it."""

from __future__ import annotations

from benchmarks.figures import Claim, Report, Spread, Table, ratio, ratio_of_medians
from benchmarks.harness import Outcome, Process, Settings, Side, SideError, interleave

PROCESSES = 2
BATCH_SIZES = (256, 1024)
# The two processes are meant for two cores: each library gets one thread a process to compute.
ONE_THREAD = {"PJRT_NPROC": "1"}

HAND = "JAX by hand (jax.distributed)"
OURS = "distribax, dx.Variable"
TENSORFLOW = ("TensorFlow, Keras", "TensorFlow, fused Adam op", "TensorFlow, default threads")
DDP = ("torch DDP", "torch DDP, fused Adam")

MAX_OF_HAND = 1.05
MIN_TENSORFLOW = 1.3
MIN_DDP = 1.1
# The libraries round differently, and the difference grows with the steps.
LOSS_TOLERANCE = 0.05

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


def step(settings: Settings) -> Report:
    report = Report("multi_worker")
    for batch_size in BATCH_SIZES:
        outcome = interleave(
            sides(batch_size), steps=20, rounds=settings.pick(21, 4), warmup=settings.pick(20, 5)
        )
        report.failures += outcome.failures
        report.samples[f"batch {batch_size}"] = outcome.seconds
        report.tables.append(_step_table(batch_size, outcome))
        report.failures += _disagreements(batch_size, outcome)
        report.claims += _claims(batch_size, outcome)
    return report


def _step_table(batch_size: int, outcome: Outcome) -> Table:
    table = Table(
        f"global batch {batch_size}, {PROCESSES} processes; ratios of time, distribax = 1",
        ["side", "ms a step [quartiles]", "examples/s", "ratio of medians", "ratio by rounds"],
    )
    for name, seconds in outcome.seconds.items():
        spread = Spread.of(seconds)
        row = [name, spread.show(1e3), f"{batch_size / spread.median:,.0f}", "", ""]
        if OURS in outcome.seconds:
            ours = outcome.seconds[OURS]
            row[-2:] = [f"{ratio_of_medians(seconds, ours):.2f}", ratio(seconds, ours).show()]
        table.rows.append(row)
    return table


def _disagreements(batch_size: int, outcome: Outcome) -> list[str]:
    """Sides that did not train to the same loss have not done the same work."""
    if HAND not in outcome.answers:
        return []
    expected = outcome.answers[HAND]["loss"]
    return [
        f"{name}, batch {batch_size}: the loss is {answer['loss']:.3g}, by hand {expected:.3g}"
        for name, answer in outcome.answers.items()
        if abs(answer["loss"] - expected) > LOSS_TOLERANCE * expected
    ]


def _claims(batch_size: int, outcome: Outcome) -> list[Claim]:
    seconds = outcome.seconds
    if OURS not in seconds:
        return []
    claims: list[Claim] = []
    if HAND in seconds:
        value = ratio(seconds[OURS], seconds[HAND]).median
        what = f"time against hand-written, batch {batch_size}"
        claims.append(Claim(what, value, "<=", MAX_OF_HAND, "x"))
    # Against every way that a peer can be written, so that the best of them decides.
    for names, minimum in ((TENSORFLOW, MIN_TENSORFLOW), (DDP, MIN_DDP)):
        for name in names:
            if name in seconds:
                value = ratio(seconds[name], seconds[OURS]).median
                what = f"examples/s against {name}, batch {batch_size}"
                claims.append(Claim(what, value, ">=", minimum, "x"))
    return claims


def packing(settings: Settings) -> Report:
    """Up to which size does a tensor belong in a pack? The answer sets distribax's default."""
    report = Report("multi_worker_packing")
    ways = [f"{name} {limits}" for name in ("all-reduce", "exchange") for limits in PACKS]
    for pool in POOLS:
        table = Table(
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
        samples: dict[str, list[float]] = {}
        try:
            with Process(side) as process:
                process.ready()
                for _ in range(settings.pick(15, 4)):
                    for name, seconds in process.run(10)["ways"].items():
                        samples.setdefault(name, []).append(seconds)
        except SideError as error:
            report.failures.append(str(error))
            continue
        report.samples[side.name] = samples
        for mix in MIXES:
            base = samples[f"{mix} {ways[0]}"]
            others = [f"{ratio(samples[f'{mix} {way}'], base).median:.2f}" for way in ways[1:]]
            table.rows.append([mix, Spread.of(base).show(1e6, 0), *others])
    return report
