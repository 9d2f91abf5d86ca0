"""What is counted: for SGLang's own statistics, and for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import TYPE_CHECKING

from .verdicts import kinds_of, moved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier.metrics import Instruments

    from .health import Health
    from .pool import Pages, Pool

_KEPT = 4096  # batches that SGLang may fetch statistics of


class Tally:
    """Counters of one adapter.

    Parameters
    ----------
    rank : str
    instruments : Instruments or None
    """

    def __init__(self, rank: str, instruments: Instruments | None) -> None:
        self._rank, self._instruments = rank, instruments
        self._lock = threading.Lock()
        self._batches: dict[str, deque[tuple[int, float]]] = {
            "get": deque(maxlen=_KEPT),
            "set": deque(maxlen=_KEPT),
        }
        self._evicted: Counter[str] = Counter()
        self._gauges: set[tuple[str, tuple[str, ...]]] = set()
        self.reasons: Counter[tuple[str, str]] = Counter()

    def call(self, op: str, parts: Sequence[Pages], seconds: float, *, late: bool) -> None:
        """Count one call: its pages by reason, its bytes, its time."""
        pages = nbytes = 0
        with self._lock:
            for part in parts:
                kinds, name = part.kinds or kinds_of(part.status), part.pool.view.name
                done = moved(kinds)
                size = done * part.pool.page_nbytes
                pages += done
                nbytes += size
                for kind, count in kinds.items():
                    self.reasons[op, kind] += count
                    self._add("hicache_tier_pages", (name, op, kind), count)
                self._add("hicache_tier_bytes", (name, op), size)
            if pages:
                self._batches[op].append((pages, nbytes / max(seconds, 1e-9) / 1e9))
        if late:
            self._add("hicache_tier_late_calls", (op,), 1)
        if self._instruments is not None:
            self._instruments.observe("hicache_tier_call_seconds", (self._rank, op), seconds)

    def refused(self, op: str, pool: str, reason: str, pages: int) -> None:
        """Count pages of a call that was not made."""
        with self._lock:
            self.reasons[op, reason] += pages
        self._add("hicache_tier_pages", (pool, op, reason), pages)

    def lookup(self, asked: int, found: int) -> None:
        """Count the pages of a lookup."""
        with self._lock:
            self.reasons["exists", "hit"] += found
            self.reasons["exists", "miss"] += asked - found
        self._add("hicache_tier_lookup_pages", ("hit",), found)
        self._add("hicache_tier_lookup_pages", ("miss",), asked - found)

    def drain(self) -> dict[str, list[tuple[int, float]]]:
        """Return and forget what each batch since the last time moved: pages, and GB/s."""
        with self._lock:
            found = {op: list(batches) for op, batches in self._batches.items()}
            for batches in self._batches.values():
                batches.clear()
        return found

    def sample(self, pools: Sequence[Pool], health: Health, in_flight: dict[str, int]) -> None:
        """Set the gauges; asks the stores, so it may hang with them."""
        if self._instruments is None:
            return
        self._gauge("hicache_tier_breaker_open", ("get",), health.reads_open)
        self._gauge("hicache_tier_breaker_open", ("set",), health.writes_open)
        for op, calls in in_flight.items():
            self._gauge("hicache_tier_calls_in_flight", (op,), calls)
        if health.reads_open:
            return
        for pool in pools:
            stats, name = pool.store.stats(), pool.view.name
            self._gauge("hicache_tier_stored_pages", (name,), stats["pages"])
            self._gauge("hicache_tier_stored_bytes", (name,), stats["live_bytes"])
            self._gauge("hicache_tier_shared_pages", (name,), stats["pages_other_writers"])
            self._gauge("hicache_tier_capacity_bytes", (), stats["capacity_bytes"])
            new = stats["evictions"] - self._evicted[name]
            self._evicted[name] += new
            self._add("hicache_tier_evicted_pages", (name,), new)

    def end(self) -> None:
        """Set the gauges to 0: the registry may outlive what they told of."""
        for name, labels in list(self._gauges):
            self._gauge(name, labels, 0)

    def _add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        if self._instruments is not None and amount > 0:
            self._instruments.add(name, (self._rank, *labels), amount)

    def _gauge(self, name: str, labels: tuple[str, ...], value: float) -> None:
        if self._instruments is not None:
            self._gauges.add((name, labels))
            self._instruments.set(name, (self._rank, *labels), value)
