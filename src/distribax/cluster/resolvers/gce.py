"""A resolver for the machines of a Compute Engine instance group."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Final

from typing_extensions import override

from distribax.cluster.resolvers.google_cloud import read_metadata, send
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.address import Address, make_natural_key, parse_port
from distribax.cluster.spec.cluster_spec import ClusterSpec, parse_task_type

_SERVICE: Final = "https://compute.googleapis.com/compute/v1"
_TOKEN_PATH: Final = "service-accounts/default/token"
_MAX_PAGES: Final = 1000

Credentials = str | Callable[[], str] | None


class GCEClusterResolver(ClusterResolver):
    """Asks Compute Engine for the running instances of an instance group.

    The instances are listed again at each use, and sorted by address. The resolver does not know
    which task this process is: give each instance its own `task_id`.

    Args:
        project: The project's id.
        zone: The zone of the instance group.
        instance_group: The name of the instance group.
        port: The port of the tasks, the same on all instances.
        task_type: The job of all instances.
        task_id: The index of this instance.
        rpc_layer: The protocol between tasks.
        credentials: "default" uses the token of the machine's service account, from the metadata
            server (GCE_METADATA_HOST names another one). Or an access token, or a function that
            returns one, or None for none.
        service: The address of the Compute Engine API, if it is not Google's own.

    Raises:
        TypeError: `credentials` or `service` has a wrong type.
        ValueError: `service`, `port` or `task_type` is not valid.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Credentials = "default",
        service: str | None = None,
    ) -> None:
        if not (credentials is None or isinstance(credentials, str) or callable(credentials)):
            raise TypeError(
                f"credentials is a {type(credentials).__name__}. Expected 'default', an access "
                "token, or a function that returns one: lambda: credentials.token."
            )
        if service is not None and not isinstance(service, str):
            raise TypeError(
                f"service={service!r} is a {type(service).__name__}. Expected the address of the "
                f"API, such as {_SERVICE!r}."
            )
        self._service = (service or _SERVICE).rstrip("/")
        if not self._service.startswith(("http://", "https://")):
            raise ValueError(f"service={service!r}: expected an address with https:// or http://.")
        self._project = project
        self._zone = zone
        self._instance_group = instance_group
        self._port = parse_port(port, f"port={port!r}")
        self._credentials = credentials
        self._task_type = parse_task_type(task_type, "task_type")
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    @property  # type: ignore[explicit-override]  # mypy overlooks it where there is a setter.
    @override
    def task_type(self) -> str:
        """The job of all instances; it cannot be changed."""
        assert self._task_type is not None
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            f"task_type={task_type!r}: You cannot reset the task_type of the GCEClusterResolver "
            "after it has been created: it is the job of all instances. Create a new resolver."
        )

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the instances of the group that are running now, as a cluster.

        Raises:
            RuntimeError: Compute Engine does not answer, or refuses the request.
            ValueError: The answer is malformed.
        """
        token = self._get_token()
        addresses: list[str] = []
        for name in self._list_instances(token):
            instance = self._call(token, "instances", name)
            match instance.get("networkInterfaces"):
                case [{"networkIP": ip}, *_]:
                    addresses.append(str(Address(str(ip), self._port)))
                case _:
                    raise ValueError(
                        f"Compute Engine: the instance {name!r} has no "
                        "networkInterfaces[0].networkIP."
                    )
        return ClusterSpec({self.task_type: sorted(addresses, key=make_natural_key)})

    def _list_instances(self, token: str | None) -> list[str]:
        """Returns the names of the group's running instances, from all pages of the answer."""
        names: list[str] = []
        page: object = ""
        pages: list[object] = []
        while page is not None:
            answer = self._call(
                token,
                "instanceGroups",
                self._instance_group,
                "listInstances",
                query={"pageToken": str(page)} if page else {},
                body={"instanceState": "RUNNING"},
            )
            items = answer.get("items") or []
            for i, item in enumerate(items if isinstance(items, list) else [items]):
                url = item.get("instance") if isinstance(item, dict) else None
                if not isinstance(url, str):
                    raise ValueError(f"Compute Engine: listInstances: items[{i}].instance: no URL.")
                names.append(url.rpartition("/")[2])
            page = answer.get("nextPageToken")
            if page in pages or len(pages) > _MAX_PAGES:
                raise ValueError(f"Compute Engine: listInstances has no end: page {page!r}.")
            pages.append(page)
        return names

    def _get_token(self) -> str | None:
        if self._credentials != "default":
            return self._credentials() if callable(self._credentials) else self._credentials
        answer = _parse(read_metadata(_TOKEN_PATH) or b"{}", "the metadata server")
        token = answer.get("access_token")
        if not isinstance(token, str):
            raise ValueError(
                "The metadata server: the answer has no access_token. Has this machine a service "
                "account? If not, give credentials."
            )
        return token

    def _call(
        self,
        token: str | None,
        *path: str,
        query: dict[str, str] | None = None,
        body: dict[str, str] | None = None,
    ) -> dict[str, object]:
        """Calls a method of the API for the zone and returns its answer; a body makes it a POST."""
        parts = ("projects", self._project, "zones", self._zone, *path)
        url = "/".join([self._service, *(urllib.parse.quote(part, safe="") for part in parts)])
        if query:
            url += "?" + urllib.parse.urlencode(query)
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers)
        whom = "Compute Engine"
        return _parse(send(urllib.request.build_opener(), request, whom), f"{whom}: {url}")


def _parse(answer: bytes, whose: str) -> dict[str, object]:
    """Returns the JSON object of an answer."""
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{whose} did not answer with JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{whose} did not answer with a JSON object.")
    return parsed
