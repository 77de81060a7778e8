"""Variables on parameter servers, the same in the coordinator's process and in a worker's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from distribax import contracts
from distribax.execution import named_objects
from distribax.parameter_server import ParameterSpec
from distribax.parameter_server.optimizer import ServedUpdate, make_note_key
from distribax.parameter_server.placement import ParameterSource, Served
from distribax.parameter_server.settings import RoundSettings
from distribax.strategies.one_device import SingleExtended
from distribax.strategies.strategy import Strategy
from distribax.training.gradient_pairs import Target
from distribax.training.optimizer_host import OptimizerHost, UpdateSettings
from distribax.types import VariableSynchronization
from distribax.variables import Placement, ShardedVariable, Variable
from distribax.variables.creation import get_colocated
from distribax.variables.sharded import sharded_variable

# The arguments of `dx.Variable` that can be passed by position.
_POSITIONAL = ("initial_value", "trainable", "name", "dtype")


class ServedStrategy(Strategy):
    """Base of strategies whose variables live on parameter servers.

    Args:
        uid: The name that the strategy has in every process that takes part in it.
        source: This process's source to the servers.
        num_workers: How many workers there are.
        rounds: How gradients of several workers become one update.
    """

    def __init__(
        self, uid: str, source: ParameterSource, num_workers: int, rounds: RoundSettings
    ) -> None:
        super().__init__(ParameterServerExtended(source, num_workers, rounds))
        self.source = source
        self.variable_partitioner: Callable[..., Sequence[int]] | None = None
        self._uid = uid
        named_objects.register(uid, self)

    @override
    def __reduce_ex__(self, protocol: object) -> tuple[Callable[[str], object], tuple[str]]:
        return _find_strategy, (self._uid,)


def _find_strategy(uid: str) -> object:
    """Returns this process's side of a strategy that was pickled by name."""
    strategy = named_objects.find(uid)
    if strategy is None:
        raise RuntimeError("ParameterServerStrategy: this process is not a worker of the strategy.")
    return strategy


class ParameterServerExtended(SingleExtended, OptimizerHost):
    """Places variables on servers; a step runs as one replica in the process that calls it."""

    source: ParameterSource

    def __init__(self, source: ParameterSource, num_workers: int, rounds: RoundSettings) -> None:
        super().__init__(None)
        self.source = source
        self._num_workers = num_workers
        self._rounds = rounds

    @property
    @override
    def worker_devices(self) -> tuple[str, ...]:
        count = range(self._num_workers)
        return tuple(f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in count)

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        count = range(self.source.num_servers)
        return tuple(f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in count)

    @override
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """Returns the first variable by name: non-slot variables go to its server.

        Args:
            var_list: The variables that are optimized.

        Returns:
            One of them, to be passed to `colocate_vars_with` and `update_non_slot`.

        Raises:
            ValueError: If `var_list` is empty.
        """
        if not var_list:
            raise ValueError(
                "non_slot_devices: var_list is empty. Non-slot variables go to the server of the "
                "variables being optimized; pass those."
            )
        return min(var_list, key=lambda variable: variable.name)

    @override
    def _placement(self, synchronization: VariableSynchronization, name: str) -> Placement:
        return Served(self.source, name=name)

    @override
    def create_variable(
        self, create: Callable[..., Variable], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Variable | ShardedVariable:
        assert isinstance(self.strategy, ServedStrategy)
        partitioner = self.strategy.variable_partitioner
        # Beside another variable, the variable itself decides where it is.
        if partitioner is None or get_colocated() is not None or len(args) > len(_POSITIONAL):
            return create(*args, **kwargs)
        named = dict(zip(_POSITIONAL, args, strict=False))
        with self.source.spread():
            return sharded_variable.create_divided(create, named | dict(kwargs), partitioner)

    def served_placement(self, specs: Sequence[contracts.StoredSpec], name: str) -> Placement:
        """Returns the placement of a variable that exists already."""
        own = tuple(spec for spec in specs if isinstance(spec, ParameterSpec))
        return Served(self.source, specs=own, name=name)

    @override
    def create_update(self, settings: UpdateSettings) -> ServedUpdate:
        return ServedUpdate(settings, self._rounds)

    @override
    def find_targets(self, uid: str) -> list[Target] | None:
        note = self.source.client.get_note(make_note_key(uid))
        if note is None:
            return None
        uids: list[list[str]] = json.loads(note)
        return [_find_target(shards) for shards in uids]


def _find_target(uids: list[str]) -> Variable | ShardedVariable:
    variables = [
        variable for uid in uids if isinstance(variable := named_objects.find(uid), Variable)
    ]
    if len(variables) < len(uids):
        raise RuntimeError("optimizer: it updates variables that this process no longer refers to.")
    return ShardedVariable.of(variables)
