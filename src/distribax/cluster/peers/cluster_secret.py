"""The secret that the workers of a cluster share: whoever does not have it cannot join them."""

from __future__ import annotations

import logging
import os
import stat
from typing import Final

from distribax.cluster.spec.host_address import is_loopback
from distribax.errors import DistribaxError

SECRET_VARIABLE: Final = "DISTRIBAX_CLUSTER_SECRET"
"""Holds the secret."""
SECRET_FILE_VARIABLE: Final = "DISTRIBAX_CLUSTER_SECRET_FILE"
"""Names a file that holds the secret."""

_SHORTEST: Final = 16
_LONGEST: Final = 4096
HOW_TO: Final = (
    f"Make one, `openssl rand -hex 32 > secret; chmod 600 secret`, copy it to every machine, and "
    f"set {SECRET_FILE_VARIABLE} in every worker."
)
"""What to do where there is no secret."""
_logger = logging.getLogger(__name__)


class ClusterSecretError(DistribaxError, PermissionError):
    """What answers at the first worker's address does not have this worker's secret."""


def find_secret() -> str:
    """Returns the secret that this process was given; an empty text if there is none.

    Raises:
        ValueError: The secret is too short or too long, or its file cannot be read, is not a file
            of this user, or may be read by others.
    """
    if (text := os.environ.get(SECRET_VARIABLE)) is not None:
        return _check(text.strip(), f"{SECRET_VARIABLE}: the secret")
    if (path := os.environ.get(SECRET_FILE_VARIABLE)) is None:
        return ""
    field = f"{SECRET_FILE_VARIABLE}={path!r}"
    try:
        text = _read(path, field).decode()
    except OSError as error:
        raise ValueError(f"{field}: the secret cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: the secret is not text. {HOW_TO}") from error
    return _check(text.strip(), f"{field}: the secret")


def warn_without_secret(host: str) -> None:
    """Warns of workers that meet without a secret, if other machines can reach the address.

    Args:
        host: The host of the address.
    """
    if not is_loopback(host):
        _logger.warning(
            "The workers meet at %s without a secret: whoever reaches that address can take a "
            "worker's place or end the training. %s",
            host,
            HOW_TO,
        )


def _read(path: str, field: str) -> bytes:
    # A pipe must not stop the program.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{field} is not an ordinary file. {HOW_TO}")
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
            raise ValueError(
                f"{field} can be read or changed by others: it has the permissions "
                f"{stat.filemode(found.st_mode)} and the owner {found.st_uid}. Write: chmod 600"
            )
        return file.read(_LONGEST + 1)


def _check(secret: str, field: str) -> str:
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise ValueError(
            f"{field} has {len(secret)} characters. Expected {_SHORTEST} to {_LONGEST}, which "
            f"nobody can guess. {HOW_TO}"
        )
    return secret
