"""A resolver for the pods of a Kubernetes cluster."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Final, Protocol

from typing_extensions import override

from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.address import Address, make_natural_key, parse_port
from distribax.cluster.spec.cluster_spec import ClusterSpec, parse_task_type

_REQUEST_SECONDS: Final = read_seconds("DISTRIBAX_RESOLVER_REQUEST_SECONDS", 30.0)
"""How long one request to the Kubernetes API may take."""


class _Metadata(Protocol):
    name: str


class _Status(Protocol):
    phase: str
    pod_ip: str | None


class _Pod(Protocol):
    metadata: _Metadata
    status: _Status


class _PodList(Protocol):
    items: Sequence[_Pod]


class PodClient(Protocol):
    """The part of `kubernetes.client.CoreV1Api` that the resolver uses."""

    def list_pod_for_all_namespaces(
        self, *, label_selector: str, _request_timeout: float
    ) -> _PodList: ...

    def list_namespaced_pod(
        self, namespace: str, *, label_selector: str, _request_timeout: float
    ) -> _PodList: ...


class ExecutableLocation(enum.Enum):
    """Where the program runs: this decides how it finds the Kubernetes API."""

    WITHIN_CLUSTER = 0
    """In a pod of the cluster: with the pod's service account."""
    OFF_CLUSTER = 1
    """Anywhere else: with the kubeconfig file, KUBECONFIG or ~/.kube/config."""


class KubernetesClusterResolver(ClusterResolver):
    """Asks Kubernetes for the pods with certain labels.

    The pods are listed again at each use, and the pods of a label are sorted by name: train-9
    comes before train-10. The resolver does not know which task this process is: set `task_type`
    and `task_id`. It needs the package `kubernetes`: pip install kubernetes.

    Args:
        job_to_label_mapping: The jobs, and for each the label selectors of its pods. The default
            is {"worker": ["job-name=tensorflow"]}.
        tf_server_port: The port of the tasks, the same in all pods.
        rpc_layer: The protocol between tasks.
        override_client: A `kubernetes.client.CoreV1Api` to use, instead of one created here.
        executable_location: Whether this program runs in a pod of the cluster.
        namespace: The namespace of the pods. The default is all, which the service account of a
            pod is often not allowed to list.

    Raises:
        ImportError: The package `kubernetes` is not installed.
        TypeError: The label selectors of a job are not a list of texts.
        ValueError: `executable_location` or the port is not valid.

    >>> resolver = KubernetesClusterResolver({"worker": ["app=train"]}, override_client=object())
    >>> resolver.task_type, resolver.task_id = "worker", 0
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: PodClient | None = None,
        executable_location: ExecutableLocation = ExecutableLocation.WITHIN_CLUSTER,
        namespace: str | None = None,
    ) -> None:
        if not isinstance(executable_location, ExecutableLocation):
            raise ValueError(
                f"executable_location={executable_location!r}: expected "
                "ExecutableLocation.WITHIN_CLUSTER or ExecutableLocation.OFF_CLUSTER."
            )
        if override_client is None:
            _import_kubernetes()
        self._selectors = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        for job, selectors in self._selectors.items():
            parse_task_type(job, "job_to_label_mapping: job name")
            if isinstance(selectors, str) or not all(isinstance(s, str) for s in selectors):
                raise TypeError(
                    f"job_to_label_mapping[{job!r}]={selectors!r}: expected a list of label "
                    "selectors, such as ['job-name=worker']."
                )
        self._port = parse_port(tf_server_port, f"tf_server_port={tf_server_port!r}")
        self._override_client = override_client
        self._location = executable_location
        self._namespace = namespace
        self.rpc_layer = rpc_layer

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the pods that Kubernetes has now, as a cluster.

        Raises:
            RuntimeError: A pod is not running, or Kubernetes does not answer.
        """
        with self._open_client() as client:
            return ClusterSpec(
                {
                    job: [
                        a for selector in selectors for a in self._list_addresses(client, selector)
                    ]
                    for job, selectors in self._selectors.items()
                }
            )

    def _list_addresses(self, client: PodClient, selector: str) -> list[str]:
        list_pods = client.list_pod_for_all_namespaces
        if self._namespace is not None:
            list_pods = functools.partial(client.list_namespaced_pod, self._namespace)
        try:
            found = list_pods(label_selector=selector, _request_timeout=_REQUEST_SECONDS)
        except Exception as error:
            # The client raises its own exceptions and urllib3's; all mean there is no answer.
            raise RuntimeError(
                f"Kubernetes did not list the pods with {selector!r}: {error}. Does the API server "
                "answer, and may this account list pods"
                + (" in all namespaces (else give namespace)?" if self._namespace is None else "?")
            ) from error
        pods = sorted(found.items, key=lambda pod: make_natural_key(pod.metadata.name))
        return [self._find_address(pod) for pod in pods]

    def _find_address(self, pod: _Pod) -> str:
        if pod.status.phase != "Running":
            raise RuntimeError(
                f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"'
            )
        if not isinstance(pod.status.pod_ip, str):
            raise RuntimeError(f'Pod "{pod.metadata.name}" is running and has no address yet')
        return str(Address(pod.status.pod_ip, self._port))

    @contextlib.contextmanager
    def _open_client(self) -> Iterator[PodClient]:
        """Yields a client for the API, with fresh settings: a service account's token changes."""
        if self._override_client is not None:
            yield self._override_client
            return
        client, config = _import_kubernetes()
        settings = client.Configuration()
        try:
            if self._location is ExecutableLocation.WITHIN_CLUSTER:
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(
                    config_file=os.environ.get("KUBECONFIG"), client_configuration=settings
                )
        except config.ConfigException as error:
            raise RuntimeError(
                f"Kubernetes cannot be found: {error}. In a pod, it needs a service account; "
                "elsewhere a kubeconfig file, and the argument "
                "executable_location=ExecutableLocation.OFF_CLUSTER."
            ) from error
        with client.ApiClient(settings) as api:
            yield client.CoreV1Api(api)


def _import_kubernetes() -> tuple[ModuleType, ModuleType]:
    """Returns the modules `client` and `config` of the package, which is optional and heavy."""
    try:
        return importlib.import_module("kubernetes.client"), importlib.import_module(
            "kubernetes.config"
        )
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the Kubernetes client: pip install kubernetes."
        ) from error
