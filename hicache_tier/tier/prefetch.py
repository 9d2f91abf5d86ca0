"""Pages on their way from the store to the host tier, as the engine sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .index import State
from .policy import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .core import Core
    from .index import Entry
    from .reader import Fetch, Reader


class Prefetch:
    """Handle of one prefetch; made by `Tier.prefetch`.

    While it runs, the pages that it found and those that arrive stay in the host tier. Once it has ended they
    can be evicted like any others: lock what will be loaded.

    Attributes
    ----------
    keys : tuple[bytes, ...]
        What was asked for.
    """

    def __init__(self, core: Core, reader: Reader, keys: Sequence[bytes]) -> None:
        self.keys = tuple(keys)
        self.batches: list[Fetch] = []
        self._core = core
        self._reader = reader
        self._started_s = time.monotonic()
        self._entries: list[Entry] = core.index.ready_prefix(keys)
        self._arrived = len(self._entries)
        self._looking = True
        self._reason: str | None = None
        self._shortfall: str | None = None
        self._done = False
        core.index.pin(self._entries)
        core.index.touch(self._entries)

    def __repr__(self) -> str:
        state = (self._reason or "complete") if self._done else "under way"
        return f"Prefetch({self._arrived} of {len(self.keys)} pages, {state})"

    @property
    def done(self) -> bool:
        """Whether nothing more will arrive; once it is, `result` is final."""
        self._see_to_deadlines()
        return self._done

    @property
    def result(self) -> int:
        """Leading pages of `keys` in the host tier so far; never waits."""
        self._see_to_deadlines()
        return self._arrived

    @property
    def reason(self) -> str | None:
        """Why fewer than all pages arrived; None while it runs, and where all did.

        `absent` (the store has no more), `miss` (a page could not be read), `host_full`, `breaker_open`,
        `read_queue_full`, `lookup_failed`, `deadline`, `stopped` (by `wait` of `best_effort`), `timeout`,
        `cancelled`, `reset`, `closed`.
        """
        return self._reason

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait as the tier's prefetch policy says, then end; return the leading pages in the host tier.

        Parameters
        ----------
        timeout_s : float, optional
            Wait no longer than this, whatever the policy.

        Raises
        ------
        ClosedError
            In a forked child.
        """
        core = self._core
        stop, why = self._limit()
        if timeout_s is not None and time.monotonic() + timeout_s < stop():
            limit_s = time.monotonic() + timeout_s
            stop, why = (lambda: limit_s), "timeout"
        with core.held():
            while not self._done and core.wait(stop()):
                pass
            self.end(why)
            return self._arrived

    def cancel(self) -> int:
        """Stop: reads that have not begun are dropped; return the leading pages in the host tier."""
        with self._core.held():
            self.end("cancelled")
            return self._arrived

    def _see_to_deadlines(self) -> None:
        with self._core.held():
            pass

    def _limit(self) -> tuple[Callable[[], float], str]:
        """Return until when the policy waits (it may move on while reads arrive), and the reason after."""
        settings, begun_s = self._core.settings, self._started_s
        if settings.prefetch is PrefetchPolicy.BEST_EFFORT:
            return (lambda: begun_s), "stopped"
        if settings.prefetch is PrefetchPolicy.TIMEOUT:
            return (lambda: begun_s + settings.prefetch_timeout_s), "timeout"
        return (lambda: max(begun_s, self._reader.lane.progress_s) + 2 * settings.deadline_s), "deadline"

    # What follows is for the tier's own threads and needs its lock.

    @property
    def pending_pages(self) -> int:
        """Pages that have not arrived."""
        return 0 if self._done else len(self.keys) - self._arrived

    @property
    def ended(self) -> bool:
        """`done`, for those who have the lock."""
        return self._done

    def missing_keys(self) -> list[bytes]:
        """Return the keys that are not in the host tier."""
        index = self._core.index
        return [key for key in self.keys[len(self._entries) :] if index.get(key) is None]

    def begin(self, stored: set[bytes], room: Callable[[int], list[int]]) -> None:
        """Ask for the pages that the store has and the host tier has not."""
        if self._done:
            return
        index = self._core.index
        self._looking = False
        wanted = self._usable(stored)
        held = [entry for key in wanted if (entry := index.get(key)) is not None]
        index.pin(held)
        pages = room(len(wanted) - len(held))
        fresh: list[Entry] = []
        for position, key in enumerate(wanted, len(self._entries)):
            entry = index.get(key)
            if entry is None:
                if len(fresh) == len(pages):
                    self._shortfall = "host_full"
                    break
                parent = self.keys[position - 1] if position else None
                entry = index.add(key, parent, pages[len(fresh)])
                fresh.append(entry)
            elif (batch := self._reader.queued_batch(key)) is not None and batch not in self.batches:
                self.batches.append(batch)
            index.pin([entry])
            self._entries.append(entry)
        index.unpin(held)
        self.batches += self._reader.fetch(fresh)
        index.touch(self._entries)
        self.advance()

    def _usable(self, stored: set[bytes]) -> list[bytes]:
        """Return the keys that go on from those at hand without a hole, in the host tier or the store."""
        rest = self.keys[len(self._entries) :]
        for i, key in enumerate(rest):
            if key not in stored and self._core.index.get(key) is None:
                self._shortfall = "absent"
                return list(rest[:i])
        return list(rest)

    def advance(self) -> None:
        """Count what has arrived, and end where nothing more can."""
        while self._arrived < len(self._entries):
            state = self._entries[self._arrived].state
            if state is State.GONE:
                self.end("miss")
                return
            if state is State.FILLING:
                return
            self._arrived += 1
        if not self._looking:
            self.end(self._shortfall)

    def end(self, reason: str | None) -> None:
        """End, once; `reason` is kept where pages are missing."""
        if self._done:
            return
        self._done = True
        if self._arrived < len(self.keys):
            self._reason = reason
            short = len(self.keys) - self._arrived
            self._core.counters.add(f"prefetch.missing_pages.{reason}", short)
        self._core.counters.add("prefetch.arrived_pages", self._arrived)
        if self in self._reader.active:
            self._reader.active.remove(self)
        self._core.index.unpin(self._entries)
        self._reader.withdraw(self.batches)
        self._core.done.notify_all()
