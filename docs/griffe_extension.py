"""What the reference needs besides what Griffe reads: examples, and methods defined elsewhere."""

from __future__ import annotations

import copy
import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(\s*)Example:$", re.MULTILINE)
_BARE_SESSION = re.compile(r"^(>>> .*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Examples(griffe.Extension):
    """Marks the examples in docstrings as code, as Griffe wants it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of an object that Griffe has found."""
        if obj.docstring is not None:
            # Our section is "Example:"; a session outside sections is a paragraph to Griffe.
            text = _SECTION.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _BARE_SESSION.sub(r"```pycon\n\1\n```", text.rstrip())


class AssignedMethods(griffe.Extension):
    """Shows `shuffle = order_methods.shuffle` in the body of a class as the method that it is."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replaces such attributes, once all modules of the package are known."""
        for module in _walk(pkg):
            for owner in module.classes.values():
                if not owner.is_alias:
                    self._replace_in(owner, pkg)

    def _replace_in(self, owner: griffe.Class, pkg: griffe.Module) -> None:
        for name, attribute in list(owner.attributes.items()):
            value = attribute.value
            if attribute.docstring or not isinstance(value, griffe.ExprAttribute | griffe.ExprName):
                continue
            package, _, path = value.canonical_path.partition(".")
            if package != pkg.name or not path:
                continue
            try:
                function = pkg[path]
                function = function.final_target if function.is_alias else function
            except (KeyError, griffe.AliasResolutionError):
                continue
            if isinstance(function, griffe.Function):
                method = copy.copy(function)
                method.name = name
                owner.set_member(name, method)


def _walk(module: griffe.Module) -> list[griffe.Module]:
    below = [m for m in module.modules.values() if not m.is_alias]
    return [module, *(inner for part in below for inner in _walk(part))]
