"""Requests to Google Cloud, and to the metadata server that each of its machines has."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from typing import Final

from distribax.cluster.environment_variables import read_seconds

_METADATA_HOST: Final = "metadata.google.internal"
_REQUEST_SECONDS: Final = read_seconds("DISTRIBAX_RESOLVER_REQUEST_SECONDS", 30.0)
"""How long one request to Compute Engine or to the metadata server may take."""
_MAX_ANSWER: Final = 64 << 20
"""How many bytes of an answer are read; a longer one is of no use then."""


class _RefusedError(RuntimeError):
    """A server has answered with this status of HTTP, and no answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def send(
    opener: urllib.request.OpenerDirector, request: urllib.request.Request, whom: str
) -> bytes:
    """Sends a request and returns the answer.

    Args:
        opener: Knows the way, by a proxy or none.
        request: The request.
        whom: The name of the server, for error messages.

    Returns:
        The body of the answer.

    Raises:
        RuntimeError: The server does not answer, or refuses the request.
    """
    try:
        with opener.open(request, timeout=_REQUEST_SECONDS) as response:
            answer: bytes = response.read(_MAX_ANSWER)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(2000).decode(errors="replace")
        raise _RefusedError(
            error.code,
            f"{whom} refused {request.full_url} with {error.code} {error.reason}: {text}",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(
            f"{whom} did not answer at {request.full_url}: {error}. Is this a machine of Compute "
            "Engine, and can it reach that address?"
        ) from error
    return answer


def read_metadata(path: str) -> bytes | None:
    """Returns what the metadata server of this machine has at a path; None if that is nothing.

    GCE_METADATA_HOST names another server.

    Args:
        path: The path below the instance's own.

    Returns:
        The entry.

    Raises:
        RuntimeError: The server does not answer, or refuses the request.
    """
    host = os.environ.get("GCE_METADATA_HOST", _METADATA_HOST)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"}
    )
    # The metadata server is part of the machine and is never reached through a proxy.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return send(direct, request, "the metadata server")
    except _RefusedError as error:
        if error.status == http.client.NOT_FOUND:
            return None
        raise
