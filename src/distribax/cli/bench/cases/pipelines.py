"""Input pipelines and parameter servers."""

from __future__ import annotations

from typing import Final

from distribax.cli.bench.cases.case import Case, Contest, select_available
from distribax.cli.bench.harness import BenchSettings, Side

_BATCH_SIZE: Final = 256
_POOL: Final = {"NPROC": "8"}
_QUIET: Final = {"TF_CPP_MIN_LOG_LEVEL": "3"}
# TensorFlow's map is in Python, as distribax's, or native.
_SOURCES: Final = {
    "memory": ("input from memory, shuffled, 2 devices", {"TensorFlow": "memory"}),
    "records": (
        "input from TFRecord files, decoded, 2 devices",
        {"TensorFlow, Python map": "python", "TensorFlow, native ops": "native"},
    ),
}
_WORKS: Final = {
    "trivial": ("scheduled functions that do nothing, 2 workers", "functions/s", 200, 1000),
    "mlp": ("parameter-server training of an MLP, 2 workers, 1 server", "steps/s", 50, 200),
}


def _plan_input(settings: BenchSettings, folder: str) -> list[Contest]:
    files = ("--folder", folder, "--records", str(settings.pick(10_000, 1_000)))
    given = (*files, "--source")
    steps, rounds = settings.pick(100, 20), settings.pick(10, 3)
    return [
        Contest(
            title,
            select_available(
                [
                    Side("distribax", "input_distribax", (*given, source), environment=_POOL),
                    *(
                        Side(name, "input_tensorflow", (*given, peer_source), "tensorflow", _QUIET)
                        for name, peer_source in peer_sources.items()
                    ),
                ]
            ),
            steps,
            rounds,
            warmup=10,
            amount=_BATCH_SIZE,
            name=source,
        )
        for source, (title, peer_sources) in _SOURCES.items()
    ]


def _plan_servers(settings: BenchSettings, folder: str) -> list[Contest]:
    return [
        Contest(
            title,
            select_available(
                [
                    Side("distribax", "ps_distribax", ("--work", work)),
                    Side("TensorFlow", "ps_tensorflow", ("--work", work), "tensorflow", _QUIET),
                ]
            ),
            settings.pick(full, quick),
            settings.pick(8, 2),
            warmup=quick,
            unit=unit,
            name=work,
        )
        for work, (title, unit, quick, full) in _WORKS.items()
    ]


INPUT: Final = Case("input", "input pipelines from memory and files", _plan_input)
PARAMETER_SERVERS: Final = Case("ps", "functions and steps on parameter servers", _plan_servers)
