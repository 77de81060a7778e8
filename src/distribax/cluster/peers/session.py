"""This process's part in a running cluster: what it does when a worker is lost, and how it ends."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Final

import jax

from distribax.cluster.peers.last_words import LastWords, flush_output
from distribax.cluster.peers.meeting import Meeting
from distribax.cluster.peers.watch import Loss, Watch
from distribax.errors import CollectiveMismatchError, CollectiveTimeoutError

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_LOOK_SECONDS: Final = 0.2
# How long a worker whose program has ended stays, for others that are about to end as well.
_LINGER_SECONDS: Final = 5.0
_EXIT_SECONDS: Final = 10.0
_ASK_SECONDS: Final = 2.0
_TELL_SECONDS: Final = 0.2
# Years, in seconds: XLA ends a process that it takes for lost. The watch finds out much sooner.
_NEVER: Final = 10**8
# An error of JAX that a broken connection between processes may be behind.
_BROKEN: Final = re.compile(
    r"([A-Z_]+: |Unable to initialize backend).*"
    r"(gloo|nccl|\bUNAVAILABLE\b|\bCANCELLED\b|connection (closed|re)|socket closed)",
    re.IGNORECASE | re.DOTALL,
)
_logger = logging.getLogger(__name__)


class Session:
    """Holds the watch over the other workers, and connects JAX's processes.

    Args:
        meeting: How the workers have met.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._pid = os.getpid()
        self._meeting = meeting
        self._failed = False
        self._last_error = "it did not connect"
        self._connected = threading.Event()
        self._last_words = LastWords(meeting.members[meeting.own])
        self._watch = Watch(meeting, self._on_loss, self._on_stuck)
        os.register_at_fork(after_in_child=self._watch.drop)
        previous: _Hook = sys.excepthook
        sys.excepthook = lambda *error: self._on_uncaught(previous, *error)
        # Runs before JAX's own, which was registered earlier.
        atexit.register(self._at_exit)

    def connect(self, seconds: float) -> None:
        """Connects JAX's processes.

        Args:
            seconds: How long to wait for it.

        Raises:
            PeerLostError: Another worker is lost meanwhile. Later, the loss ends the process.
            RuntimeError: They did not connect in time.
        """
        meeting = self._meeting
        done: Future[None] = Future()

        def start() -> None:
            try:
                connect_processes(meeting.address, len(meeting.members), meeting.own)
            except Exception as error:
                done.set_exception(error)
            else:
                self._connected.set()
                done.set_result(None)

        # Not in this thread: if a worker is lost now, nobody could end the wait.
        threading.Thread(target=start, name="distribax-connect", daemon=True).start()
        deadline = time.monotonic() + seconds
        while not wait([done], _LOOK_SECONDS).done:
            if self._watch.loss is not None:
                raise self._watch.loss.make_error()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"JAX's processes did not connect within {seconds:g} s, although all workers "
                    f"have joined. {meeting.members[0]} serves them on {meeting.address}: can the "
                    "others reach that port?"
                )
        done.result()
        if self._watch.loss is not None:
            # It was too early for `_on_loss`.
            self._last_words.end_process(self._watch.loss.make_error())
        name, others = meeting.members[meeting.own], len(meeting.members) - 1
        _logger.info("%s is connected with %d other workers", name, others)

    def _on_loss(self, loss: Loss) -> None:
        # Before that, `connect` raises it.
        if self._connected.is_set():
            self._last_words.end_process(loss.make_error())

    def _on_stuck(self, error: CollectiveMismatchError | CollectiveTimeoutError) -> None:
        self._last_words.end_process(error)

    # When this process ends.

    def _on_uncaught(
        self,
        previous: _Hook,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid or hasattr(sys, "ps1"):
            # An interactive session goes on.
            previous(kind, error, trace)
            self._failed = os.getpid() != self._pid
            return
        if self._connected.is_set() and _BROKEN.match(str(error)):
            self._last_words.trace = trace
            self._find_cause(error)
        previous(kind, error, trace)
        self._failed = True
        self._last_error = "".join(traceback.format_exception_only(error))
        # At the exit, so that a launcher hears of this first and not of what it does to the others;
        # but an exit may wait for other threads.
        timer = threading.Timer(_TELL_SECONDS, self._tell)
        timer.daemon = True
        timer.start()

    def _find_cause(self, error: BaseException) -> None:
        """Ends the process if a lost worker is behind the error, which may have come earlier.

        A program fails before it is known why; so this waits for what the watch finds out.
        """
        ended = self._watch.ended
        loss = self._watch.wait_for_loss(1.0 if ended else self._watch.longest_silence)
        if loss is None and ended:
            loss = Loss(ended, _ENDED, time.time())
        if loss is None:
            places = "".join(f"\n  {place}" for place in self._watch.ask_places(_ASK_SECONDS))
            error.add_note(
                "distribax: all workers still answer. Do they make different calls, or is there a "
                f"network problem?{places}"
            )
        else:
            self._last_words.end_process(loss.make_error())

    def _tell(self) -> None:
        if self._watch.loss is None:
            self._watch.say_failed(self._last_error)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            # A forked process must not end as JAX does: it would wait for threads it does not have.
            flush_output()
            os._exit(int(self._failed))
        if self._failed or not self._connected.is_set():
            self._tell()
            # Whatever still waits for another worker then, in C++, is not waited for.
            faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True)
            return
        # Ends without harm to the others, which may end earlier or much later.
        try:
            jax.block_until_ready(jax.live_arrays())
        except Exception as error:
            # Steps that the program has started and not waited for.
            if _BROKEN.match(str(error)):
                self._find_cause(error)
        self._watch.say_done()
        self._watch.wait_for_ends(_LINGER_SECONDS)
        if self._watch.loss is not None:
            self._last_words.end_process(self._watch.loss.make_error())
        jax.distributed.shutdown()
        self._watch.close()


def connect_processes(address: str, num_processes: int, process_id: int) -> None:
    """Connects the processes of `jax.distributed`, whose service is at that address.

    The first process also starts a service, as JAX does it: nobody calls that one.
    """
    jax.distributed.initialize(
        address,
        num_processes=num_processes,
        process_id=process_id,
        initialization_timeout=_NEVER,
        heartbeat_timeout_seconds=_NEVER,
        coordinator_bind_address="127.0.0.1:0",
    )


_ENDED: Final = (
    "has ended, but this worker still needs it: all workers must take the same steps, with the "
    "same number of batches"
)
