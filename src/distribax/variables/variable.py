"""`dx.Variable`: state with TensorFlow's variable interface and a placement of its own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.execution import frames, named_objects, overlay
from distribax.topology import launch_lock
from distribax.types import VariableAggregation, VariableSynchronization, WriteKind
from distribax.values import ArrayLike, DistributedValues
from distribax.values.distributed import format_listing
from distribax.variables import context_rules, creation, late_values, registry
from distribax.variables.assignment import Assignable
from distribax.variables.context_rules import Assigned
from distribax.variables.rows import RowAccess
from distribax.variables.slices import VariableSlice
from distribax.variables.variable_copy import VariableCopy, wrap_copies


@dataclasses.dataclass(frozen=True)
class VariableDescription:
    """What another process is told of a variable, beside its value.

    Attributes:
        name: Its name.
        aggregation: How values that replicas write, or have, are combined.
        synchronization: When its copies are brought together.
        trainable: Whether optimizers change it.
        where: Where it was created, for messages.
        shape: Its shape.
        dtype: Its data type.
        constraint: What `dx.Optimizer` applies to its value, if anything.
    """

    name: str
    aggregation: VariableAggregation
    synchronization: VariableSynchronization
    trainable: bool
    where: str
    shape: tuple[int, ...]
    dtype: np.dtype
    constraint: Callable[[jax.Array], jax.Array] | None = None

    def list_attributes(self) -> dict[str, Any]:
        """Returns the attributes of a variable that is like this."""
        return {f"_{name}": value for name, value in vars(self).items()}


class Variable(RowAccess, Assignable["Variable"], metaclass=creation.CreatedByStrategy):
    """A value that can be assigned, placed on devices by the strategy in scope.

    Args:
        initial_value: An array, a number, or a function that returns one. A function is called
            once, whatever the number of replicas. One that takes `partition_shape` and
            `partition_offset`, with `shape` given here, makes each shard of a divided variable.
        trainable: Whether optimizers should change it; True by default unless it is ON_READ.
        name: A name for messages and checkpoints.
        dtype: The data type; that of the initial value by default.
        synchronization: When the copies are brought together: ON_WRITE (AUTO) keeps them the same,
            ON_READ lets each replica have its own until it is read outside the replicas.
        aggregation: How values that replicas write, or have, are combined; None means NONE.
        shape: If given, the initial value must have it.
        constraint: A function that `dx.Optimizer` applies to the value after each update.
        validate_shape: Accepted as in TensorFlow; it changes nothing.
        caching_device: Accepted as in TensorFlow; it changes nothing.
        variable_def: Refused unless it is None, as in TensorFlow without graphs.
        import_scope: Accepted as in TensorFlow; it changes nothing.
        experimental_enable_variable_lifting: Accepted as in TensorFlow; it changes nothing.

    Raises:
        ValueError: The initial value is missing or has another shape, or the arguments contradict
            each other.

    Example:
        >>> import distribax as dx
        >>> v = dx.Variable([1.0, 2.0])
        >>> v.assign_add([1.0, 1.0]).numpy().tolist()
        [2.0, 3.0]
    """

    counts_idle = True
    """Whether an ON_READ variable takes what a replica with an empty piece of the batch writes."""

    def __init__(
        self,
        initial_value: jax.typing.ArrayLike
        | Sequence[object]
        | ArrayLike
        | Callable[..., jax.typing.ArrayLike]
        | None = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        *,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
        constraint: Callable[[jax.Array], jax.typing.ArrayLike] | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        variable_def: object = None,
        import_scope: str | None = None,
        experimental_enable_variable_lifting: bool = True,
    ) -> None:
        aggregation = VariableAggregation.NONE if aggregation is None else aggregation
        policy = creation.get_policy(creation.Policy(synchronization, aggregation, trainable))
        sync = VariableSynchronization.parse(policy.synchronization, "synchronization")
        self._aggregation = VariableAggregation.parse(policy.aggregation, "aggregation")
        self._name = name or "Variable"
        creation.check_unsupported(variable_def, constraint, self._name)
        self._constraint = constraint
        self._strategy = context.get_strategy()
        self._trainable = creation.decide_trainable(policy.trainable, sync)
        self._where = creation.find_creation_line(sys._getframe(1))
        value = creation.compute_initial(initial_value, dtype, shape, self._name)
        creation.check_aggregation(self._aggregation, value.dtype, self._name)
        self._shape, self._dtype = tuple(value.shape), value.dtype
        self._placement = self._strategy.extended.variable_placement(sync, self._name)
        self._synchronization = creation.settle_synchronization(sync, self._placement)
        self._buffer: jax.Array = creation.make_buffer(self._placement, value)
        # Whether somebody outside may hold the buffer, so that it must not be overwritten.
        self._shared = False
        self._announce()
        # Whether somebody may have a value for it, who has not found it yet.
        self._awaited = late_values.is_somebody_waiting()
        if self.source is not None:
            named_objects.register(self._placement.specs[0].uid, self)

    def _announce(self) -> None:
        """Makes the new variable known to those who must find all of them."""
        registry.note(self)
        if self.per_replica:
            frames.note_per_replica(self)

    # What it is.

    @property
    def name(self) -> str:
        """The variable's name, with TensorFlow's suffix."""
        self.note_identity()
        return f"{self._name}:0"

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._shape

    @property
    @override
    def dtype(self) -> np.dtype[Any]:
        """The data type of the value."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """Whether optimizers should change the variable."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values are combined."""
        return self._aggregation

    @property
    def constraint(self) -> Callable[[jax.Array], jax.typing.ArrayLike] | None:
        """The function that optimizers apply to the value after each update, or None."""
        return self._constraint

    @property
    def initial_value(self) -> jax.Array:
        """Not kept, as in TensorFlow without graphs.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"initial_value: {self.described} does not keep its initial value. Keep it yourself: "
            "initial = v.numpy() after creating the variable."
        )

    @property
    @override
    def has_copies(self) -> bool:
        """Whether every replica has a copy on its device: mirrored, or one of its own."""
        return self._placement.has_copies

    @property
    def distribute_strategy(self) -> contracts.Strategy:
        """The strategy that the variable was created under."""
        return self._strategy

    @property
    @override
    def row_shards(self) -> list[tuple[int, Variable]]:
        """The variable itself, with the number of its first row."""
        return [(0, self)]

    @property
    @override
    def states(self) -> list[Variable]:
        """The variable itself."""
        return [self]

    @property
    def placement(self) -> contracts.Placement:
        """Where the copies live."""
        return self._placement

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that have a copy."""
        return self._placement.devices

    @property
    def device(self) -> str:
        """The name of the device of the first copy (of the replica's own copy in a replica)."""
        self.note_identity()
        replica = context.get_replica_context()
        index = replica.runner.replica_id if replica is not None else 0
        names = self._placement.device_names
        return names[index] if isinstance(index, int) and index < len(names) else names[0]

    @property
    @override
    def described(self) -> str:
        """The variable as error messages name it."""
        return f"variable {self._name!r} (shape {self._shape}, created at {self._where})"

    # Reading.

    @override
    def read_value(self) -> jax.Array:
        """Returns the value as an array: the replica's own in a replica, else the combined one."""
        context_rules.guard_read(self)
        stand_in = overlay.find_stand_in(self)
        return context_rules.read(self) if stand_in is None else stand_in

    @override
    def __getitem__(self, index: object) -> Any:
        return VariableSlice(self, index).as_array()

    @override
    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array of its own.

        Raises:
            RuntimeError: `dx.function` is tracing, so that there is no value yet.
        """
        value = self.read_value()
        if jax_private.is_tracer(value):
            raise RuntimeError(
                f"numpy(): {self.described} is being traced by dx.function, where it has no value "
                "yet. Return it from the function and read the result."
            )
        return np.array(jax_private.pick_copy(value))

    # Writing.

    @override
    def _write(self, kind: WriteKind, value: Assigned) -> Variable:
        if kind is WriteKind.ASSIGN and self._awaited:
            late_values.ask_givers()
        context_rules.write(self, value, kind)
        return self

    # Copies.

    @property
    def values(self) -> tuple[VariableCopy, ...]:
        """The local copies, one for each device that has one."""
        return tuple(VariableCopy(self, i) for i in range(len(self._placement.split(self._hold()))))

    def distributed(self) -> DistributedValues:
        """Returns the copies as a distributed value, for reductions and gathers."""
        return wrap_copies(self)

    def stop_waiting(self) -> None:
        """Remembers that whoever waits for new variables has seen this one."""
        self._awaited = False

    # What the engine needs.

    @property
    def per_replica(self) -> bool:
        """Whether each replica has a value of its own."""
        return self._placement.per_replica

    @property
    def program_sharding(self) -> Sharding | None:
        """The sharding of the variable inside a compiled program, or None."""
        return self._placement.sharding

    def program_type(self) -> jax_private.ArrayType:
        """Returns the type of the array that a compiled program reads."""
        copies = (self._placement.num_copies,) if self.per_replica else ()
        return jax_private.make_array_type((*copies, *self._shape), self._dtype)

    def program_value(self) -> jax.Array:
        """Returns the array that a compiled program reads."""
        self._ask_once()
        placement, buffer = self._placement, self._buffer
        if not placement.is_program_form:
            return placement.to_program(buffer)
        jax_private.refuse_deleted(buffer)
        return buffer

    def take_program_value(self) -> jax.Array:
        """Returns an array that a compiled program may overwrite."""
        self._ask_once()
        if self._shared:
            self._buffer, self._shared = jax_private.copy_array(self._buffer), False
        placement, buffer = self._placement, self._buffer
        return buffer if placement.is_program_form else placement.to_program(buffer)

    def store_program_value(self, value: jax.Array) -> None:
        """Keeps what a compiled program has returned.

        Args:
            value: The new value, as the program holds it.
        """
        # Now, as it would be in place of the new value later.
        self._ask_once()
        placement = self._placement
        self._buffer = value if placement.is_program_form else placement.from_program(value)
        self._shared = False

    def _ask_once(self) -> None:
        """Lets those who wait find the variable; who has not by now will not in later steps."""
        if self._awaited:
            late_values.ask_givers()
            self._awaited = False

    def host_value(self) -> np.ndarray:
        """Returns the first copy's stored value, whatever is being traced."""
        return np.array(self._placement.split(self._hold())[0])

    @property
    @override
    def source(self) -> contracts.Source | None:
        """Where the value is fetched from if it lives in another process, or None."""
        return self._placement.source

    def share(self) -> jax.Array:
        """Returns the buffer itself, and remembers that somebody may hold it."""
        if self._awaited:
            late_values.ask_givers()
        return self._placement.refresh(self._hold())

    def _hold(self) -> jax.Array:
        # A program that another thread starts either copies the buffer or has replaced it.
        with launch_lock:
            self._shared = True
            return self._buffer

    def store(self, buffer: jax.Array) -> None:
        """Replaces the buffer by one that somebody else may hold too.

        Args:
            buffer: The new buffer.
        """
        with launch_lock:
            self._buffer = buffer
            self._shared = True

    @override
    def __repr__(self) -> str:
        if len(self.devices) == 1 and self._placement.label == "Variable":
            return repr(VariableCopy(self, 0))
        return format_listing(self._placement.label, self.values)

    # Copying it, and sending it to another process.

    def __copy__(self) -> Variable:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        _check_copyable(self)
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        vars(clone).update(vars(self), _buffer=jnp.copy(self.share()), _shared=False)
        clone._announce()
        return clone

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        names = [field.name for field in dataclasses.fields(VariableDescription)]
        description = VariableDescription(**{name: getattr(self, f"_{name}") for name in names})
        if self.source is not None:
            return _get_or_attach, (self._strategy, self._placement.specs, description)
        _check_picklable(self)
        return _make_again, (self.host_value(), description.list_attributes())

    @classmethod
    def attach(
        cls,
        strategy: contracts.Strategy,
        placement: contracts.Placement,
        description: VariableDescription,
    ) -> Variable:
        """Returns an object for a variable that exists already, in another process.

        Args:
            strategy: The strategy of this process.
            placement: Where the value lives.
            description: What the other process has sent.

        Returns:
            The new object; nothing is created where the value lives.
        """
        variable = cls.__new__(cls)
        vars(variable).update(
            description.list_attributes(),
            _strategy=strategy,
            _placement=placement,
            _buffer=None,
            _shared=False,
            _awaited=False,
        )
        return variable


def _check_copyable(variable: Variable) -> None:
    """Raises if `copy.deepcopy` cannot make another variable here."""
    if variable.source is not None or frames.current() is not None:
        where = "in a dx.function" if variable.source is None else "on parameter servers"
        raise TypeError(
            f"copy.deepcopy: {variable.described} cannot be copied {where}. Create another one "
            "with its value: dx.Variable(v.numpy())."
        )


def _check_picklable(variable: Variable) -> None:
    """Raises if a variable that lives in this process cannot leave it."""
    if named_objects.get_destination() is not None:
        raise TypeError(
            f"{variable.described} lives in this process only, so a function that refers to it "
            "cannot run on a worker. Create it inside `with strategy.scope():` of the "
            "ParameterServerStrategy, or pass the function its value: args=(v.numpy(),)."
        )
    if variable.placement.mesh is not None:
        raise TypeError(
            f"pickle: {variable.described} belongs to the devices of a strategy, which cannot be "
            "pickled. Pickle its value, v.numpy(), or save it with dx.Checkpoint(v=v)."
        )


def _make_again(value: np.ndarray, attributes: dict[str, Any]) -> Variable:
    variable = Variable(value, trainable=attributes["_trainable"], name=attributes["_name"])
    vars(variable).update(attributes)
    return variable


def _get_or_attach(
    strategy: contracts.ServingStrategy,
    specs: Sequence[contracts.StoredSpec],
    description: VariableDescription,
) -> Variable:
    return named_objects.get_or_create(
        specs[0].uid,
        lambda: Variable.attach(
            strategy, strategy.extended.served_placement(specs, description.name), description
        ),
    )
