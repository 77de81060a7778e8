"""A resolver for the machines of a Cloud TPU slice."""

from __future__ import annotations

import os
import re
from typing import Final

from typing_extensions import override

from distribax.cluster.resolvers.google_cloud import read_metadata
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.address import Address, parse_address, parse_port
from distribax.cluster.spec.cluster_spec import ClusterSpec, parse_task_type

_HOSTS: Final = "TPU_WORKER_HOSTNAMES"
_NUMBER: Final = "TPU_WORKER_ID"
_SLICES: Final = "MEGASCALE_NUM_SLICES"


class TPUClusterResolver(ClusterResolver):
    """Finds the machines of the TPU slice that this machine is part of; each is a worker.

    The program runs on all of these machines, and JAX finds the TPUs of each by itself. So a slice
    of several machines is a cluster for `dx.MultiWorkerMirroredStrategy(resolver)`.

    GKE names the machines in TPU_WORKER_HOSTNAMES, and the number of this one in TPU_WORKER_ID.
    If they are not set, the metadata server of the machine is asked (GCE_METADATA_HOST names
    another one). Both happen at each use.

    Args:
        tpu: None or '' for the slice of this machine, "local" for the TPUs of this machine alone,
            which then is a single process. A TPU cannot be used from elsewhere by its name.
        zone: Accepted as in TensorFlow; it changes nothing.
        project: Accepted as in TensorFlow; it changes nothing.
        job_name: The job of all machines.
        port: The port of the tasks, the same on all machines.
        rpc_layer: The protocol between tasks.

    Raises:
        ValueError: `tpu`, `job_name` or `port` is not valid.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        *,
        port: int = 8482,
        rpc_layer: str | None = "grpc",
    ) -> None:
        if tpu not in (None, "", "local"):
            raise ValueError(
                f"tpu={tpu!r}: a program uses the TPU of the machines that it runs on, not one by "
                "its name. Run it on all machines of the TPU (gcloud compute tpus tpu-vm ssh "
                "NAME --worker=all --command=...), and leave the argument out."
            )
        self._is_local = tpu == "local"
        self._job_name = parse_task_type(job_name, "job_name")
        self._port = parse_port(port, f"port={port!r}")
        self.rpc_layer = rpc_layer

    @classmethod
    @override
    def find_variables(cls) -> list[str]:
        """Returns GKE's variables if they name several machines."""
        is_slice = "," in os.environ.get(_HOSTS, "") and _NUMBER in os.environ
        return [_HOSTS, _NUMBER] if is_slice else []

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the machines of the slice, as a cluster; an empty one for "local".

        Raises:
            RuntimeError: This machine is not part of a slice, the metadata server does not answer,
                or there are several slices.
            ValueError: What the environment or the metadata server says is malformed.
        """
        if self._is_local:
            return ClusterSpec({})
        slices = os.environ.get(_SLICES) or _read_settings().get(_SLICES, "1")
        if slices != "1":
            raise RuntimeError(
                f"{_SLICES}={slices!r}: a machine is only told of the others in its own slice. "
                "Describe several slices with dx.cluster_resolver.EnvironmentClusterResolver("
                "coordinator_address, num_processes, process_id)."
            )
        source, text = _read(_HOSTS, "worker-network-endpoints")
        # Older TPUs write name:number:address for each machine.
        hosts = [re.sub("^[^:]*:[^:]*:", "", host.strip()) for host in text.split(",")]
        addresses = [Address(parse_address(host, source).host, self._port) for host in hosts]
        return ClusterSpec({self._job_name: [str(address) for address in addresses]})

    @override
    def _find_task(self) -> tuple[str | None, int | None]:
        if self._is_local:
            return self._job_name, 0
        source, text = _read(_NUMBER, "agent-worker-number")
        if not re.fullmatch(r"\s*[0-9]{1,6}\s*", text):
            raise ValueError(f"{source}={text!r}: expected the number of this machine.")
        return self._job_name, int(text)


def _read(variable: str, attribute: str) -> tuple[str, str]:
    """Returns what a variable or else the metadata says, after the name of the one that does."""
    if _HOSTS in os.environ:
        if variable not in os.environ:
            raise ValueError(f"{variable} is missing, although {_HOSTS} is set.")
        return variable, os.environ[variable]
    found = read_metadata(f"attributes/{attribute}")
    if found is None:
        raise RuntimeError(
            f"This machine is not part of a TPU: its metadata has no {attribute!r}, and {_HOSTS} "
            "is not set. On other machines, use another resolver."
        )
    return attribute, found.decode(errors="replace")


def _read_settings() -> dict[str, str]:
    """Returns the settings of the TPU in the metadata: lines such as NAME: 'value'."""
    if _HOSTS in os.environ:
        return {}
    lines = (read_metadata("attributes/tpu-env") or b"").decode(errors="replace").splitlines()
    parts = (line.partition(":") for line in lines)
    return {name.strip(): value.strip().strip("'\"") for name, _, value in parts}
