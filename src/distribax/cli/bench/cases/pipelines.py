"""Input pipelines and parameter servers."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Final

from distribax.cli.bench.cases.case import Case, add_rates, select_available
from distribax.cli.bench.figures import Report
from distribax.cli.bench.harness import Settings, Side, Turns, interleave

_BATCH_SIZE: Final = 256
_QUIET: Final = {"TF_CPP_MIN_LOG_LEVEL": "3"}
_SOURCES: Final = {
    "memory": "input from memory, shuffled, 2 devices",
    "records": "input from TFRecord files, decoded, 2 devices",
}
_WORKS: Final = {
    "trivial": ("scheduled functions that do nothing, 2 workers", "functions/s", 200, 1000),
    "mlp": ("parameter-server training of an MLP, 2 workers, 1 server", "steps/s", 50, 200),
}


def _make_input_sides(source: str, folder: str, settings: Settings) -> list[Side]:
    """Returns the sides of a source; TensorFlow's map is in Python, as distribax's, or native."""
    files = ("--folder", folder, "--records", str(settings.pick(10_000, 1_000)))
    given = (*files, "--source")
    peer_sources = {"TensorFlow": "memory"}
    if source == "records":
        peer_sources = {"TensorFlow, Python map": "python", "TensorFlow, native ops": "native"}
    return select_available(
        [
            Side("distribax", "input_distribax", (*given, source), environment={"NPROC": "8"}),
            *(
                Side(name, "input_tensorflow", (*given, peer_source), "tensorflow", _QUIET)
                for name, peer_source in peer_sources.items()
            ),
        ]
    )


def _count_input_turns(settings: Settings) -> int:
    sides = sum(len(_make_input_sides(source, "", settings)) for source in _SOURCES)
    return sides + len(_SOURCES) * settings.pick(10, 3)


def _measure_input(settings: Settings, turns: Turns) -> Report:
    report = Report("input")
    with tempfile.TemporaryDirectory(prefix="distribax-bench-") as folder:
        for source in _SOURCES:
            outcome = interleave(
                _make_input_sides(source, folder, settings),
                steps=settings.pick(100, 20),
                rounds=settings.pick(10, 3),
                warmup=10,
                turns=turns,
            )
            report.failures += outcome.failures
            report.samples[source] = outcome.seconds
            title = _SOURCES[source]
            add_rates(report, title, "examples/s", outcome.seconds, _BATCH_SIZE)
    return report


def _make_server_sides(work: str) -> list[Side]:
    given = ("--work", work)
    return select_available(
        [
            Side("distribax", "ps_distribax", given),
            Side("TensorFlow", "ps_tensorflow", given, "tensorflow", _QUIET),
        ]
    )


def _count_server_turns(settings: Settings) -> int:
    return sum(len(_make_server_sides(work)) + settings.pick(8, 2) for work in _WORKS)


def _measure_servers(settings: Settings, turns: Turns) -> Report:
    report = Report("ps")
    if importlib.util.find_spec("ray") is None:
        report.failures.append("parameter servers need Ray: pip install 'distribax[ray]'")
        return report
    for work, (title, unit, quick, full) in _WORKS.items():
        outcome = interleave(
            _make_server_sides(work),
            steps=settings.pick(full, quick),
            rounds=settings.pick(8, 2),
            warmup=quick,
            turns=turns,
        )
        report.failures += outcome.failures
        report.samples[work] = outcome.seconds
        add_rates(report, title, unit, outcome.seconds, 1)
    return report


INPUT: Final = Case(
    "input", "input pipelines from memory and files", _count_input_turns, _measure_input
)
PARAMETER_SERVERS: Final = Case(
    "ps", "functions and steps on parameter servers", _count_server_turns, _measure_servers
)
