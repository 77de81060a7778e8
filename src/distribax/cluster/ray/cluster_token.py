"""Ray's import, and the secret of a cluster: who does not know it cannot join."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

TOKEN_VARIABLE: Final = "RAY_AUTH_TOKEN"
"""Ray's own variable: what `ray` commands and other programs need to reach the cluster too."""
_MODE_VARIABLE: Final = "RAY_AUTH_MODE"
_PATH_VARIABLE: Final = "RAY_AUTH_TOKEN_PATH"
_DEFAULT_FILE: Final = Path(".ray", "auth_token")
"""Where `ray get-auth-token --generate` writes a token, in the home folder."""
_own: list[str] = []


def import_ray() -> Any:
    """Returns the package `ray`, imported on use; its import leaves no trace in the environment."""
    try:
        with environment_kept():
            import ray
    except ImportError as error:
        raise ImportError(
            "Parameter servers need Ray, which is not installed. Write: "
            "pip install 'distribax[ray]'"
        ) from error
    return ray


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Puts the environment variables back at the end."""
    variables = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def new_token() -> str:
    """Returns a token that nobody can guess."""
    return secrets.token_hex(32)


def given_token() -> str | None:
    """Returns the token that the surroundings give this process, where Ray looks for it too."""
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


def process_token() -> str:
    """Returns the given token, or else one that only this process knows: the same at each call.

    With that one, a cluster can only be made of servers that this process has started itself.
    """
    if given := given_token():
        return given
    if not _own:
        _own.append(new_token())
    return _own[0]


def token_environment(token: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that is to use the token."""
    environment = {k: v for k, v in inherited.items() if k != _PATH_VARIABLE}
    return environment | {_MODE_VARIABLE: "token", TOKEN_VARIABLE: token}


@contextlib.contextmanager
def token_in_force(token: str | None) -> Iterator[None]:
    """While it lasts, what this process starts of Ray uses the token; the environment is put back.

    Ray reads the variables when it connects and remembers them as long as it is connected.
    """
    if token is None:
        yield
        return
    with environment_kept():
        os.environ.pop(_PATH_VARIABLE, None)
        os.environ.update({_MODE_VARIABLE: "token", TOKEN_VARIABLE: token})
        reread()
        yield


def reread() -> None:
    """Makes Ray read the variables again, after it was imported or has been used."""
    raylet = import_ray()._raylet
    # In this order: Ray ends the process if it is to use a token and finds none.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
