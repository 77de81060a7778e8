"""The versions of the packages that distribax uses."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from distribax.cli.findings import Finding
from distribax.cli.version_ranges import Requirement, is_in_range, parse_requirement

_NEEDED: Final = ("jax", "numpy", "optax", "orbax-checkpoint", "grain", "rich")
"""The packages to look for if distribax is not installed, so that its requirements are unknown."""

_TOOLS: Final = ("all", "docs", "test")
"""Extras for those who work on distribax itself; users do not need them."""


def _read_requirements() -> list[Requirement]:
    try:
        lines = metadata.requires("distribax") or []
    except metadata.PackageNotFoundError:
        lines = list(_NEEDED)
    return [parse_requirement(line) for line in lines]


def find_version(name: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_versions() -> Iterator[Finding]:
    """Yields whether Python, distribax and the packages it needs are what it was tested with."""
    yield Finding("versions", "python", platform.python_version())
    own = find_version("distribax")
    if own is None:
        value = "runs from its source and is not installed: the versions it needs are not known"
        fix = "pip install . in the folder of the source"
        yield Finding("versions", "distribax", value, fix)
    else:
        yield Finding("versions", "distribax", own)
    for needed in _read_requirements():
        if needed.extra is None:
            yield _check_version("versions", needed.name, needed, is_needed=True)
            if needed.name == "jax":
                yield _check_jaxlib()


def _check_version(
    area: str, subject: str, needed: Requirement, *, is_needed: bool = False
) -> Finding:
    """Returns whether a package is installed, in a version that distribax is tested with."""
    found = find_version(needed.name)
    install = f"pip install '{needed.name}{needed.range}'"
    if found is None:
        return Finding(area, subject, "not installed", install, is_needed)
    if not is_in_range(found, needed.range):
        value = f"{found}, outside of the tested range {needed.range}"
        return Finding(area, subject, value, install, is_needed)
    return Finding(area, subject, f"{found} (tested: {needed.range or 'not known'})")


def _check_jaxlib() -> Finding:
    jax, jaxlib = find_version("jax"), find_version("jaxlib")
    if jax is None or jaxlib is None or jax.split(".")[:2] != jaxlib.split(".")[:2]:
        value = f"{jaxlib or 'not installed'}, with jax {jax}"
        fix = f"pip install 'jaxlib=={jax}'"
        return Finding("versions", "jaxlib", value, fix, is_problem=True)
    return Finding("versions", "jaxlib", jaxlib)


def check_extras() -> Iterator[Finding]:
    """Yields which optional packages are installed, and how to get the others."""
    for needed in _read_requirements():
        if needed.extra is None or needed.extra in _TOOLS:
            continue
        subject = f"{needed.extra}: {needed.name}"
        if find_version(needed.name) is None:
            # Nobody needs all extras, so this is not a warning; the table says how to get it.
            how = f"pip install 'distribax[{needed.extra}]'"
            yield Finding("extras", subject, f"not installed; if you need it: {how}")
        else:
            yield _check_version("extras", subject, needed)
