"""Whether storage answers in time: a breaker for reads and one for writes."""

from __future__ import annotations

import threading
import time

from hicache_tier.tier.breaker import Breaker


class Health:
    """Opened by a call that misses its deadline; closed again by one that does not.

    A call that is late, a read or a write, makes both directions suspect. Reads are then tried out in the
    background, at once and again after each interval: they stay closed off only as long as they do not
    answer. For writes one call an interval is let through. While reads are closed off nothing is written.

    Parameters
    ----------
    probe_interval_s : float
    """

    def __init__(self, probe_interval_s: float) -> None:
        self._lock = threading.Lock()
        self._reads = Breaker(probe_interval_s)
        self._writes = Breaker(probe_interval_s)
        self._probe_at_once = False
        self.suspected = threading.Event()

    @property
    def reads_open(self) -> bool:
        """Whether reads are closed off."""
        return self._reads.is_open

    @property
    def writes_open(self) -> bool:
        """Whether writes are closed off."""
        return self._writes.is_open or self._reads.is_open

    @property
    def times_opened(self) -> int:
        """How often either was closed off."""
        return self._reads.times_opened + self._writes.times_opened

    def late(self) -> None:
        """Note that a call missed its deadline."""
        now_s = time.monotonic()
        with self._lock:
            self._probe_at_once |= not self._reads.is_open
            self._reads.trip(now_s)
            self._writes.trip(now_s)
        self.suspected.set()

    def allow_write(self) -> bool:
        """Let a write through, or not; while closed off one an interval, once reads answer."""
        if not self.writes_open:
            return True
        with self._lock:
            return not self._reads.is_open and self._writes.allow(time.monotonic())

    def written(self, started_s: float) -> None:
        """Note a write that returned in time."""
        if self._writes.is_open:
            with self._lock:
                self._writes.succeed(started_s)

    def probe_due(self) -> bool:
        """Whether reads should be tried out now; the caller does it."""
        with self._lock:
            if not self._reads.is_open:
                return False
            at_once, self._probe_at_once = self._probe_at_once, False
            return at_once or self._reads.allow(time.monotonic())

    def probed(self, started_s: float, *, ok: bool) -> None:
        """Note how a try ended."""
        with self._lock:
            if ok:
                self._reads.succeed(started_s)
            else:
                self._reads.trip(time.monotonic())
            if not self._reads.is_open:
                self.suspected.clear()
