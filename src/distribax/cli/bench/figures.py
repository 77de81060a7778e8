"""What the benchmarks say: ratios with their spread, claims, and the report that holds them."""

from __future__ import annotations

import json
import operator
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distribax.cli.bench.charts import Chart

_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        low, median, high = (f"{v * scale:.{digits}f}" for v in (self.low, self.median, self.high))
        return f"{median} [{low}, {high}]"


def compute_ratio(samples: Sequence[float], baseline: Sequence[float]) -> Spread:
    """The ratios of the single rounds: what slows both sides of a round down leaves them alone."""
    return Spread.of([a / b for a, b in zip(samples, baseline, strict=True)])


@dataclass(frozen=True)
class Claim:
    """A figure that has a target."""

    what: str
    value: float
    sign: Literal["<=", ">="]
    target: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        return _COMPARE[self.sign](self.value, self.target)


@dataclass
class ReportTable:
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Report:
    """The outcome of one benchmark: tables for people, samples and claims for programs."""

    name: str
    tables: list[ReportTable] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)

    def show(self, console: Console) -> None:
        for table in self.tables:
            title = escape(f"{self.name}: {table.title}")
            rich_table = Table(title=title, title_justify="left")
            for index, column in enumerate(table.columns):
                rich_table.add_column(escape(column), justify="left" if index == 0 else "right")
            for row in table.rows:
                rich_table.add_row(*map(escape, row))
            console.print(rich_table)
        for claim in self.claims:
            verdict = "[green]holds[/green]" if claim.holds else "[red]missed[/red]"
            target = f"{claim.sign} {claim.target:g}{claim.unit}"
            console.print(f"  {verdict}  {claim.what}: {claim.value:.3g}{claim.unit} ({target})")
        for failure in self.failures:
            console.print(f"  [red]failed[/red]  {escape(failure)}", highlight=False)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        claims = [asdict(claim) | {"holds": claim.holds} for claim in self.claims]
        content = asdict(self) | {"claims": claims, "machine": describe_machine()}
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def describe_machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }
