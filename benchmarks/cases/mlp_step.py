"""A training step of the MLP on two replicas: distribax, hand-written JAX, TensorFlow and torch."""

from __future__ import annotations

from benchmarks.figures import Claim, Report, Spread, Table, ratio, ratio_of_medians
from benchmarks.harness import Outcome, Settings, Side, interleave

REPLICAS = 2
BATCH_SIZES = (256, 1024)
# The in-process collectives of JAX on CPU need more threads than this machine may have cores.
POOL = {"NPROC": "8"}

HAND = "JAX by hand (shard_map)"
OURS = "distribax, dx.Variable"
PYTREES = "distribax, pytrees"
TENSORFLOW = ("TensorFlow, Keras model", "TensorFlow, Keras optimizer", "TensorFlow, fused Adam op")
DDP = ("torch DDP, 1 thread", "torch DDP, default threads")

MAX_OF_HAND = 1.05
MIN_TENSORFLOW = 2.5
MIN_DDP = 1.2
# The libraries round differently, and the difference grows with the steps.
LOSS_TOLERANCE = 0.05


def sides(batch_size: int) -> list[Side]:
    common = ("--batch-size", str(batch_size), "--replicas", str(REPLICAS))
    variables = (*common, "--model", "variables")
    return [
        Side(HAND, "mlp_shard_map", common, environment=POOL),
        Side(OURS, "mlp_distribax", common, environment=POOL),
        Side(PYTREES, "mlp_distribax_pytrees", common, environment=POOL),
        Side(TENSORFLOW[0], "mlp_tensorflow", common, peer="tensorflow"),
        Side(TENSORFLOW[1], "mlp_tensorflow", variables, peer="tensorflow"),
        Side(
            TENSORFLOW[2], "mlp_tensorflow", (*variables, "--optimizer", "raw"), peer="tensorflow"
        ),
        Side(DDP[0], "mlp_torch", (*common, "--threads", "1"), peer="torch"),
        Side(DDP[1], "mlp_torch", common, peer="torch"),
    ]


def run(settings: Settings) -> Report:
    report = Report("mlp_step")
    for batch_size in BATCH_SIZES:
        outcome = interleave(
            sides(batch_size), steps=20, rounds=settings.pick(15, 4), warmup=settings.pick(20, 5)
        )
        report.failures += outcome.failures
        report.samples[f"batch {batch_size}"] = outcome.seconds
        report.tables.append(_table(batch_size, outcome))
        report.failures += _disagreements(batch_size, outcome)
        report.claims += _claims(batch_size, outcome)
    return report


def _table(batch_size: int, outcome: Outcome) -> Table:
    table = Table(
        f"global batch {batch_size}, {REPLICAS} replicas; ratios of time, by hand = 1",
        ["side", "ms a step [quartiles]", "examples/s", "ratio of medians", "ratio by rounds"],
    )
    for name, seconds in outcome.seconds.items():
        spread = Spread.of(seconds)
        row = [name, spread.show(1e3), f"{batch_size / spread.median:,.0f}", "", ""]
        if HAND in outcome.seconds:
            hand = outcome.seconds[HAND]
            row[-2:] = [f"{ratio_of_medians(seconds, hand):.2f}", ratio(seconds, hand).show()]
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
    claims: list[Claim] = []
    seconds = outcome.seconds
    if OURS not in seconds:
        return claims
    for name in (OURS, PYTREES):
        if HAND in seconds and name in seconds:
            value = ratio(seconds[name], seconds[HAND]).median
            what = f"{name}, time against hand-written, batch {batch_size}"
            claims.append(Claim(what, value, "<=", MAX_OF_HAND, "x"))
    # Against every way that a peer can be written, so that the best of them decides.
    for names, minimum in ((TENSORFLOW, MIN_TENSORFLOW), (DDP, MIN_DDP)):
        for name in names:
            if name in seconds:
                value = ratio(seconds[name], seconds[OURS]).median
                what = f"examples/s against {name}, batch {batch_size}"
                claims.append(Claim(what, value, ">=", minimum, "x"))
    return claims
