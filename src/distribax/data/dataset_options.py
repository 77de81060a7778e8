"""Options of a data set: how it is sharded over workers and how many threads it may use."""

from __future__ import annotations

import copy
import enum
from types import NoneType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from typing_extensions import override

from distribax.types import ParsedEnum

AUTOTUNE = -1
"""Lets the library choose a number of threads or a buffer size."""


class AutoShardPolicy(ParsedEnum):
    """How a data set is divided among the workers of a strategy.

    OFF: not at all, every worker sees everything. AUTO: FILE if the data set is read from files,
    else DATA. FILE: every worker reads its own files. DATA: every worker reads everything and
    keeps its part of each batch. HINT: `shard(SHARD_HINT, ...)` in the pipeline marks the place.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


SHARD_HINT = -1
"""Stands for the number of workers, and this worker's index, in `shard` under the policy HINT."""


class OptionGroup:
    """A set of named options, which a subclass annotates.

    Those that were never set have their default, mostly None, and are left alone by a merge.
    """

    # The known names with their type, from the annotations; a nested group is given by its class.
    _known: ClassVar[dict[str, type]] = {}
    _aliases: ClassVar[dict[str, str]] = {}
    _defaults: ClassVar[dict[str, object]] = {}

    @override
    def __init_subclass__(cls) -> None:
        cls._known = {
            name: _strip_none(hint)
            for name, hint in get_type_hints(cls).items()
            if not name.startswith("_") and name not in cls._aliases
        }
        cls._defaults = {name: getattr(cls, name, None) for name in cls._known}

    def __init__(self, **values: object) -> None:
        for name, kind in self._known.items():
            empty = kind() if issubclass(kind, OptionGroup) else self._defaults[name]
            object.__setattr__(self, name, empty)
        for name, value in values.items():
            setattr(self, name, value)

    @override
    def __setattr__(self, name: str, value: object) -> None:
        name = self._aliases.get(name, name)
        if name not in self._known:
            known = ", ".join(sorted({*self._known, *self._aliases}))
            raise AttributeError(
                f"{type(self).__name__} has no option {name!r}. The known options are: {known}."
            )
        object.__setattr__(self, name, self._check(name, self._known[name], value))

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are not stored: an alias, or a mistake.
        if name in self._aliases:
            return getattr(self, self._aliases[name])
        raise AttributeError(f"{type(self).__name__} has no option {name!r}.")

    def _check(self, name: str, kind: type, value: object) -> object:
        if value is None:
            return None
        where = f"{type(self).__name__}.{name}"
        if issubclass(kind, enum.Enum):
            assert issubclass(kind, ParsedEnum)
            return kind.parse(value, where)  # type: ignore[arg-type]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{where}={value!r} is not allowed; expected a {kind.__name__}.")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{where}={value!r} is negative; expected a count of at least 0.")
        return value

    def merge(self, later: Self) -> Self:
        """Returns new options: these, overridden by those set in `later`.

        Args:
            later: Options of the same class.

        Returns:
            The options of both.
        """
        assert type(later) is type(self)
        merged = copy.deepcopy(self)
        for name in self._known:
            mine, its = getattr(self, name), getattr(later, name)
            if isinstance(mine, OptionGroup):
                object.__setattr__(merged, name, mine.merge(its))
            elif its is not None and its != self._defaults[name]:
                object.__setattr__(merged, name, its)
        return merged

    @override
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(
            getattr(self, name) == getattr(other, name) for name in self._known
        )

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = type(self)()
        for name in self._known:
            object.__setattr__(duplicate, name, copy.deepcopy(getattr(self, name), memo))
        return duplicate

    @override
    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)!r}" for name in self._known]
        return f"{type(self).__name__}({', '.join(given)})"


def _strip_none(hint: Any) -> type:
    """Returns the class of values that an annotation such as `int | None` allows beside None."""
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
    return get_origin(kind) or kind


class DistributeOptions(OptionGroup):
    """How a data set is divided over workers and devices.

    Attributes:
        auto_shard_policy: How it is divided among workers; AUTO unless it is set.
        num_devices: Accepted and kept; strategies know their devices.
    """

    auto_shard_policy: AutoShardPolicy | None = AutoShardPolicy.AUTO
    num_devices: int | None

    @property
    def auto_shard(self) -> bool:
        """Whether it is divided among workers at all: an older form of the policy."""
        return self.auto_shard_policy is not AutoShardPolicy.OFF

    @override
    def __setattr__(self, name: str, value: object) -> None:
        if name == "auto_shard":
            name, value = "auto_shard_policy", "AUTO" if value else "OFF"
        super().__setattr__(name, value)


class ThreadingOptions(OptionGroup):
    """How many threads a pipeline may use where the library chooses (AUTOTUNE).

    Attributes:
        private_threadpool_size: How many threads; None for as many as there are cores.
        max_intra_op_parallelism: Accepted and kept; NumPy's functions use one thread.
    """

    private_threadpool_size: int | None
    max_intra_op_parallelism: int | None


class AutotuneAlgorithm(ParsedEnum):
    """How tf.data tunes pipelines; accepted, as there is nothing to tune here."""

    DEFAULT = 0
    HILL_CLIMB = 1
    GRADIENT_DESCENT = 2
    MAX_PARALLELISM = 3
    STAGE_BASED = 4


class ExternalStatePolicy(ParsedEnum):
    """What tf.data does about state in functions; accepted, as functions are ordinary Python."""

    WARN = 0
    IGNORE = 1
    FAIL = 2


class AutotuneOptions(OptionGroup):
    """How tf.data tunes pipelines; accepted and kept, without effect.

    Attributes:
        enabled: Whether it does.
        autotune_algorithm: How.
        cpu_budget: How many cores it may use.
        ram_budget: How many bytes of memory it may use.
        initial_parallelism: Where it starts.
        min_parallelism: Where it ends at the lowest.
    """

    enabled: bool | None
    autotune_algorithm: AutotuneAlgorithm | None
    cpu_budget: int | None
    ram_budget: int | None
    initial_parallelism: int | None
    min_parallelism: int | None


class OptimizationOptions(OptionGroup):
    """How tf.data rewrites pipelines; accepted and kept, without effect."""

    apply_default_optimizations: bool | None
    filter_fusion: bool | None
    filter_parallelization: bool | None
    inject_prefetch: bool | None
    map_and_batch_fusion: bool | None
    map_and_filter_fusion: bool | None
    map_fusion: bool | None
    map_parallelization: bool | None
    noop_elimination: bool | None
    parallel_batch: bool | None
    seq_interleave_prefetch: bool | None
    shuffle_and_repeat_fusion: bool | None


class Options(OptionGroup):
    """Options of a data set, attached with `Dataset.with_options`.

    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    >>> options.experimental_distribute.auto_shard_policy
    <AutoShardPolicy.DATA: 2>

    Pipelines are always deterministic here; `deterministic` is accepted and kept. With
    `worker_processes`, maps that are given `num_parallel_calls` run in that many processes instead
    of threads: for slow functions in pure Python. They are started by Python's "spawn", so scripts
    need the usual `if __name__ == "__main__":`.

    The other options of tf.data are accepted and kept, without effect: `autotune`,
    `experimental_optimization`, `experimental_external_state_policy`, `experimental_slack`,
    `experimental_symbolic_checkpoint`, `experimental_warm_start`, `framework_type`.
    """

    autotune: AutotuneOptions
    experimental_optimization: OptimizationOptions
    experimental_external_state_policy: ExternalStatePolicy | None
    experimental_slack: bool | None
    experimental_symbolic_checkpoint: bool | None
    experimental_warm_start: bool | None
    framework_type: list[str] | None
    dataset_name: str | None
    deterministic: bool | None
    experimental_distribute: DistributeOptions
    threading: ThreadingOptions
    experimental_threading: ThreadingOptions
    worker_processes: int | None
    _aliases: ClassVar[dict[str, str]] = {
        "experimental_threading": "threading",
        "experimental_deterministic": "deterministic",
    }

    @override
    def _check(self, name: str, kind: type, value: object) -> object:
        if value is None and issubclass(kind, OptionGroup):
            raise TypeError(f"Options.{name}=None is not allowed; expected a {kind.__name__}.")
        return super()._check(name, kind, value)
