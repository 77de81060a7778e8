"""How functions of other libraries are replaced by ones that know about strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

Function: TypeAlias = Callable[..., Any]


def replacement(call: Function) -> Callable[[Function], Function]:
    """Turns a function of an original and its arguments into what replaces an original.

    Args:
        call: Is given the original, and then what the original would be given.

    Returns:
        A function that takes an original, and returns the function to put in its place.
    """

    def replace(original: Function) -> Function:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replaced

    return replace
