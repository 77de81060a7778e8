"""The GPUs that are visible to a Slurm task, and its share of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

from distribax.cluster.environment_variables import read_integer, read_seconds

_NVIDIA_SMI_SECONDS: Final = read_seconds("DISTRIBAX_NVIDIA_SMI_SECONDS", 30.0)
"""How long nvidia-smi may take to list the GPUs."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

_shares: dict[tuple[str, ...], list[str]] = {}
"""The shares that this process has taken, each with all GPUs that were divided."""


def list_visible_gpus() -> list[str]:
    """Returns the ids of the GPUs of this machine that this process may use."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        if (taken := _shares.get(_make_key(listed))) is not None:
            return taken
        # A leading -1 hides all GPUs; Slurm writes NoDevFiles if there are none.
        ids = [i.strip() for i in listed.split(",") if i.strip()]
        return [] if ids[:1] in ([], ["-1"], ["NoDevFiles"]) else ids
    count = read_integer("SLURM_GPUS_ON_NODE")
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
    """Makes only these GPUs visible to CUDA, which reads the variable when JAX's backend starts.

    Args:
        share: The GPUs of this process.
        among: The GPUs that were visible before. They are remembered: a resolver that is created
            later must divide these again, and not the share of this process.
    """
    value = ",".join(share)
    if among is not None:
        _shares[_make_key(value)] = among
    os.environ[_VISIBLE] = value


def _make_key(share: str) -> tuple[str, ...]:
    """Returns a key for a share; with other settings of Slurm, the same GPUs are another share."""
    return share, *sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("SLURM_"))
