"""What the test process sets for itself and for every process that tests start."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
"""Flags of XLA for programs that run once: compiling takes a fifth of the time.

Most of the tests' time would be spent on making programs fast that compute with a few numbers.
"""

COMPLETE = os.environ.get("DISTRIBAX_CONTRACT") == "all"
"""Whether all sizes are tried, with programs compiled as users' programs are: `make contract`."""

_DESCRIBING = ("PJRT_NPROC", "NPROC", "JAX_NUM_CPU_DEVICES", "TF_CONFIG")
"""Variables that decide on CPU devices, their threads and the cluster."""


_LIMITS = ("DISTRIBAX_SERVER_START_SECONDS", "DISTRIBAX_SERVER_ANSWER_SECONDS")
"""Time limits that a busy machine may exceed without a fault."""


def prepare() -> None:
    """Sets flags, limits and Keras's backend, and makes ignored signals such that children heed."""
    os.environ["XLA_FLAGS"] = "" if COMPLETE else QUICK_COMPILATION
    os.environ.update(dict.fromkeys(_LIMITS, "300"))
    os.environ["KERAS_BACKEND"] = "jax"
    # Without stored bytecode, every process would compile all of the modules that it imports.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A process that is started in the background or by nohup ignores these, and so would all of its
    # children. A handler is not inherited: it ignores the signal for this process alone.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)


def inherited(*without: str) -> dict[str, str]:
    """Returns the environment for a process that decides on devices and cluster itself.

    Args:
        *without: Names of more variables to leave out.
    """
    hidden = {*_DESCRIBING, *without}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing about a signal."""
