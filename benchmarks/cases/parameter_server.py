"""Parameter servers, against TensorFlow's: training, scheduling, and a large table of rows.

Both libraries run a coordinator, two workers and one server (two for the table) on this machine,
each a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import BenchSettings, Measurement, Side, interleave

OURS = "distribax"
COMPILED = "distribax, dx.function"
GUIDE = "TensorFlow, Keras optimizer"
"""As TensorFlow's guide writes it; the other ways are faster."""
TENSORFLOW = {
    GUIDE: ("--way", "keras"),
    "TensorFlow, Keras optimizer, 1 thread": ("--way", "keras", "--threads", "1"),
    "TensorFlow, own operation": ("--way", "raw"),
    "TensorFlow, own operation, 1 thread": ("--way", "raw", "--threads", "1"),
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}

NUM_ROWS = (10_000, 1_000_000)

MIN_MLP_AGAINST_GUIDE = 3.0
MIN_MLP = 2.8
MIN_TRIVIAL = 4.0
# The small table fits into the processor's caches and the large one does not.
MAX_GROWTH = 1.2
# Workers do not wait for each other, so that no two runs are the same.
TOLERANCE = 0.1


def _tensorflow(name: str, work: str, *arguments: str) -> Side:
    given = ("--work", work, *arguments)
    return Side(name, "ps_tensorflow", given, peer="tensorflow", environment=QUIET)


def mlp(settings: BenchSettings) -> Report:
    """Steps of the MLP per second, through `coordinator.schedule`."""
    report = Report("ps_mlp")
    sides = [Side(OURS, "ps_distribax", ("--work", "mlp"))]
    sides += [_tensorflow(name, "mlp", *way) for name, way in TENSORFLOW.items()]
    outcome = _measured(report, sides, settings, steps=500, rounds=(15, 3))
    report.tables.append(_table("MLP 784-512-512-10, SGD, batch 128", "steps/s", outcome))
    report.claims += _claims("steps/s", outcome, OURS, MIN_MLP, {GUIDE: MIN_MLP_AGAINST_GUIDE})
    report.failures += _disagreements(outcome, "loss")
    return report


def trivial(settings: BenchSettings) -> Report:
    """Functions that do nothing, per second."""
    report = Report("ps_trivial")
    sides = [
        Side(OURS, "ps_distribax", ("--work", "trivial")),
        Side(COMPILED, "ps_distribax", ("--work", "trivial", "--way", "compiled")),
        _tensorflow("TensorFlow", "trivial"),
        _tensorflow("TensorFlow, 1 thread", "trivial", "--threads", "1"),
    ]
    outcome = _measured(report, sides, settings, steps=2000, rounds=(15, 3))
    report.tables.append(_table("functions that return 1", "functions/s", outcome))
    for ours in (OURS, COMPILED):
        report.claims += _claims("functions/s", outcome, ours, MIN_TRIVIAL)
    return report


def embedding(settings: BenchSettings) -> Report:
    """Steps that look up and update 4,096 rows of a table of two sizes."""
    report = Report("ps_embedding")
    small, large = NUM_ROWS
    sides: list[Side] = []
    for rows in NUM_ROWS:
        size = ("--rows", str(rows))
        sides.append(Side(_sized(OURS, rows), "ps_distribax", ("--work", "embedding", *size)))
        for name, way in TENSORFLOW.items():
            if "1 thread" in name:
                sides.append(_tensorflow(_sized(name, rows), "embedding", *way, *size))
    outcome = _measured(report, sides, settings, steps=100, rounds=(15, 3))
    report.tables.append(_table("4,096 rows of 64 numbers a step, 2 servers", "steps/s", outcome))
    names = [_sized(OURS, rows) for rows in (large, small)]
    if all(name in outcome.seconds for name in names):
        growth = compute_ratio(*(outcome.seconds[name] for name in names)).median
        what = f"time a step, {large:,} rows against {small:,}"
        report.claims.append(Claim(what, growth, "<=", MAX_GROWTH, "x"))
    for rows in NUM_ROWS:
        own = {name for name in outcome.seconds if name.endswith(_sized("", rows))}
        report.failures += _disagreements(outcome, "mean", own)
    return report


def _sized(name: str, rows: int) -> str:
    return f"{name}, {rows:,} rows"


def _measured(
    report: Report,
    sides: Sequence[Side],
    settings: BenchSettings,
    *,
    steps: int,
    rounds: tuple[int, int],
) -> Measurement:
    outcome = interleave(sides, steps=steps, rounds=settings.pick(*rounds), warmup=steps)
    report.failures += outcome.failures
    report.samples = outcome.seconds
    return outcome


def _table(title: str, rate: str, outcome: Measurement) -> ReportTable:
    first = next(iter(outcome.seconds), "")
    columns = ["side", "ms, quartiles", rate, f"time against {first}, quartiles"]
    table = ReportTable(title, columns)
    for name, seconds in outcome.seconds.items():
        spread = Spread.of(seconds)
        against = compute_ratio(seconds, outcome.seconds[first]).show()
        table.rows.append([name, spread.show(1e3, 3), f"{1 / spread.median:,.0f}", against])
    return table


def _claims(
    what: str,
    outcome: Measurement,
    ours: str,
    minimum: float,
    others: Mapping[str, float] | None = None,
) -> list[Claim]:
    """Against every way that the peer can be run; `others` have a minimum of their own."""
    seconds = outcome.seconds
    return [
        Claim(
            f"{ours}, {what} against {name}",
            compute_ratio(times, seconds[ours]).median,
            ">=",
            (others or {}).get(name, minimum),
            "x",
        )
        for name, times in seconds.items()
        if ours in seconds and name.startswith("TensorFlow")
    ]


def _disagreements(outcome: Measurement, figure: str, names: set[str] | None = None) -> list[str]:
    """Sides that did not arrive at about the same figure have not done the same work."""
    found = {
        name: answer[figure]
        for name, answer in outcome.answers.items()
        if names is None or name in names
    }
    expected = next((value for name, value in found.items() if name.startswith(OURS)), None)
    if expected is None:
        return []
    return [
        f"{name}: the {figure} is {value:.3g}, that of {OURS} {expected:.3g}"
        for name, value in found.items()
        if abs(value - expected) > TOLERANCE * expected
    ]
