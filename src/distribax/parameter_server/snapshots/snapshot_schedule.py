"""When a server's snapshots are taken: regularly, soon after a creation, and on demand."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from distribax.parameter_server.protocol.server_status import SnapshotStatus
from distribax.parameter_server.server.private_files import make_private
from distribax.parameter_server.server.store import Store
from distribax.parameter_server.server.tally import OPTIMIZER_UPDATE
from distribax.parameter_server.snapshots import snapshot_file, snapshot_state

_SETTLE_SECONDS: Final = 0.25
"""Creations come in groups: a snapshot is taken when there was none for so long."""

_TOUCH_SECONDS: Final = 3600.0
"""How often a folder is marked as used, also if there is nothing new to save."""

_logger = logging.getLogger(__name__)


class _StoreState(NamedTuple):
    """What has been done to a store: a number for all of it, and one for what was created."""

    version: int
    structure: int


class SnapshotSchedule:
    """Takes snapshots of a store, and restores it from the newest.

    Args:
        store: The store.
        folder: Where the snapshots are kept; None takes none.
        interval: How many seconds pass between two; None takes them on demand only.
        token: The cluster's secret, under which they are authenticated.
    """

    def __init__(
        self, store: Store, folder: Path | None, interval: float | None, token: bytes
    ) -> None:
        if interval is not None and not interval > 0:
            raise ValueError(f"snapshot_interval={interval}, expected more than 0 s or None.")
        self._store = store
        self._folder = folder
        self._token = token
        self._interval = interval if folder is not None else None
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._time: float | None = None
        self._saved = _StoreState(0, 0)
        """The store's state in the last snapshot."""
        self._updates = 0
        self._restored: Path | None = None
        self._damaged: list[str] = []
        self._error: str | None = None

    @property
    def is_on(self) -> bool:
        """Whether snapshots can be taken."""
        return self._folder is not None

    def start(self) -> None:
        """Restores the store from the newest snapshot if there is one, and begins to take more."""
        if self._folder is not None:
            self._restore(self._folder)
            self._keep_tally(self._folder)
        if self._interval is not None:
            self._thread = threading.Thread(
                target=self._run, name="distribax-parameters-snapshots", daemon=True
            )
            self._thread.start()

    def snapshot(self) -> Path:
        """Takes a snapshot now and returns its path."""
        if self._folder is None:
            raise ValueError(
                "This parameter server takes no snapshots: start it with snapshot_dir=... ."
            )
        with self._writing:
            with self._store.lock:
                current = _StoreState(self._store.version, self._store.structure)
                if self._path is not None and current == self._saved:
                    return self._path
                state = snapshot_state.take(self._store)
            self._path = snapshot_file.write(self._folder, current.version, state, self._token)
            self._keep_tally(self._folder)
            self._saved = current
            self._updates = state.header["counts"].get(OPTIMIZER_UPDATE, 0)
            self._time, self._error = time.time(), None
            return self._path

    def status(self) -> SnapshotStatus:
        """Returns which snapshots were taken and read."""
        return {
            "snapshot": None if self._path is None else str(self._path),
            "snapshot_time": self._time,
            "snapshot_updates": self._updates,
            "snapshot_error": self._error,
            "restored": None if self._restored is None else str(self._restored),
            "damaged": list(self._damaged),
        }

    def describe_origin(self) -> str:
        """Returns what the server began with, for messages about what is missing."""
        if self._restored is not None:
            return f"it was restored from {self._restored}"
        if self._damaged:
            return "it was started with nothing, as " + "; ".join(self._damaged)
        return "it was started with nothing, as there was no snapshot"

    def close(self) -> None:
        """Takes no more snapshots; one that is being written is finished."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _restore(self, folder: Path) -> None:
        """Fills the store from the newest snapshot that can be used, and sets the others aside.

        Whatever is wrong with a snapshot, it must not keep the server from starting: Ray would
        start it again for ever.
        """
        for path in snapshot_file.list_files(folder):
            try:
                snapshot_state.restore(self._store, snapshot_file.read(path, self._token))
            except Exception as error:
                text = f"{path}: {type(error).__name__}: {error}"
                self._damaged.append(text)
                snapshot_file.set_aside(path)
                _logger.warning(
                    "A snapshot of a parameter server is set aside, it cannot be restored: %s", text
                )
                continue
            self._restored = self._path = path
            _logger.info("A parameter server was restored from its snapshot %s.", path)
            self._updates = self._store.tally.counts[OPTIMIZER_UPDATE]
            self._saved = _StoreState(self._store.version, self._store.structure)
            return

    def _keep_tally(self, folder: Path) -> None:
        """Has changes counted in the folder, too, if it can be used."""
        with contextlib.suppress(OSError), self._store.lock:
            make_private(folder)
            self._store.tally.keep_in(folder)

    def _run(self) -> None:
        assert self._interval is not None
        due = time.monotonic() + self._interval
        seen = self._saved.structure
        touch_at = 0.0
        while not self._ended.wait(min(_SETTLE_SECONDS, max(0.0, due - time.monotonic()))):
            if time.monotonic() >= touch_at:
                touch_at = time.monotonic() + _TOUCH_SECONDS
                self._touch()
            structure = self._store.structure
            settled = structure == seen and structure != self._saved.structure
            seen = structure
            if not settled and time.monotonic() < due:
                continue
            self._try()
            due = time.monotonic() + self._interval

    def _touch(self) -> None:
        """Marks the folder as used: old ones are removed."""
        assert self._folder is not None
        with contextlib.suppress(OSError):
            os.utime(self._folder)

    def _try(self) -> None:
        try:
            self.snapshot()
        except Exception as error:  # A full disk must not end training; the next may succeed.
            self._error = f"{type(error).__name__}: {error}"
            # The next attempt is after the interval.
            self._saved = _StoreState(0, self._store.structure)
            _logger.warning("A snapshot of a parameter server failed: %s", self._error)
