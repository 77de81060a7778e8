"""Benchmarks of distribax against JAX by hand, TensorFlow and torch: see docs/benchmarks.md.

What `distribax bench` needs, too, is in `distribax.cli.bench`: the harness, the figures and the
programs of the most common sides.
"""

import os
import sys
from pathlib import Path

from distribax.cli.bench import harness
from distribax.cli.bench.peer_libraries import FOLDER_VARIABLE

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"

# Cases use the sizes of some problems that sides solve.
sys.path.append(str(harness.side_folders[0]))
harness.side_folders.append(FOLDER / "sides")
os.environ.setdefault(FOLDER_VARIABLE, str(FOLDER / ".venvs"))
