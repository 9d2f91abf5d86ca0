"""What the parts of a tier share: lock, index, host pages, counters."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hicache_tier.errors import ClosedError, HiCacheTierError

from .counters import Counters
from .index import HostIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_tier.host_pool import HostPool

    from .lane import Lane
    from .lock import PageLock
    from .policy import Settings
    from .store import StoreLike


class Core:
    """State of one tier behind one lock.

    The lock is held for book-keeping alone, never during a copy or a call of the store, so whoever takes it
    waits for microseconds.

    Attributes
    ----------
    lock : threading.Lock
    done : threading.Condition
        Told whenever work has ended; what waits for work waits here.
    owner : str
        Name under which the tier's host pages are allocated.
    """

    def __init__(self, host: HostPool, store: StoreLike, settings: Settings) -> None:
        self.host = host
        self.store = store
        self.settings = settings
        self.lock = threading.Lock()
        self.done = threading.Condition(self.lock)
        self.counters = Counters()
        self.index = HostIndex()
        self.lanes: list[Lane] = []
        self.locks: set[PageLock] = set()
        self.owned_pages = 0
        self.closed = False
        self.owner = f"hicache_tier.tier of process {os.getpid()}"
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a child that inherited the tier over fork."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Refuse a call from a child that was forked from the tier's process: it has none of the threads."""
        if self.forked:
            raise ClosedError(
                f"this tier belongs to process {self._pid}; process {os.getpid()} was forked from it and has "
                "none of its threads. Make a Tier of its own in the child, or start it with spawn."
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; before, see to missed deadlines; after, give pages back."""
        self.check_process()
        with self.lock:
            self.expire()
            try:
                yield
            finally:
                self.settle()

    @contextmanager
    def section(self) -> Iterator[None]:
        """Hold the lock of a tier that is open."""
        with self.held():
            if self.closed:
                raise ClosedError("this tier was closed.")
            yield

    def expire(self) -> None:
        """Give up calls that missed their deadline."""
        now_s = time.monotonic()
        for lane in self.lanes:
            lane.expire(now_s)

    def wait(self, until_s: float) -> bool:
        """Let go of the lock until something has ended; False once `until_s` (monotonic) has passed."""
        now_s = time.monotonic()
        if now_s >= until_s:
            return False
        next_s = min(lane.expires_in_s(now_s) for lane in self.lanes)
        self.settle()
        self.done.wait(min(until_s - now_s, next_s + 1e-3))
        self.expire()
        return True

    def settle(self) -> None:
        """Give released pages back to the pool and tell those who wait."""
        released = self.index.released
        if released:
            self.index.released = []
            self.owned_pages -= len(released)
            try:
                self.host.free(as_tensor(released), owner=self.owner)
            except HiCacheTierError as error:  # the pool was closed before the tier
                self.counters.add(f"host.not_freed.{error.kind}", len(released))
        self.done.notify_all()

    def take_free(self, wanted: int) -> list[int]:
        """Allocate up to `wanted` pages of those that are free."""
        self.settle()
        count = wanted
        while count > 0:
            pages = self.host.alloc(count, owner=self.owner)
            if pages is not None:
                self.owned_pages += count
                return list(map(int, pages.tolist()))
            count = min(count - 1, self.host.free_pages)  # another owner may take some in between: ask again
        return []


def as_tensor(pages: list[int]) -> torch.Tensor:
    """Return page numbers as the int64 tensor that pools and stores take."""
    return torch.tensor(pages, dtype=torch.int64)
