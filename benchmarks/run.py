"""Runs the benchmarks, prints their tables and writes their figures as JSON.

python benchmarks/run.py                     # all of them
python benchmarks/run.py mlp_step --quick    # one, with few rounds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

# Run as a file, so that `benchmarks` is not a package that Python finds by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks import RESULTS, peers
from benchmarks.cases import (
    call_overhead,
    compile_time,
    eager_step,
    import_time,
    input_loop,
    input_pipeline,
    keras_fit,
    mlp_step,
    multi_worker,
    packing,
    parameter_server,
    uneven_batch,
)
from distribax.cli.bench.figures import Report
from distribax.cli.bench.harness import BenchSettings

CASES: dict[str, Callable[[BenchSettings], Report]] = {
    "mlp_step": mlp_step.run,
    "uneven_batch": uneven_batch.run,
    "keras_fit": keras_fit.run,
    "eager_step": eager_step.run,
    "call_overhead": call_overhead.run,
    "compile_time": compile_time.run,
    "import_time": import_time.run,
    "packing": packing.run,
    "input_memory": input_pipeline.memory,
    "input_tfrecord": input_pipeline.records,
    "input_loop": input_loop.loop,
    "input_leak": input_loop.memory,
    "multi_worker": multi_worker.step,
    "multi_worker_packing": multi_worker.packing,
    "ps_mlp": parameter_server.mlp,
    "ps_trivial": parameter_server.trivial,
    "ps_embedding": parameter_server.embedding,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks of distribax.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="few rounds: a check, not a figure")
    parser.add_argument("--peers", action="store_true", help="first make the peers' environments")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if options.peers:
        peers.main([])
    # Written to a file, rich would take 80 columns and break every cell.
    console = Console(width=None if sys.stdout.isatty() else 140)
    settings = BenchSettings(quick=options.quick)
    good = True
    for name in options.names or CASES:
        report = CASES[name](settings)
        report.show(console)
        report.write(RESULTS)
        good = good and not report.failures
        if options.strict:
            good = good and all(claim.holds for claim in report.claims)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
