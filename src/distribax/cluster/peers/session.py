"""This process's part in a running cluster: what it does when a worker is lost, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

import jax

from distribax.cluster.peers import transport
from distribax.cluster.peers.interrupt import Interrupt
from distribax.cluster.peers.meeting import Meeting
from distribax.cluster.peers.tunnel import Tunnel
from distribax.cluster.peers.watch import Loss, Watch
from distribax.errors import explain_with, note_loss
from distribax.jax_private import processes
from distribax.types import STUCK_EXIT_CODE

# From the loss of a worker until a call that it has broken must have raised.
_UNWIND_SECONDS: Final = 5.0
_CUT_PAUSE_SECONDS: Final = 0.2
_GIVE_UP_SECONDS: Final = 0.5
# How long a worker whose program has ended stays, for others that are about to end as well.
_LINGER_SECONDS: Final = 5.0
_EXIT_SECONDS: Final = 10.0
_TELL_SECONDS: Final = 0.2
# An error of JAX, and whether the connection between processes is the matter, or may be.
_OF_JAX: Final = re.compile(r"[A-Z_]+: |Unable to initialize backend")
_BROKEN: Final = re.compile(
    r"gloo|nccl|\bUNAVAILABLE\b|\bCANCELLED\b|connection (closed|re)|socket closed", re.IGNORECASE
)
_LATE: Final = "DEADLINE_EXCEEDED"
_LIBRARIES: Final = tuple(
    str(Path(module).parent) for module in (str(jax.__file__), str(Path(__file__).parents[1]))
)


class Session:
    """Holds the watch over the other workers and the way to JAX's coordination service.

    Args:
        meeting: How the workers have met.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._pid = os.getpid()
        self._meeting = meeting
        self._listening: frozenset[transport.Endpoint] = frozenset()
        self._failed = False
        self._last_words = "it did not connect"
        self._connected = threading.Event()
        self._interrupt = Interrupt()
        self._letting_go = threading.Lock()
        self._let_go_done = False
        host, _, port = meeting.address.rpartition(":")
        # The service is in the leader's own process.
        self._tunnel = None if meeting.own == 0 else Tunnel(host.strip("[]"), int(port))
        self._watch = Watch(meeting, self._on_loss)
        os.register_at_fork(after_in_child=self._in_child)
        previous = sys.excepthook
        sys.excepthook = lambda *error: self._on_uncaught(previous, *error)
        # Runs before JAX's own, which was registered earlier and would wait for the others.
        atexit.register(self._at_exit)

    def connect(self, seconds: float) -> None:
        """Connects JAX's processes; from now on errors of JAX name the worker that was lost."""
        meeting = self._meeting
        address = meeting.address if self._tunnel is None else self._tunnel.address
        failures: list[Exception] = []

        def start() -> None:
            try:
                processes.connect_processes(address, len(meeting.members), meeting.own)
            except Exception as error:
                failures.append(error)
            self._connected.set()

        # Not in this thread: if a worker is lost now, nobody could end the wait.
        threading.Thread(target=start, name="distribax-connect", daemon=True).start()
        deadline = time.monotonic() + seconds
        while not self._connected.wait(_CUT_PAUSE_SECONDS):
            if self._watch.loss is not None:
                raise self._watch.loss.error()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"JAX's processes did not connect within {seconds:g} s, although all workers "
                    f"are here. {meeting.members[0].name} serves them on {meeting.address}: can "
                    "the others reach that port?"
                )
        if failures:
            raise self.explained(failures[0])
        explain_with(self.explained)
        processes.wait_with(self._wait)
        self._listening = transport.listening()

    def backend_started(self) -> None:
        """Finds out where the collectives listen, which JAX has started since `connect`."""
        self._watch.say_where(transport.listening() - self._listening)

    def explained(self, error: Exception) -> Exception:
        """Returns an error that names the lost worker, if that may be behind `error`; else `error`.

        A program fails before it is known why; so this waits for what the watch finds out.
        """
        text = str(error)
        is_broken = _BROKEN.search(text) is not None
        known = _NETWORK in getattr(error, "__notes__", ())
        if known or not _OF_JAX.match(text) or not (is_broken or _LATE in text):
            return error
        ended = self._watch.ended
        patience = 1.0 if ended else self._watch.longest_silence
        loss = self._watch.wait_for_loss(patience if is_broken else 0.0)
        if loss is None and ended and is_broken:
            loss = Loss(ended, _ENDED)
        if loss is None:
            if is_broken:
                error.add_note(_NETWORK)
            return error
        named = loss.error()
        named.__cause__ = error
        return named

    def _wait(self, wait: Callable[[Any], Any], argument: Any) -> Any:
        """Waits for something of JAX's, as long as all workers are there."""
        try:
            return self._interrupt.wait(wait, argument)
        except Exception as error:
            raise self.explained(error)  # noqa: B904

    # When a worker is lost.

    def _on_loss(self, loss: Loss) -> None:
        at = _waiting_calls()
        note_loss(loss.error())
        self._let_go()
        unwind = threading.Thread(
            target=self._unwind, args=(loss, at), name="distribax-unwind", daemon=True
        )
        # Python starts no thread when it is about to end.
        with contextlib.suppress(RuntimeError):
            unwind.start()

    def _let_go(self) -> None:
        """Makes every call fail that waits for another process, and every later one too."""
        # The lock keeps the end of this process from overtaking: a thread must not be in C++ then.
        with self._letting_go:
            if self._let_go_done:
                return
            transport.cut(self._watch.endpoints)
            if self._connected.is_set():
                processes.cancel_coordination()
            # Only now: as long as JAX relied on these connections, their end was its own.
            if self._tunnel is not None:
                self._tunnel.close()
            self._let_go_done = True

    def _unwind(self, loss: Loss, before: dict[int, tuple[FrameType, int]]) -> None:
        """Ends this process if a call that waited at the loss still waits after some seconds."""
        deadline = time.monotonic() + _UNWIND_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_CUT_PAUSE_SECONDS)
            # A connection may have been on the way.
            transport.cut(self._watch.endpoints)
            # Most waits have ended with an error of their own by now, which says more.
            self._interrupt.end_waits(_GIVE_UP_SECONDS, loss.error)
        now = _waiting_calls()
        stuck = [now[thread][0] for thread in now if now[thread] == before.get(thread)]
        del now, before
        while not stuck:
            # What is still to be waited for may never come either.
            time.sleep(_GIVE_UP_SECONDS)
            self._interrupt.end_waits(_UNWIND_SECONDS, loss.error)
        error = loss.error()
        error.add_note(
            "It could not be raised: the worker waits in a call that cannot be interrupted, so it "
            f"ends here, with exit code {STUCK_EXIT_CODE}."
        )
        print("Traceback (most recent call last):", file=sys.stderr)
        traceback.print_stack(stuck[0])
        traceback.print_exception(error)
        _flush()
        os._exit(STUCK_EXIT_CODE)

    # When this process ends.

    def _on_uncaught(
        self,
        previous: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid or hasattr(sys, "ps1"):
            # An interactive session goes on.
            previous(kind, error, trace)
            return
        if isinstance(error, Exception) and (named := self.explained(error)) is not error:
            previous(type(named), named, None)
        else:
            previous(kind, error, trace)
        self._failed = True
        self._last_words = "".join(traceback.format_exception_only(error))
        # At the exit, so that a launcher hears of this first and not of what it does to the others;
        # but an exit may wait for other threads.
        timer = threading.Timer(_TELL_SECONDS, self._tell)
        timer.daemon = True
        timer.start()

    def _tell(self) -> None:
        if self._watch.loss is None:
            self._watch.say_failed(self._last_words)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._failed |= not self._connected.is_set()
        if not self._failed and self._watch.loss is None:
            self._end_together()
        if self._failed or self._watch.loss is not None:
            self._tell()
            self._let_go()
            processes.forget_processes()
            # Whatever still waits for a lost worker now, in C++, is not waited for.
            faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True)

    def _end_together(self) -> None:
        """Ends without harm to the others, which may end earlier or much later."""
        with contextlib.suppress(Exception):
            jax.block_until_ready(jax.live_arrays())
        self._watch.say_done()
        self._watch.wait_for_ends(_LINGER_SECONDS)
        if self._meeting.own == 0:
            # The others need the coordination service that runs here; but in no collective should
            # they wait for this worker.
            transport.cut(self._watch.endpoints)
            self._watch.wait_for_ends(None)
        if self._watch.loss is None:
            jax.distributed.shutdown()
            if self._tunnel is not None:
                self._tunnel.close()
            self._watch.close()

    def _in_child(self) -> None:
        self._watch.drop()
        if self._tunnel is not None:
            self._tunnel.drop()


_NETWORK: Final = "distribax: all workers still answer. Is the network the matter?"
_ENDED: Final = (
    "has ended, but this worker still needs it: all workers must take the same steps, with the "
    "same number of batches"
)


def _waiting_calls() -> dict[int, tuple[FrameType, int]]:
    """Returns where each thread is that runs code of JAX or distribax, and at which instruction."""
    daemons = {thread.ident for thread in threading.enumerate() if thread.daemon}
    return {
        ident: (frame, frame.f_lasti)
        for ident, frame in sys._current_frames().items()
        if ident not in daemons and frame.f_code.co_filename.startswith(_LIBRARIES)
    }


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
