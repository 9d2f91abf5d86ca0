"""A place where calls wait until they are let through."""

from __future__ import annotations

import threading


class Gate:
    """Holds what comes to it until it is opened: storage that hangs, and comes back.

    Parameters
    ----------
    closed : bool
        Whether it holds anything yet.

    Attributes
    ----------
    waiting : int
        Calls held now.
    """

    def __init__(self, *, closed: bool = True) -> None:
        self.waiting = 0
        self._open = not closed
        self._passes = 0
        self._changed = threading.Condition()

    def __call__(self, *_: object) -> None:
        """Wait for the gate to open, or for one pass."""
        with self._changed:
            self.waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open or self._passes)
            self._passes -= not self._open
            self.waiting -= 1
            self._changed.notify_all()

    def let_one_pass(self) -> None:
        """Let one call through, now or when it comes."""
        with self._changed:
            self._passes += 1
            self._changed.notify_all()

    def open(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hold what comes from now on."""
        with self._changed:
            self._open, self._passes = False, 0

    def wait_for(self, count: int = 1, timeout_s: float = 5.0) -> None:
        """Wait until `count` calls are held; raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.waiting >= count, timeout_s):
                raise TimeoutError(f"{self.waiting} calls are held after {timeout_s} s, not {count}")
