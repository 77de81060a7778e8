"""What the demo shows while it trains: a live view in a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS: Final = "▁▂▃▄▅▆▇█"
_MOST_BARS: Final = 40
_STARTING: Final = "starting, and compiling the first step ..."


@dataclass(frozen=True)
class EpochFigures:
    """How the training stands after an epoch."""

    epoch: int
    epochs: int
    loss: float
    accuracy: float
    examples_per_second: float

    def to_line(self) -> str:
        """Returns the figures as a line for another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> EpochFigures:
        """Returns the figures that another process has written."""
        return EpochFigures(**json.loads(line))


@dataclass
class DemoResult:
    """What the training has come to: the accuracy on unseen digits, and facts to show."""

    accuracy: float
    facts: dict[str, str] = field(default_factory=dict)


class DemoView:
    """Shows the figures of each epoch.

    Args:
        console: Where to show them.
        title: What is trained, and how.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._epochs: list[EpochFigures] = []
        self._live: Live | None = None

    def show(self) -> AbstractContextManager[object]:
        """Shows the live view in a block, if the console is a terminal."""
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: {_STARTING}", highlight=False)
            return nullcontext()
        self._live = Live(self._draw(), console=self._console, refresh_per_second=8)
        return self._live

    def tell(self, figures: EpochFigures) -> None:
        """Shows how the training stands."""
        self._epochs.append(figures)
        if self._live is not None:
            self._live.update(self._draw())
        else:
            note = " (with compiling)" if figures.epoch == 1 else ""
            rate = f"{figures.examples_per_second:,.0f} examples/s{note}"
            self._console.print(
                f"epoch {figures.epoch}/{figures.epochs}: loss {figures.loss:.4f}, "
                f"accuracy {figures.accuracy:.1%}, {rate}",
                highlight=False,
            )

    def report(self, outcome: DemoResult, pages: Sequence[str]) -> None:
        """Shows what has come out, and where to read on."""
        table = Table(show_header=False)
        table.add_row("accuracy on unseen digits", f"{outcome.accuracy:.1%}")
        # The first epoch compiles.
        rates = [each.examples_per_second for each in self._epochs[1:] or self._epochs]
        if rates:
            table.add_row("examples per second", f"{sum(rates) / len(rates):,.0f}")
        for name, text in outcome.facts.items():
            table.add_row(name, text)
        self._console.print(table)
        self._console.print(f"Read on: {', '.join(pages)}", highlight=False)

    def _draw(self) -> Group:
        if not self._epochs:
            return Group(Text(self._title), Text(_STARTING))
        last = self._epochs[-1]
        grid = Table.grid(padding=(0, 2))
        grid.add_row("loss", f"{last.loss:.4f}", draw_bars([each.loss for each in self._epochs]))
        accuracies = [each.accuracy for each in self._epochs]
        grid.add_row("accuracy", f"{last.accuracy:.1%}", draw_bars(accuracies))
        rates = [each.examples_per_second for each in self._epochs]
        grid.add_row("examples/s", f"{last.examples_per_second:,.0f}", draw_bars(rates))
        bar = ProgressBar(total=last.epochs, completed=last.epoch, width=_MOST_BARS)
        return Group(Text(self._title), bar, Text(f"epoch {last.epoch} of {last.epochs}"), grid)


def draw_bars(values: Sequence[float]) -> str:
    """Returns a small chart of the last values, one character for each.

    >>> draw_bars([0.0, 1.0, 2.0])
    '▁▄█'
    """
    values = values[-_MOST_BARS:]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] for value in values)
