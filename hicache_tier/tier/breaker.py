"""A breaker that stops calling a store that hangs, and finds out by itself when it is back."""

from __future__ import annotations

_MAX_DOUBLINGS = 5


class Breaker:
    """Closed: calls go through. Open: none does, but a probe now and then; one that succeeds closes it.

    Parameters
    ----------
    probe_interval_s : float
        Seconds from opening to the first probe; doubled after each failed one, up to 32 times this.
    """

    __slots__ = ("_failures", "_opened_s", "_probe_interval_s", "_retry_s", "times_opened")

    def __init__(self, probe_interval_s: float) -> None:
        self._probe_interval_s = probe_interval_s
        self._failures = 0
        self._opened_s = 0.0
        self._retry_s = 0.0
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are being refused."""
        return self._failures > 0

    def due(self, now_s: float) -> bool:
        """Whether a call would be let through now."""
        return not self.is_open or now_s >= self._retry_s

    def allow(self, now_s: float) -> bool:
        """Let a call through, or not; while open, one probe an interval."""
        if not self.due(now_s):
            return False
        if self.is_open:
            self._retry_s = now_s + self._wait_s()
        return True

    def trip(self, now_s: float) -> None:
        """Open, or stay open longer: a call missed its deadline."""
        self.times_opened += not self.is_open
        self._failures += 1
        self._opened_s = now_s
        self._retry_s = now_s + self._wait_s()

    def succeed(self, started_s: float) -> None:
        """Close after a call that returned in time; one from before the trip proves nothing."""
        if started_s >= self._opened_s:
            self._failures = 0

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until the next probe may go."""
        return max(0.0, self._retry_s - now_s) if self.is_open else 0.0

    def _wait_s(self) -> float:
        return float(self._probe_interval_s * 2 ** min(self._failures - 1, _MAX_DOUBLINGS))
