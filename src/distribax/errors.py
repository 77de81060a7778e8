"""Exceptions that cross layers, and signals that the engine sends to itself."""

from __future__ import annotations

import enum
import inspect
from typing import Any

from typing_extensions import override


class DistribaxError(Exception):
    """Base of every exception that distribax defines.

    Each one also derives from the built-in type that fits, so that `except RuntimeError` or
    `except ConnectionError` still catches it. Mistakes in arguments are plain `ValueError` and
    `TypeError`, as in JAX.
    """


class DetailedError(DistribaxError):
    """Base of exceptions that keep the arguments they were made from, as attributes of that name.

    They survive pickling: the message is written again in the other process.
    """

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        names = inspect.signature(type(self)).parameters
        return type(self), tuple(getattr(self, name) for name in names)


class ControlFlow(BaseException):
    """Base of the signals that the engine sends to itself through user code.

    They derive from BaseException so that a user's `except Exception` does not swallow them.
    """


class ReplicaAborted(ControlFlow):
    """Unwinds a replica's thread because another replica has failed."""


class NeedsOwnMesh(ControlFlow):
    """Ends a trace that runs replicas while the user has set another mesh with `jax.set_mesh`."""


class HostMode(enum.Enum):
    """How a function runs that cannot be one compiled program."""

    EAGER = enum.auto()
    """Eagerly, at every call: the replicas cannot be one program."""
    LOOP = enum.auto()
    """On the host, with compiled steps: it loops over input."""
    ONCE = enum.auto()
    """On the host, with compiled steps, this once: the input ends in it, for example."""


class HostOnly(ControlFlow):
    """Stops a trace: what was asked needs the host.

    Attributes:
        reason: What needs the host.
        mode: How the function runs instead.
    """

    def __init__(self, reason: str, mode: HostMode) -> None:
        super().__init__(reason)
        self.reason = reason
        self.mode = mode


class UnsupportedKerasError(DistribaxError, RuntimeError):
    """A Keras model cannot be distributed: its version, its backend or its mode is another."""


class OutOfRangeError(DistribaxError, StopIteration):
    """The input is exhausted; also a StopIteration, so that loops end."""


class DamagedCheckpointError(DistribaxError, ValueError):
    """What a checkpoint holds is not what was saved: files are missing, or bits have changed."""


class VariableInJitError(DistribaxError, RuntimeError):
    """A variable was read inside `jax.jit`, which would keep the value of that moment."""


class ReplicaInputError(DistribaxError, RuntimeError, ValueError):
    """A replica read distributed input, which is read outside and passed to the replicas.

    A RuntimeError like other calls in the wrong context, and a ValueError as in TensorFlow.
    """


class PeerLostError(DetailedError, RuntimeError):
    """Another worker is lost, and this one cannot go on without it.

    Attributes:
        peer: Which one, and its address: "worker 1 (10.0.0.2:2222)".
        reason: What is known of it: it died, it stopped answering, it left with an error.
        since: When it was last heard of, in seconds as `time.time()` counts them, if known.
    """

    def __init__(self, peer: str, reason: str, since: float | None = None) -> None:
        super().__init__(f"{peer} {reason}.")
        self.peer = peer
        self.reason = reason
        self.since = since


class CollectiveMismatchError(DetailedError, RuntimeError):
    """The workers have made different calls together.

    Attributes:
        places: Where each worker is, and what this one has called.
    """

    def __init__(self, places: tuple[str, ...]) -> None:
        super().__init__(
            "the workers have made different common calls, and may have combined values that do "
            "not belong together. All of them must make the calls that combine values of all "
            "workers (strategy.run, reduce, gather, the result() of a metric), the same ones in "
            "the same order; only what is done with the results may differ."
        )
        self.places = places


class CollectiveTimeoutError(DetailedError, TimeoutError):
    """The workers wait for each other in different places.

    Attributes:
        seconds: How long they have waited.
        places: Where each worker is, one line for each that matters.
    """

    def __init__(self, seconds: float, places: tuple[str, ...]) -> None:
        super().__init__(
            f"the workers have waited for each other for {seconds:.0f} s, in different places. All "
            "of them must make the calls that combine values of all workers (strategy.run, reduce, "
            "gather, the result() of a metric), the same ones in the same order."
        )
        self.seconds = seconds
        self.places = places


class ClosureCancelledError(DistribaxError, RuntimeError):
    """A scheduled function was not run, because another one had failed before its turn."""


class WorkersLostError(DistribaxError, RuntimeError):
    """Scheduled functions cannot be run: the workers are gone and do not come back."""


class RemoteError(DistribaxError, RuntimeError):
    """An exception of a worker whose own type cannot be brought here; the text says what it was."""


class ParameterServerError(DetailedError, RuntimeError):
    """A parameter server could not do what it was asked; nothing of that push was applied.

    Attributes:
        server: The server's index.
        kind: The name of the exception's type on the server.
        text: Its message.
    """

    def __init__(self, server: int, kind: str, text: str) -> None:
        super().__init__(f"parameter server {server}: {kind}: {text}")
        self.server = server
        self.kind = kind
        self.text = text


class ParameterServerUnreachableError(DetailedError, ConnectionError):
    """A parameter server did not answer in time.

    Attributes:
        server: The server's index.
        endpoint: Where it was expected, if that is known.
        seconds: How long was waited.
        reason: What went wrong last.
    """

    def __init__(self, server: int, endpoint: str, seconds: float, reason: str) -> None:
        super().__init__(
            f"parameter server {server} ({endpoint or 'at an unknown address'}) did not answer "
            f"within {seconds:g} s; the last error: {reason}. Is its process running, and can "
            "its address be reached from here? The time is the parameter client's `timeout`, which "
            "DISTRIBAX_SERVER_ANSWER_SECONDS sets for strategies."
        )
        self.server = server
        self.endpoint = endpoint
        self.seconds = seconds
        self.reason = reason


class ParametersLostError(DetailedError, RuntimeError):
    """A parameter server was restarted and does not have the parameters any more.

    Attributes:
        server: The server's index.
        reason: What is missing, and why.
    """

    def __init__(self, server: int, reason: str) -> None:
        super().__init__(
            f"parameter server {server} lacks parameters: {reason}. If it was restarted, create "
            "the variables again and restore them, for example with "
            "dx.Checkpoint(...).restore(...). To be spared this, turn snapshots on "
            "(snapshot_dir and snapshot_interval)."
        )
        self.server = server
        self.reason = reason
