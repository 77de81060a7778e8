"""The GPUs that a Slurm task sees, and its share of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

from distribax.cluster.resolvers.env_variables import integer_variable

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS: Final = 30

_shares: dict[tuple[str, ...], list[str]] = {}
"""The shares this process has taken, with the GPUs among which they were: see `take_share`."""


def visible_gpus() -> list[str]:
    """Returns the ids of the GPUs of this machine that the process was given."""
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        if (taken := _shares.get(_key(listed))) is not None:
            return taken
        # A -1 hides itself and all that follow; words say that there are none.
        ids = [i.strip() for i in listed.split(",") if i.strip()]
        return [] if ids[:1] in ([], ["-1"], ["NoDevFiles"]) else ids
    count = integer_variable("SLURM_GPUS_ON_NODE")
    if count is None:
        count = _count_with_nvidia_smi()
    return [str(i) for i in range(count)]


def _count_with_nvidia_smi() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        done = subprocess.run(
            [program, "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"nvidia-smi --list-gpus failed ({error}), so the number of GPUs is not known. Give "
            "gpus_per_node to the resolver."
        ) from error
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def take_share(share: list[str], among: list[str] | None) -> None:
    """Makes only these GPUs visible to CUDA, which looks when JAX's backend starts.

    What was visible before, `among`, is kept: a resolver that is made later must divide the same
    GPUs, not the share of this process once more.
    """
    value = ",".join(share)
    if among is not None:
        _shares[_key(value)] = among
    os.environ[VISIBLE] = value


def _key(share: str) -> tuple[str, ...]:
    """Returns what tells shares apart: the same GPUs can be another share under other settings."""
    return share, *sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("SLURM_"))
