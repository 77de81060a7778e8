"""The import of Ray, and the secret of a cluster: without it, nobody can join."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

TOKEN_VARIABLE: Final = "RAY_AUTH_TOKEN"
"""Ray's own variable: `ray` commands and other programs need it, too, to reach the cluster."""
GCS_PATIENCE_VARIABLE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
GCS_PATIENCE: Final = str(1 << 30)
"""Years, in seconds: by default, Ray ends any process that misses the head for a minute.

It does so from C++, without Python's exit functions. distribax notices earlier, and says so.
"""
_MODE_VARIABLE: Final = "RAY_AUTH_MODE"
_PATH_VARIABLE: Final = "RAY_AUTH_TOKEN_PATH"
_DEFAULT_FILE: Final = Path(".ray", "auth_token")
"""Where `ray get-auth-token --generate` writes a token, in the home folder."""

_own_token: str | None = None
"""The token that this process has made for itself."""


def import_ray() -> ModuleType:
    """Returns the package `ray`, imported on use; the environment variables stay as they are.

    Raises:
        ImportError: Ray is not installed.
    """
    if sys.modules.get("ray") is not None:
        # Threads call this all the time: they must not touch what the program sets meanwhile.
        import ray

        return ray
    try:
        with keep_environment():
            os.environ.setdefault(GCS_PATIENCE_VARIABLE, GCS_PATIENCE)
            import ray
    except ImportError as error:
        raise ImportError(
            "Parameter servers need Ray, which is not installed. Write: "
            "pip install 'distribax[ray]'"
        ) from error
    return ray


@contextlib.contextmanager
def keep_environment() -> Iterator[None]:
    """Restores the environment variables that Ray sets at the end.

    Others are the program's, which may set them meanwhile: Ray may be started again at any time.
    """
    before = _read_rays_variables()
    try:
        yield
    finally:
        for name in _read_rays_variables().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _read_rays_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"
    }


def make_token() -> str:
    """Returns a token that nobody can guess."""
    return secrets.token_hex(32)


def find_token() -> str | None:
    """Returns the token that this process was given, in the places where Ray looks for it, too.

    Raises:
        ValueError: The file that RAY_AUTH_TOKEN_PATH names cannot be read.
    """
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return token
    if path := os.environ.get(_PATH_VARIABLE):
        try:
            return Path(path).read_text().strip() or None
        except OSError as error:
            raise ValueError(
                f"{_PATH_VARIABLE}={path!r}: the token cannot be read: {error}"
            ) from error
    with contextlib.suppress(OSError, RuntimeError):
        return (Path.home() / _DEFAULT_FILE).read_text().strip() or None
    return None


def get_process_token() -> str:
    """Returns the token that was given, or else one that only this process knows.

    With its own token, a process can only use servers that it has started itself.
    """
    global _own_token
    if given := find_token():
        return given
    if _own_token is None:
        _own_token = make_token()
    return _own_token


def make_token_environment(token: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a process that is to use the token."""
    environment = {k: v for k, v in inherited.items() if k != _PATH_VARIABLE}
    return environment | {_MODE_VARIABLE: "token", TOKEN_VARIABLE: token}


@contextlib.contextmanager
def use_token(token: str | None) -> Iterator[None]:
    """Lets Ray use the token in the block; restores the environment variables at the end.

    Ray reads the variables when it connects and remembers them as long as it is connected.
    """
    if token is None:
        yield
        return
    with keep_environment():
        os.environ.pop(_PATH_VARIABLE, None)
        os.environ.update({_MODE_VARIABLE: "token", TOKEN_VARIABLE: token})
        reload_token()
        yield


def reload_token() -> None:
    """Makes Ray read the variables again, after it was imported or used."""
    raylet = import_ray()._raylet
    # In this order: Ray ends the process if it is to use a token and finds none.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
