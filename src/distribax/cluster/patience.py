"""Waiting for JAX in a way that can be given up.

Whoever waits in JAX for a value waits in C++, and nothing can call it back if the value never
comes: a transfer that another worker has begun and not ended is never given up by Gloo. So a
thread of ours waits there, and the caller waits for that thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Wait = Callable[[], object]


class _Task:
    """One wait: ended by the waiting thread, or given up by somebody else."""

    def __init__(self, wait: Wait) -> None:
        self.wait: Wait | None = wait
        self.error: BaseException | None = None
        self.given_up = False
        self.over = threading.Semaphore(0)


class _Waiter(threading.Thread):
    """Waits on behalf of one other thread."""

    def __init__(self) -> None:
        super().__init__(name="distribax-waiter", daemon=True)
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            assert task.wait is not None
            try:
                task.wait()
            except BaseException as error:
                task.error = error
            # What is waited for must not be kept alive by this thread.
            task.wait = None
            task.over.release()
            del task


class Patience:
    """Lets threads wait until they are told to give up."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._tasks: set[_Task] = set()
        self._waiters: set[_Waiter] = set()
        self._given_up = False

    def wait(self, wait: Wait) -> bool:
        """Calls `wait`; returns False if that was given up, and raises what it raises."""
        waiter = getattr(self._own, "waiter", None)
        if waiter is None:
            waiter = self._own.waiter = _Waiter()
            with self._lock:
                self._waiters.add(waiter)
        task = _Task(wait)
        with self._lock:
            if self._given_up:
                return False
            self._tasks.add(task)
        # Set anew once the wait is over: if it is given up, the thread is not to be had any more.
        self._own.waiter = None
        waiter.tasks.put(task)
        task.over.acquire()
        with self._lock:
            self._tasks.discard(task)
        if task.given_up:
            return False
        self._own.waiter = waiter
        if task.error is not None:
            raise task.error
        return True

    def give_up(self) -> None:
        """Ends all waits, and those to come."""
        with self._lock:
            self._given_up = True
            for task in self._tasks:
                task.given_up = True
                task.over.release()

    def close(self, seconds: float) -> None:
        """Ends the threads; those that still wait are left alone after some seconds."""
        for waiter in self._waiters:
            waiter.tasks.put(None)
        for waiter in self._waiters:
            waiter.join(seconds)
