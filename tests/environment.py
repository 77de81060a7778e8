"""What the test process sets for itself and for every process that tests start."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

import jax

from tests.lowering import COMPILES_AS_USERS, share_contexts

QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
"""Flags of XLA for programs that run once: compiling takes a fifth of the time.

Most of the tests' time would be spent on making programs fast that compute with a few numbers.
"""

COMPLETE = os.environ.get("DISTRIBAX_CONTRACT") == "all"
"""Whether all sizes and modes are tried: `make contract`."""

_COMPILED = Path(__file__).parents[1] / ".xla_cache"
"""Programs that some process has compiled; to load one takes a fifth of the time."""

_MOST_COMPILED = 50_000
"""So many programs, of a few kilobytes each, are not kept for the next run."""

_CACHE_SETTINGS: dict[str, str | float | int] = {
    "jax_compilation_cache_dir": str(_COMPILED),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

_DESCRIBING = ("PJRT_NPROC", "NPROC", "JAX_NUM_CPU_DEVICES", "TF_CONFIG")
"""Variables that decide on CPU devices, their threads and the cluster."""


_LIMITS = (
    "DISTRIBAX_SERVER_START_SECONDS",
    "DISTRIBAX_SERVER_ANSWER_SECONDS",
    "DISTRIBAX_RUN_SHORT_LIFE_SECONDS",
)
"""Time limits that a busy machine may exceed without a fault."""


def prepare() -> None:
    """Sets flags, limits and Keras's backend; makes children heed signals that this one ignores."""
    os.environ["XLA_FLAGS"] = "" if COMPILES_AS_USERS else QUICK_COMPILATION
    os.environ.update(dict.fromkeys(_LIMITS, "300"))
    if not COMPILES_AS_USERS and _make_cache():
        _keep_compiled_programs()
    share_contexts()
    os.environ["KERAS_BACKEND"] = "jax"
    # Without stored bytecode, every process would compile all of the modules that it imports.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A process that is started in the background or by nohup ignores these, and so would all of its
    # children. A handler is not inherited: it ignores the signal for this process alone.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)


def _make_cache() -> bool:
    """Makes the folder for compiled programs, an empty one if it is full; tells if it can."""
    if not os.access(_COMPILED if _COMPILED.exists() else _COMPILED.parent, os.W_OK):
        return False
    _COMPILED.mkdir(exist_ok=True)
    # A process that another one has started with this folder shares it with others.
    is_first = os.environ.get("JAX_COMPILATION_CACHE_DIR") != str(_COMPILED)
    if is_first and len(os.listdir(_COMPILED)) > _MOST_COMPILED:
        shutil.rmtree(_COMPILED)
        _COMPILED.mkdir()
    return True


def _keep_compiled_programs() -> None:
    """Lets this process and its children share what they compile."""
    for name, value in _CACHE_SETTINGS.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
    # JAX does not write an entry in one step: whoever comes in between compiles the program itself.
    os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry"


def inherited(*without: str) -> dict[str, str]:
    """Returns the environment for a process that decides on devices and cluster itself.

    Args:
        *without: Names of more variables to leave out.
    """
    hidden = {*_DESCRIBING, *without}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing about a signal."""
