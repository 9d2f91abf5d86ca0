"""A caller's permission to touch its memory, which it can take back while a call hangs."""

from __future__ import annotations

import threading


class Lease:
    """What a `get` or `put` needs to touch the caller's pages, where the caller may leave before it returns.

    Once `end` has returned, no byte of the pages is written any more, and nothing that is read from them is
    committed: an abandoned call may hang for as long as it likes. Bytes that a device may deliver late are
    read to memory of the store's own and copied while the lease is held.
    """

    __slots__ = ("_changed", "_ended", "_holders", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a signal may raise in the condition's own code
        self._changed = threading.Condition(self._lock)
        self._holders = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the caller has taken the permission back."""
        return self._ended

    def enter(self) -> bool:
        """Hold the lease for as long as a copy takes, or learn that it has ended; `leave` follows a True."""
        with self._lock:
            if self._ended:
                return False
            self._holders += 1
            return True

    def leave(self) -> None:
        """Let go of the lease."""
        with self._lock:
            self._holders -= 1
            if self._ended and not self._holders:
                self._changed.notify_all()

    def end(self) -> None:
        """Take the permission back; copies under way are waited for."""
        with self._lock:
            self._ended = True
            while self._holders:
                self._changed.wait()
