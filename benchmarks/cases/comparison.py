"""A training step on several sides: the figures, whether all did the same work, the claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distribax.cli.bench.figures import Claim, Report, ReportTable, Spread, compute_ratio
from distribax.cli.bench.harness import (
    BenchSettings,
    Measurement,
    Process,
    Side,
    SideError,
    interleave,
)

BATCH_SIZES = (256, 1024)
MAX_OF_HAND = 1.05
# The libraries round differently, and the difference grows with the steps.
LOSS_TOLERANCE = 0.05


@dataclass(frozen=True)
class Comparison:
    """Sides that train the same model.

    Attributes:
        title: What each table is about, after its batch size.
        hand: The name of the side that is written by hand.
        ours: The names of distribax's sides; peers are compared with the first.
        base: The name of the side that the table's ratios refer to.
        peers: For groups of other sides, how many times as fast distribax should be.
    """

    title: str
    hand: str
    ours: Sequence[str]
    base: str
    peers: Mapping[tuple[str, ...], float]

    def measure(
        self, name: str, sides: Callable[[int], list[Side]], rounds: int, settings: BenchSettings
    ) -> Report:
        """Measures the sides with each batch size, in turns."""
        report = Report(name)
        warmup = settings.pick(20, 5)
        for batch_size in BATCH_SIZES:
            turns = settings.pick(rounds, 4)
            outcome = interleave(sides(batch_size), steps=20, rounds=turns, warmup=warmup)
            report.failures += outcome.failures
            report.samples[f"batch {batch_size}"] = outcome.seconds
            report.tables.append(self._table(batch_size, outcome))
            report.failures += self._disagreements(batch_size, outcome)
            report.claims += self._claims(batch_size, outcome)
        return report

    def _table(self, batch_size: int, outcome: Measurement) -> ReportTable:
        table = ReportTable(
            f"global batch {batch_size}, {self.title}",
            ["side", "ms a step [quartiles]", "examples/s", "ratio of medians", "ratio by rounds"],
        )
        base = outcome.seconds.get(self.base)
        for name, seconds in outcome.seconds.items():
            spread = Spread.of(seconds)
            row = [name, spread.show(1e3), f"{batch_size / spread.median:,.0f}", "", ""]
            if base is not None:
                row[-2:] = [
                    f"{spread.median / Spread.of(base).median:.2f}",
                    compute_ratio(seconds, base).show(),
                ]
            table.rows.append(row)
        return table

    def _disagreements(self, batch_size: int, outcome: Measurement) -> list[str]:
        """Sides that did not train to the same loss have not done the same work."""
        if self.hand not in outcome.answers:
            return []
        expected = outcome.answers[self.hand]["loss"]
        return [
            f"{name}, batch {batch_size}: the loss is {answer['loss']:.3g}, by hand {expected:.3g}"
            for name, answer in outcome.answers.items()
            if abs(answer["loss"] - expected) > LOSS_TOLERANCE * expected
        ]

    def _claims(self, batch_size: int, outcome: Measurement) -> list[Claim]:
        seconds, claims = outcome.seconds, []
        for name in self.ours:
            if self.hand in seconds and name in seconds:
                value = compute_ratio(seconds[name], seconds[self.hand]).median
                what = f"{name}, time against hand-written, batch {batch_size}"
                claims.append(Claim(what, value, "<=", MAX_OF_HAND, "x"))
        # Against every way that a peer can be written, so that the best of them decides.
        for names, minimum in self.peers.items():
            for name in names:
                if name in seconds and self.ours[0] in seconds:
                    value = compute_ratio(seconds[name], seconds[self.ours[0]]).median
                    what = f"examples/s against {name}, batch {batch_size}"
                    claims.append(Claim(what, value, ">=", minimum, "x"))
        return claims


def samples_of_ways(side: Side, rounds: int, report: Report) -> dict[str, list[float]] | None:
    """Returns the seconds of each way that one side has to do its work; None if it cannot run."""
    samples: dict[str, list[float]] = {}
    try:
        with Process(side) as process:
            process.wait_until_ready()
            for _ in range(rounds):
                for name, seconds in process.run(10)["ways"].items():
                    samples.setdefault(name, []).append(seconds)
    except SideError as error:
        report.failures.append(str(error))
        return None
    report.samples[side.name] = samples
    return samples
