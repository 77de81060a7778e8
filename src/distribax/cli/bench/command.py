"""The command `distribax bench`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from distribax.cli.bench import peer_libraries
from distribax.cli.bench.cases.all_reduce import ALL_REDUCE
from distribax.cli.bench.cases.case import Case
from distribax.cli.bench.cases.pipelines import INPUT, PARAMETER_SERVERS
from distribax.cli.bench.cases.steps import SCALING, STEP
from distribax.cli.bench.charts import WIDTH, Chart, Point, Series, draw, get_height
from distribax.cli.bench.figures import Report, ReportTable, describe_machine
from distribax.cli.bench.harness import BenchSettings, Turns
from distribax.cli.bench.html_report import write_html
from distribax.cli.bench.png import write_png
from distribax.cli.help_format import USAGE_ERROR, add_command
from distribax.cli.terminal import make_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

CASES: Final[dict[str, Case]] = {
    case.name: case for case in (STEP, SCALING, ALL_REDUCE, INPUT, PARAMETER_SERVERS)
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = add_command(
        commands,
        "bench",
        summary="measure this machine: steps, scaling, all-reduce, input, parameter servers",
        description="Measures what distribax costs on this machine, on virtual CPU devices. Cases: "
        + "; ".join(f"{case.name}: {case.description}" for case in CASES.values())
        + ".",
        examples="""
distribax bench --quick
distribax bench step scaling --devices 4
distribax bench --peers --html report.html --json report.json
distribax bench --from report.json --svg charts.svg""",
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="case", help=f"one of {', '.join(CASES)}; all if none is named")
    add("--quick", action="store_true", help="few rounds: a first impression, not a figure")
    add(
        "--devices",
        type=int,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="the largest number of devices to scale to",
    )
    add(
        "--peers",
        action="store_true",
        help="first install TensorFlow and torch into environments of their own, to compare with",
    )
    add("--json", metavar="FILE", help="write all samples to this file")
    add("--html", metavar="FILE", help="write a report with charts to this file")
    add("--svg", metavar="FILE", help="write the charts alone to this file")
    add("--png", metavar="FILE", help="write the charts as PNG; needs Chromium or Chrome")
    add("--from", metavar="FILE", dest="source", help="measure nothing: read an earlier --json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures, prints tables and writes files; returns 1 if something could not be measured."""
    unknown = [name for name in options.cases if name not in CASES]
    if unknown or options.devices < 1:
        problem = f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}"
        if not unknown:
            problem = f"--devices={options.devices}: expected a whole number of at least 1"
        print(f"distribax bench: error: {problem}", file=sys.stderr)
        return USAGE_ERROR
    console = make_console()
    try:
        if options.source:
            reports, about = _read(Path(options.source), options.cases)
        else:
            if options.peers:
                _install_peers()
            settings = BenchSettings(options.quick, options.devices)
            reports, about = _measure(options.cases or list(CASES), settings), describe_machine()
    except (OSError, ValueError, KeyError, TypeError, subprocess.CalledProcessError) as error:
        print(f"distribax bench: error: {error}", file=sys.stderr)
        return 1
    for report in reports:
        report.show(console)
    try:
        for path in _write_files(options, reports, about):
            console.print(f"written: {path}", highlight=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"distribax bench: error: {error}", file=sys.stderr)
        return 1
    return int(any(report.failures for report in reports))


def _install_peers() -> None:
    for peer in peer_libraries.REQUIREMENTS:
        if not peer_libraries.is_made(peer):
            print(
                f"installing {peer} into {peer_libraries.find_folder() / peer} ...", file=sys.stderr
            )
        peer_libraries.make(peer)


class _ShownTurns(Turns):
    """Shows what is measured now: as a bar on a terminal, else as lines."""

    def __init__(self, name: str, progress: Progress, task: TaskID) -> None:
        self._name, self._progress, self._task = name, progress, task

    @override
    def begin(self, what: str) -> None:
        self._progress.update(self._task, description=f"{self._name}: {what}")
        if self._progress.disable:
            print(f"distribax bench: {self._name}: {what} ...", file=sys.stderr, flush=True)

    @override
    def end(self) -> None:
        self._progress.advance(self._task)


def _measure(names: Sequence[str], settings: BenchSettings) -> list[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    reports: list[Report] = []
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        tasks = {
            name: progress.add_task(f"{name}: {CASES[name].description}", start=False, total=None)
            for name in names
        }
        for name, task in tasks.items():
            progress.update(task, total=CASES[name].count_turns(settings))
            progress.start_task(task)
            try:
                report = CASES[name].measure(settings, _ShownTurns(name, progress, task))
            except KeyboardInterrupt:
                # What was measured before is not lost.
                reports.append(Report(name, failures=["stopped by Ctrl-C"]))
                break
            progress.update(task, description=f"{name}: {CASES[name].description}")
            reports.append(report)
    return reports


def _write_files(
    options: argparse.Namespace, reports: Sequence[Report], about: dict[str, Any]
) -> Iterator[Path]:
    """Writes the files that were asked for, and yields each when it is written."""
    charts = [chart for report in reports for chart in report.charts]
    texts: dict[str, str] = {}
    if options.json:
        content = {"machine": about, "reports": [asdict(report) for report in reports]}
        texts[options.json] = json.dumps(content, indent=1) + "\n"
    if options.html:
        texts[options.html] = write_html(reports, about)
    if options.svg:
        texts[options.svg] = draw(charts)
    for name, text in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        yield Path(name)
    if options.png:
        Path(options.png).parent.mkdir(parents=True, exist_ok=True)
        write_png(draw(charts), WIDTH, get_height(charts), Path(options.png))
        yield Path(options.png)


def _read(path: Path, cases: Sequence[str]) -> tuple[list[Report], dict[str, Any]]:
    """Returns the reports of an earlier run, all or some of them."""
    content = json.loads(path.read_text())
    reports = [
        Report(
            each["name"],
            [ReportTable(**table) for table in each["tables"]],
            samples=each["samples"],
            failures=each["failures"],
            charts=[_read_chart(chart) for chart in each["charts"]],
        )
        for each in content["reports"]
        if not cases or each["name"] in cases
    ]
    return reports, content["machine"]


def _read_chart(content: dict[str, Any]) -> Chart:
    series = [
        Series(each["name"], [Point(**point) for point in each["points"]])
        for each in content["series"]
    ]
    return Chart(**(content | {"series": series}))
