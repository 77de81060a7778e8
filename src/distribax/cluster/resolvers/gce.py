"""A resolver for the machines of an instance group of Google Compute Engine."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Final

from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.cluster.spec.address import Address, natural_order, parse_port
from distribax.cluster.spec.cluster_spec import ClusterSpec, task_type_name

_SERVICE: Final = "https://compute.googleapis.com/compute/v1"
_METADATA_HOST: Final = "metadata.google.internal"
_TOKEN_PATH: Final = "computeMetadata/v1/instance/service-accounts/default/token"
_SECONDS: Final = 30.0

Credentials = str | Callable[[], str] | None


class GCEClusterResolver(ClusterResolver):
    """Asks Compute Engine for the running instances of an instance group.

    It is asked again at each use. It cannot say which task this process is: give each instance
    its own `task_id`. Instances are sorted by address, by number.

    Args:
        project: The project's id.
        zone: The zone of the instance group.
        instance_group: The name of the instance group.
        port: The port of the tasks, the same on all instances.
        task_type: The job that the instances make up.
        task_id: The index of this instance.
        rpc_layer: The protocol between tasks.
        credentials: "default" takes the token of the machine's service account, from the metadata
            server (GCE_METADATA_HOST names another one); else an access token, or a function that
            returns one, or None for none.
        service: The address of the Compute Engine API, if it is not Google's own.
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
        self._task_type = task_type_name(task_type, "task_type")
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    @property
    def task_type(self) -> str:
        """The job that the instances make up; it cannot be changed."""
        assert self._task_type is not None
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            f"task_type={task_type!r}: You cannot reset the task_type of the GCEClusterResolver "
            "after it has been created: it names the job that the instances make up. Make a new "
            "resolver."
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the instances of the group that are running now."""
        token = self._token()
        addresses: list[str] = []
        for name in self._instances(token):
            instance = self._call(token, "instances", name)
            interfaces = instance.get("networkInterfaces")
            try:
                ip = interfaces[0]["networkIP"]  # type: ignore[index]
            except (IndexError, KeyError, TypeError):
                raise ValueError(
                    f"Compute Engine: the instance {name!r} has no networkInterfaces[0].networkIP."
                ) from None
            addresses.append(str(Address(str(ip), self._port)))
        return ClusterSpec({self.task_type: sorted(addresses, key=natural_order)})

    def _instances(self, token: str | None) -> list[str]:
        """Returns the names of the group's running instances, from all pages of the answer."""
        names: list[str] = []
        page: str | None = ""
        while page is not None:
            answer = self._call(
                token,
                "instanceGroups",
                self._instance_group,
                "listInstances",
                query={"pageToken": page} if page else {},
                body={"instanceState": "RUNNING"},
            )
            for i, item in enumerate(answer.get("items") or []):
                url = item.get("instance") if isinstance(item, dict) else None
                if not isinstance(url, str):
                    raise ValueError(f"Compute Engine: listInstances: items[{i}].instance: no URL.")
                names.append(url.rpartition("/")[2])
            page = answer.get("nextPageToken")
        return names

    def _token(self) -> str | None:
        if self._credentials != "default":
            return self._credentials() if callable(self._credentials) else self._credentials
        host = os.environ.get("GCE_METADATA_HOST", _METADATA_HOST)
        request = urllib.request.Request(
            f"http://{host}/{_TOKEN_PATH}", headers={"Metadata-Flavor": "Google"}
        )
        # The metadata server is part of the machine: no proxy leads there.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        token = _answer(direct, request, "the metadata server").get("access_token")
        if not isinstance(token, str):
            raise ValueError("The metadata server: the answer has no access_token.")
        return token

    def _call(
        self,
        token: str | None,
        *path: str,
        query: dict[str, str] | None = None,
        body: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Calls a method of the API on something in the zone; with a body it is a POST."""
        parts = ("projects", self._project, "zones", self._zone, *path)
        url = "/".join([self._service, *(urllib.parse.quote(part, safe="") for part in parts)])
        if query:
            url += "?" + urllib.parse.urlencode(query)
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers)
        return _answer(urllib.request.build_opener(), request, "Compute Engine")


def _answer(
    opener: urllib.request.OpenerDirector, request: urllib.request.Request, whom: str
) -> dict[str, Any]:
    """Sends a request and returns the object that comes back."""
    try:
        with opener.open(request, timeout=_SECONDS) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(2000).decode(errors="replace")
        raise RuntimeError(
            f"{whom} refused {request.full_url} with {error.code} {error.reason}: {text}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(
            f"{whom} did not answer at {request.full_url}: {error}. Is this a machine of Compute "
            "Engine, and may it reach that address?"
        ) from error
    except ValueError as error:
        raise ValueError(f"{whom}: {request.full_url} did not answer with JSON: {error}") from None
    if not isinstance(answer, dict):
        raise ValueError(f"{whom}: {request.full_url} did not answer with a JSON object.")
    return answer
