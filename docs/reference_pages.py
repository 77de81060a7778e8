"""Writes the pages of the API reference: one per group of public names, and a list of all names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

FACES = (
    "distribax",
    "distribax.data",
    "distribax.metrics",
    "distribax.logging",
    "distribax.train",
    "distribax.random",
    "distribax.coordinator",
    "distribax.partitioners",
    "distribax.cluster_resolver",
    "distribax.data.experimental",
    "distribax.experimental",
    "distribax.contrib.distribute",
    "distribax.estimator",
    "distribax.integrations.keras",
    "distribax.testing",
)
"""The modules whose names users may use. An object belongs to the first face that shows it."""

_GROUPS_OF_FACES = {
    "distribax.data": "data",
    "distribax.data.experimental": "data",
    "distribax.metrics": "metrics",
    "distribax.logging": "logging",
    "distribax.train": "training",
    "distribax.random": "training",
    "distribax.coordinator": "parameter_servers",
    "distribax.partitioners": "parameter_servers",
    "distribax.cluster_resolver": "clusters",
    "distribax.contrib.distribute": "tower_api",
    "distribax.estimator": "estimator",
    "distribax.experimental": "strategies",
    "distribax.integrations.keras": "keras",
    "distribax.testing": "testing",
}

_GROUPS_OF_LAYERS = {
    "strategies": "strategies",
    "parameter_server": "strategies",
    "context": "contexts",
    "values": "values",
    "variables": "variables",
    "collectives": "collectives",
    "execution": "training",
    "training": "training",
    "data": "input",
    "cluster": "clusters",
    "topology": "devices",
    "contrib": "tower_api",
    "progress": "logging",
}
"""Where a name of `dx` itself belongs, by the folder that defines it."""

_GROUPS_OF_NAMES = {
    "VariableAggregation": "variables",
    "VariableSynchronization": "variables",
    "CommunicationImplementation": "collectives",
    "CommunicationOptions": "collectives",
    "ReduceOp": "collectives",
    "Summary": "logging",
    "VariableSummary": "logging",
    "summary": "logging",
    "visualize": "logging",
    "RunOptions": "contexts",
    "ValueContext": "contexts",
}

CONSTANTS = {
    "distribax.data.AUTOTUNE": "Lets the library choose a number of threads or a buffer size.",
    "distribax.data.INFINITE_CARDINALITY": "The cardinality of a data set that never ends.",
    "distribax.data.UNKNOWN_CARDINALITY": "The cardinality of a data set of unknown length.",
    "distribax.data.experimental.SHARD_HINT": "The arguments of `shard` under the policy HINT.",
    "distribax.contrib.distribute.AUTO_REUSE": "Creates a variable or finds it by its name.",
    "distribax.types.RESTARTABLE_EXIT_CODE": "42: the process was told to stop, and has saved.",
    "distribax.types.PEER_LOST_EXIT_CODE": "43: the process has lost another worker.",
    "distribax.types.COLLECTIVE_ERROR_EXIT_CODE": "44: the workers made different calls.",
}
"""Public values that are neither classes nor functions, and what the list of names says of them."""

TITLES = {
    "strategies": "Strategies",
    "contexts": "Contexts",
    "values": "Distributed values",
    "variables": "Variables",
    "collectives": "Reductions",
    "training": "Steps and training",
    "metrics": "Metrics",
    "input": "Distributed input",
    "data": "Data sets",
    "clusters": "Clusters",
    "parameter_servers": "Coordinator and partitioners",
    "devices": "Devices",
    "logging": "Logging, progress, summaries",
    "errors": "Exceptions and exit codes",
    "keras": "Keras",
    "estimator": "Estimator",
    "tower_api": "Tower API",
    "testing": "Testing",
    "other": "Other names",
}
"""The pages, in the order of the site. A page without names is not written."""


@dataclass(frozen=True)
class PublicName:
    """A class or function that users can reach."""

    path: str
    """The dotted path that the reference is written for, such as `distribax.data.Dataset`."""
    value: type | FunctionType
    aliases: list[str] = field(default_factory=list)

    @property
    def short(self) -> str:
        """The name as users write it."""
        return _shorten(self.path)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.value) or "").partition("\n")[0]

    @property
    def group(self) -> str:
        """The page that it is on."""
        face, _, name = self.path.rpartition(".")
        if issubclass_of_exception(self.value) and face == "distribax":
            return "errors"
        if name in _GROUPS_OF_NAMES and face == "distribax":
            return _GROUPS_OF_NAMES[name]
        if face in _GROUPS_OF_FACES:
            return _GROUPS_OF_FACES[face]
        layer = self.value.__module__.split(".")[1]
        return _GROUPS_OF_LAYERS.get(layer, "other")


@dataclass(frozen=True)
class PublicConstant:
    """A value that users can reach."""

    path: str
    summary: str

    @property
    def short(self) -> str:
        """The name as users write it."""
        return _shorten(self.path)

    @property
    def group(self) -> str:
        """The page that it is on."""
        face = self.path.rpartition(".")[0]
        return "errors" if face == "distribax.types" else _GROUPS_OF_FACES[face]


def _shorten(path: str) -> str:
    if path.startswith(("distribax.contrib", "distribax.testing", "distribax.types")):
        return path
    return "dx" + path.removeprefix("distribax")


def _label(short: str) -> str:
    """Returns a name that fits the table of contents, in which longer ones are cut off."""
    return short if len(short) <= 30 else short.rpartition(".")[2]


def issubclass_of_exception(value: object) -> bool:
    """Returns whether a value is an exception class."""
    return isinstance(value, type) and issubclass(value, BaseException)


def find_public_names() -> list[PublicName]:
    """Returns every public class and function once, with the other names it has."""
    found: dict[int, PublicName] = {}
    for face in FACES:
        for name, value in _members(_import(face)):
            path = f"{face}.{name}"
            if id(value) in found:
                found[id(value)].aliases.append(path)
            else:
                found[id(value)] = PublicName(path, value)
    return list(found.values())


def _members(module: ModuleType) -> Iterator[tuple[str, type | FunctionType]]:
    for name in dir(module):
        value = getattr(module, name)
        is_ours = getattr(value, "__module__", "").partition(".")[0] == "distribax"
        # `explain_missing` is how the faces answer for names that they do not have.
        hidden = name.startswith("_") or name == "explain_missing"
        if is_ours and not hidden and isinstance(value, type | FunctionType):
            yield name, value


def _import(face: str) -> ModuleType:
    parent, _, last = face.rpartition(".")
    # A face may be an attribute of the package that is loaded on use.
    found = getattr(importlib.import_module(parent), last, None) if parent else None
    return found if isinstance(found, ModuleType) else importlib.import_module(face)


def find_constants() -> list[PublicConstant]:
    """Returns the public values that are neither classes nor functions."""
    return [PublicConstant(path, summary) for path, summary in CONSTANTS.items()]


def make_pages() -> dict[str, str]:
    """Returns the Markdown of each page by its path below docs/."""
    names = find_public_names()
    public = {id(name.value) for name in names}
    pages = {"reference/index.md": _make_index(names)}
    for group, title in TITLES.items():
        members = _members_of(group, names)
        if members or any(constant.group == group for constant in find_constants()):
            parts = [f"# {title}", *(_make_entry(name, public) for name in members)]
            parts += [_make_constant(each) for each in find_constants() if each.group == group]
            pages[f"reference/{group}.md"] = "\n\n".join(parts) + "\n"
    return pages


def _members_of(group: str, names: list[PublicName]) -> list[PublicName]:
    return sorted((n for n in names if n.group == group), key=lambda n: n.path.lower())


def _make_constant(constant: PublicConstant) -> str:
    options = f'heading: "{constant.short}"\n      toc_label: "{_label(constant.short)}"'
    return f"::: {constant.path}\n    options:\n      {options}"


def _make_entry(name: PublicName, public: set[int]) -> str:
    options = [f'heading: "{name.short}"', f'toc_label: "{_label(name.short)}"']
    if inherited := _inherited(name.value, public):
        options.append(f"inherited_members: [{', '.join(inherited)}]")
    lines = [f"::: {name.path}", "    options:", *(f"      {option}" for option in options)]
    if name.aliases:
        also = ", ".join(f"`{PublicName(path, name.value).short}`" for path in name.aliases)
        lines += ["", f"Also: {also}", "{ .aliases }"]
    return "\n".join(lines)


def _inherited(value: type | FunctionType, public: set[int]) -> list[str]:
    """Returns the methods that a class has from bases without an entry of their own."""
    if not isinstance(value, type):
        return []
    bases = [b for b in value.__mro__[1:] if b.__module__.startswith("distribax")]
    hidden = [b for b in bases if id(b) not in public]
    shown = {name for base in bases if id(base) in public for name in dir(base)}
    names = {name for base in hidden for name in vars(base) if not name.startswith("_")}
    return sorted(names - shown - set(vars(value)))


def _make_index(names: list[PublicName]) -> str:
    lines = [
        "# API reference",
        "",
        "Every public name, by topic. Names are TensorFlow's without the prefix `tf.distribute.`;",
        "`dx` is `import distribax as dx`.",
    ]
    for group, title in TITLES.items():
        members = [
            *_members_of(group, names),
            *(constant for constant in find_constants() if constant.group == group),
        ]
        if not members:
            continue
        lines += ["", f"## [{title}]({group}.md)", "", "| name | what it is |", "|---|---|"]
        for name in members:
            summary = name.summary.replace("|", "\\|")
            lines.append(f"| [`{name.short}`][{name.path}] | {summary} |")
    return "\n".join(lines) + "\n"
